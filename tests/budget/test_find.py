"""The search on small checkpoints whose guilty layers are known: what it finds, keeps and leaves behind."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import outliers
import pytest
from checkpoints import ENTITY_CASES, make_checkpoint

import encast
from encast import artifact
from encast.budget import Found, find, race, workshop
from encast.budget.plans import BF16, F32, INT8, Plan
from encast.budget.sample import Recorder, distance
from encast.data.datasets import Dataset, Labelled, Question, Sentence
from encast.errors import ArtifactError, InputError
from encast.quant import QuantSpec
from encast.scoring import score
from encast.tasks.tag import label_words

EMBED = {"head": "embed", "pooling": ("mean",), "normalize": True}
GUILTY = ["encoder.layer.0.output.dense", "encoder.layer.1.output.dense"]


@pytest.fixture(autouse=True)
def quick_races(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "ROUNDS", 3)
    monkeypatch.setattr(race, "ROUND_SECONDS", 0.0)


@pytest.fixture
def by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which a run takes as long as the weights are large, so that more int8 is always faster."""
    monkeypatch.setattr(workshop, "race", outliers.times_by_size)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Dataset]:
    folder = tmp_path_factory.mktemp("embedder")
    made = outliers.checkpoint(folder / "model", guilty=(0, 1), layers=3, **EMBED)
    return made, outliers.own_scores(folder, made)


def search(made: Path, data: Dataset, out: Path, **options: Any) -> Found:
    return find(made, data, out=out, journal=out.with_name(out.name + ".journal"), **options)


@pytest.fixture(scope="module")
def found(embedder: tuple[Path, Dataset], tmp_path_factory: pytest.TempPathFactory) -> Found:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workshop, "race", outliers.times_by_size)
        return search(*embedder, tmp_path_factory.mktemp("found") / "m.encast", max_drop=0.03)


class TestOutliers:
    def test_exactly_the_guilty_layers_stay_wide(self, found: Found) -> None:
        assert found.chosen.plan.wide == tuple((name, "bf16") for name in GUILTY)
        tried = [candidate for candidate in found.candidates if candidate.within]
        assert Plan("int8", tuple((name, "f32") for name in GUILTY)) in [one.plan for one in tried], "bf16 is faster"
        assert found.chosen.plan.dtype == "int8"
        assert [layer.name for layer in found.layers[:2]] == GUILTY
        assert sum(layer.share or 0.0 for layer in found.layers[:2]) > 0.9
        assert len(found.layers) == 15, "four products and an attention in each of three layers"
        assert {layer.kind for layer in found.layers if "context" in layer.name} == {"attention"}
        [int8] = [one for one in found.candidates if one.plan == INT8]
        assert int8.drop is not None
        assert int8.drop > 0.3, "int8 alone spoils this model"
        assert not int8.within
        assert int8.speed is not None, "it says what the budget costs"
        assert found.missed is None

    def test_the_artifact_is_what_was_measured(self, found: Found, embedder: tuple[Path, Dataset]) -> None:
        _, data = embedder
        opened = artifact.open(found.artifact)
        opened.verify()
        assert QuantSpec.from_json(opened.card["quant"]).keep == tuple((name, "bf16") for name in GUILTY)
        with encast.load(found.artifact) as engine:
            metrics = score(engine, data).metrics
        assert metrics == found.chosen.metrics
        assert found.chosen.drop == pytest.approx((found.reference - metrics["spearman"]) / found.reference)
        assert found.chosen.drop is not None
        assert found.chosen.drop <= 0.03
        entry = opened.card["accuracy"]["own/scores.tsv"]
        assert entry["metrics"] == {name: round(value, 4) for name, value in metrics.items()}
        assert entry["budget"] == {"metric": "spearman", "max_drop": 0.03, "f32": 100.0, "drop": found.chosen.drop}
        assert (entry["task"], entry["rows"]) == ("embed", len(data.rows))

    def test_nothing_else_is_left_behind(self, found: Found) -> None:
        assert os.listdir(found.artifact.parent) == ["m.encast"]

    def test_it_is_plain_data(self, found: Found) -> None:
        document = json.loads(json.dumps(found.to_json(), allow_nan=False))
        assert document["chosen"]["wide"] == [[name, "bf16"] for name in GUILTY]
        assert document["layers"][0]["name"] == GUILTY[0]


def test_a_model_without_outliers_is_int8(tmp_path: Path, by_size: None) -> None:
    made = outliers.checkpoint(tmp_path / "model", layers=1)
    found = search(made, outliers.own_answers(tmp_path, made), tmp_path / "m.encast", max_drop=0.05)
    assert found.chosen.plan == INT8
    assert found.metric == "accuracy"
    assert not found.layers
    assert artifact.open(found.artifact).graph.meta.dtype == "int8"


def test_real_races_choose_among_what_is_within(tmp_path: Path) -> None:
    made = outliers.checkpoint(tmp_path / "model", layers=1)
    found = search(made, outliers.own_answers(tmp_path, made, 40), tmp_path / "m.encast", max_drop=0.9)
    assert all(candidate.within for candidate in found.candidates)
    assert all(candidate.speed is not None and candidate.speed > 0 for candidate in found.candidates)
    assert artifact.open(found.artifact).card["quant"] == found.chosen.plan.spec.to_json()


def test_threads_are_those_that_answer_and_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []

    def load(path: Any, *, threads: int | None) -> Any:
        asked.append(threads)
        return encast.load(path, threads=threads)

    for module in (workshop, race):
        monkeypatch.setattr(module, "engines", SimpleNamespace(load=load))
    made = outliers.checkpoint(tmp_path / "model", guilty=(0,), layers=1, **EMBED)
    found = search(made, outliers.own_scores(tmp_path, made, 40), tmp_path / "m.encast", max_drop=0.0, threads=1)
    assert found.layers, "layers were measured too"
    assert len(asked) > 8
    assert set(asked) == {1}


def test_dense_and_sparse_candidates_answer_alike(tmp_path: Path, by_size: None) -> None:
    made = outliers.checkpoint(tmp_path / "model", layers=1)
    data = outliers.own_answers(tmp_path, made, 40)
    found = search(made, data, tmp_path / "m.encast", max_drop=0.9, sparse="auto")
    variants = [candidate for candidate in found.candidates if candidate.plan == INT8]
    assert [candidate.sparse for candidate in variants] == ["never", "always"]
    assert all(candidate.speed is not None for candidate in variants)
    assert artifact.open(found.artifact).card["sparse"] == found.chosen.sparse
    with encast.load(encast.compile(made, tmp_path / "sparse.encast", sparse="always")) as engine:
        assert score(engine, data).metrics == variants[0].metrics


def test_an_impossible_budget_ends_with_f32_and_says_what_is_in_the_way(tmp_path: Path, by_size: None) -> None:
    made = outliers.checkpoint(tmp_path / "model", guilty=(0,), layers=1, **EMBED)
    found = search(made, outliers.own_scores(tmp_path, made, 400), tmp_path / "m.encast", max_drop=0.0)
    assert found.chosen.plan == F32
    assert artifact.open(found.artifact).graph.meta.dtype == "f32"
    assert found.missed is not None
    assert found.missed.nearest is not None
    assert found.missed.over == found.missed.nearest.drop
    assert found.missed.over is not None
    assert found.missed.over > 0
    assert found.missed.layers[0] == GUILTY[0]
    assert os.listdir(tmp_path / "m.encast")
    assert not (tmp_path / "m.encast.journal").exists()


def test_a_candidate_that_cannot_be_compiled_is_passed_over(
    embedder: tuple[Path, Dataset], tmp_path: Path, by_size: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile = workshop.compile
    wanted = Plan("int8", tuple((name, "f32") for name in GUILTY)).spec

    def fails(*arguments: Any, quant: QuantSpec, **options: Any) -> Path:
        if quant == wanted or quant.dtype == "bf16":
            raise ArtifactError("no such artifact today")
        return compile(*arguments, quant=quant, **options)

    monkeypatch.setattr(workshop, "compile", fails)
    made, data = embedder
    found = search(made, replace(data, rows=data.rows[:60]), tmp_path / "m.encast", max_drop=0.03)
    failed = [candidate for candidate in found.candidates if candidate.failed == "no such artifact today"]
    assert [candidate.plan.text for candidate in failed] == ["bf16", "int8 but 2 f32"]
    assert {name for name, _ in found.chosen.plan.wide} > set(GUILTY)
    assert found.chosen.within
    assert os.listdir(tmp_path) == ["m.encast"]


class TestKindsOfData:
    """The texts of every kind reach the layers' distances and the races as their task runs them."""

    def found(self, made: Path, data: Dataset) -> Found:
        # No int8 is good enough, so layers are measured.
        return search(made, data, made.with_name("m.encast"), max_drop=1e-9)

    @pytest.fixture(autouse=True)
    def never_int8(self, monkeypatch: pytest.MonkeyPatch, by_size: None) -> None:
        def spoilt(engine: Any, data: Dataset) -> Any:
            scored = score(engine, data)
            lost = 10.0 if engine.meta.dtype == "int8" else 0.0
            return replace(scored, metrics={name: value - lost for name, value in scored.metrics.items()})

        monkeypatch.setattr(workshop, "score", spoilt)

    def test_answers(self, tmp_path: Path) -> None:
        made = make_checkpoint(tmp_path / "model", "distilbert", "answer", layers=1)
        context = "the cat and Bob from Paris " * 12  # of two windows
        with encast.load(encast.compile(made, tmp_path / "gold.encast", dtype="f32")) as engine:
            answers = [engine.answer(text, context).text for text in outliers.texts(6)]
        rows = [Question(str(n), text, context, (answers[n],)) for n, text in enumerate(outliers.texts(6))]
        found = self.found(made, Dataset("own/answers.json", "answers", rows))
        assert (found.metric, found.reference) == ("f1", 100.0)
        assert len(found.layers) == 5
        assert all((layer.distance or 0.0) > 0 for layer in found.layers)

    def test_entities(self, tmp_path: Path) -> None:
        case = ENTITY_CASES[0]
        labels = dict(enumerate(["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG"]))
        config = {**case.options["config"], "id2label": labels, "label2id": {v: k for k, v in labels.items()}}
        made = make_checkpoint(tmp_path / "model", case.arch, "tag", **{**case.options, "config": config})
        rows = [Sentence(tuple(text.split()), tuple("B-PER" for _ in text.split())) for text in outliers.texts(40)]
        with encast.load(encast.compile(made, tmp_path / "gold.encast", dtype="f32")) as engine:
            own = engine.drive(label_words(engine.session, [row.words for row in rows]))
        rows = [replace(row, labels=tuple(labels)) for row, labels in zip(rows, own, strict=True)]
        found = self.found(made, Dataset("own/words.conll", "entities", rows))
        assert found.metric == "entity_f1"
        assert found.layers[0].share is not None

    def test_layers_that_share_their_weights_are_told_apart(self, tmp_path: Path) -> None:
        made = make_checkpoint(tmp_path / "model", "albert", "classify", layers=3)
        found = self.found(made, outliers.own_answers(tmp_path, made, 40))
        names = [layer.name for layer in found.layers]
        assert len(set(names)) == len(names) == 3 * 5 + 1, "and the product behind the embeddings"
        assert found.chosen.plan in (F32, BF16)


@pytest.mark.parametrize("max_drop", [-0.01, 1.0, float("nan"), True, "1 %"])
def test_a_drop_that_is_none(max_drop: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"max_drop is .*; the share of the metric that may be lost is needed"):
        search(tmp_path, Dataset("d", "classes", []), tmp_path / "m.encast", max_drop=max_drop)
    assert not os.listdir(tmp_path)


def test_data_of_another_task_leaves_nothing_behind(embedder: tuple[Path, Dataset], tmp_path: Path) -> None:
    data = Dataset("own/classes.tsv", "classes", [Labelled("the cat", "label 1")])
    with pytest.raises(InputError, match="holds classes, which an artifact for 'embed' cannot be measured on"):
        search(embedder[0], data, tmp_path / "m.encast", max_drop=0.1)
    with pytest.raises(InputError, match="metric is 'f1'; this task on this data set has spearman, pearson"):
        search(*embedder, tmp_path / "m.encast", max_drop=0.1, metric="f1")
    assert not os.listdir(tmp_path)


class TestSample:
    def test_whole_texts_at_even_distances_in_one_batch(self, tmp_path: Path) -> None:
        made = make_checkpoint(tmp_path / "model", "bert", "classify", layers=1)
        rows = outliers.texts(100)
        with encast.load(encast.compile(made, tmp_path / "m.encast", dtype="f32")) as engine:
            recorder = Recorder(engine.runnable)
            logits = np.concatenate(_logits(engine, recorder, rows))
            sample = recorder.sample(300)
            own = sample.run(engine.runnable)
        assert sample.output == "logits"
        assert 200 < sample.batch.tokens < 400
        matches = [int(np.flatnonzero((logits == row).all(axis=1))[0]) for row in own]
        assert matches[0] == 0
        assert matches[-1] == 99
        assert matches == sorted(matches)
        assert recorder.sample(10**6).batch.seqs == 100

    def test_distances(self) -> None:
        a = np.array([[1, 0], [0, 2]], np.float32)
        b = np.array([[2, 0], [1, 0]], np.float32)
        assert distance("embedding", a, b) == pytest.approx(0.5), "one is parallel, one orthogonal"
        assert distance("embedding", a, a) == 0.0
        assert distance("logits", a, b) == pytest.approx((1 + 0 + 1 + 4) / 4)
        with pytest.raises(InputError, match="not finite"):
            distance("logits", a, np.full_like(a, np.inf))


def _logits(engine: Any, recorder: Recorder, rows: list[str]) -> list[Any]:
    session = engine.session
    return [recorder.run("logits", piece.batch) for piece in session.stream(rows)]
