"""Every task learns what can be learned, and its checkpoint answers alike in encast and in transformers."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="make test-train installs torch and transformers")
transformers = pytest.importorskip("transformers", reason="make test-train installs torch and transformers")

from checkpoints import TRAINABLE, make_checkpoint
from checkpoints_gated import NOT_IN_TRANSFORMERS
from families import FAMILIES
from small_rows import WORDS, classes, sentences
from small_runs import RECIPE, train

import encast
from encast.compress import quantise, report
from encast.compress.model import load_model, open_tokenizer
from encast.compress.pipeline import Result, compress
from encast.compress.recipe import parse_recipe
from encast.compress.tasks import find_task
from encast.compress.train import Trainer
from encast.data.datasets import Dataset, Labelled, Sentence, open_dataset
from encast.data.datasets.base import Pair
from encast.errors import InputError, UnsupportedModelError
from encast.importers import open_checkpoint
from encast.scoring import score

Rows = list[dict[str, Any]]


def best(result: Result) -> float:
    (record,) = result.stages.values()
    return float(record["best"])


def logits(result: Result, texts: list[Any], kind: str) -> tuple[np.ndarray, np.ndarray]:
    """encast's in exact f32, and those of transformers with the checkpoint's own tokenizer."""
    artifact = encast.compile(result.checkpoint, result.out / "exact.encast", dtype="f32", exact=True)
    module = getattr(transformers, kind).from_pretrained(result.checkpoint).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(result.checkpoint)
    ours, theirs = [], []
    with encast.load(artifact, threads=1) as engine:
        for text in texts:
            one = tokenizer(*text) if isinstance(text, tuple) else tokenizer(text)
            types = one.get("token_type_ids")
            batch = encast.Batch.of([one["input_ids"]], types and [types])
            ours.append(engine.runnable.run("logits", batch).reshape(-1))
            with torch.no_grad():
                out = module(**{name: torch.tensor([value]) for name, value in one.items()})
            parts = [out.start_logits, out.end_logits] if "start_logits" in out else [out.logits]
            theirs.append((torch.stack(parts, -1) if len(parts) == 2 else parts[0]).flatten().numpy())
    return np.concatenate(ours), np.concatenate(theirs)


def test_classes(tmp_path: Path, encoder: Path, write_rows: Callable[..., Path]) -> None:
    result = train(encoder, write_rows("data", classes(400, 1), classes(100, 2)), tmp_path / "out", "classify")
    assert best(result) > 90
    config = json.loads((result.checkpoint / "config.json").read_text())
    assert config["id2label"] == {"0": "early", "1": "late"}
    ours, theirs = logits(result, sentences(20, 5), "AutoModelForSequenceClassification")
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
    record = json.loads((result.checkpoint / "compress.json").read_text())
    assert record["history"][-1]["step"] == record["steps"] == 12 * 25
    assert record["best"] == max(entry["accuracy"] for entry in record["history"])


@pytest.mark.parametrize("score", ["magnitude", "obs"])
@pytest.mark.parametrize("arch", TRAINABLE)
def test_every_architecture_is_pruned_and_answers_alike(
    tmp_path: Path, write_rows: Callable[..., Path], arch: str, score: str
) -> None:
    source = make_checkpoint(tmp_path / arch, arch, "features", layers=2, hidden=32, heads=2)
    data = write_rows("data", classes(40, 1), classes(10, 2))
    recipe = f"""
stages:
  - prune: {{sparsity: 0.5, score: {score}, epochs: 1, end: 0, schedule: one-shot, learning-rate: 1.0e-3}}
"""
    result = train(source, data, tmp_path / "out", "classify", recipe)
    (record,) = result.stages.values()
    # ALBERT's layers share their weights; of ModernBERT's products several are one tensor; others have a gate besides.
    of_family = {name: 2 * family.products for name, family in FAMILIES.items()}
    assert len(record["zeros"]) == {"albert": 6, "modernbert": 8, "nomic_bert": 14, "gte": 14, **of_family}.get(
        arch, 12
    )
    tensors = open_checkpoint(result.checkpoint).tensors
    for name, share in record["zeros"].items():
        # A made weight may hold a zero besides, which stays.
        assert 0.5 <= share < 0.505
        assert np.mean(tensors.f32(name) == 0) == pytest.approx(share, abs=1e-4)
    ours, theirs = logits(result, sentences(6, 5), "AutoModelForSequenceClassification")
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize(
    ("arch", "layout"),
    [
        *((arch, "transformers") for arch in NOT_IN_TRANSFORMERS if arch != "new"),
        ("new", "own"),
        ("nomic_bert", "saved"),
    ],
)
def test_what_transformers_would_read_otherwise_is_not_trained(
    arch: str, layout: str, tmp_path: Path, write_rows: Callable[..., Path]
) -> None:
    """As BERT without ALiBi, say."""
    source = make_checkpoint(tmp_path / arch, arch, "features", layout=layout, layers=1, hidden=32, heads=2)
    data = write_rows("data", classes(8, 1), classes(4, 2))
    with pytest.raises(UnsupportedModelError, match="training needs a model of transformers"):
        train(source, data, tmp_path / "out", "classify")


def test_classes_of_pairs_by_number(tmp_path: Path, encoder: Path, write_rows: Callable[..., Path]) -> None:
    def pairs(count: int, seed: int) -> Rows:
        """The second text decides, and shares no word with the first."""
        a, b = sentences(count, seed, 1, 3), random.Random(seed)
        second = [b.choice(["1", "2"]) for _ in a]
        return [{"sentence1": x, "sentence2": y, "label": int(y == "2")} for x, y in zip(a, second, strict=True)]

    data = write_rows("data", pairs(400, 1), pairs(100, 2))
    result = train(encoder, data, tmp_path / "out", "classify", metric="f1")
    assert best(result) > 90
    ours, theirs = logits(result, [("the of", "and to"), ("in", "is was")], "AutoModelForSequenceClassification")
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_a_number(tmp_path: Path, encoder: Path, write_rows: Callable[..., Path]) -> None:
    def scored(count: int, seed: int) -> Rows:
        numbers = random.Random(seed).choices("123", k=count)
        return [
            {"text": f"{text} {n}", "score": int(n) / 2}
            for text, n in zip(sentences(count, seed), numbers, strict=True)
        ]

    data = write_rows("data", scored(400, 1), scored(100, 2))
    assert best(train(encoder, data, tmp_path / "out", "classify")) > 90


def rising(count: int) -> Rows:
    return [{"text": " ".join([WORDS[index % 9]] * 3), "score": index % 9} for index in range(count)]


def test_answers_that_are_all_equal_cost_no_better_weights(
    tmp_path: Path, encoder: Path, write_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no correlation. The head is set to zero where training has been too fast, say."""
    data = write_rows("data", rising(32), rising(9))
    recipe = "stages: [{fine-tune: {epochs: 3, learning-rate: 1.0e-3}}]"
    step = Trainer.step

    def spoilt(first: int) -> None:
        def too_far(self: Trainer, rows: Any) -> None:
            step(self, rows)
            if self._facts.step >= first:
                self._model.module.classifier.weight.data.zero_()

        monkeypatch.setattr(Trainer, "step", too_far)

    spoilt(1)
    (record,) = train(encoder, data, tmp_path / "kept", "classify", recipe).stages.values()
    assert [entry["spearman"] is None for entry in record["history"]] == [False, True, True]
    assert (record["best_step"], record["best"]) == (1, record["history"][0]["spearman"])
    spoilt(0)
    with pytest.raises(InputError, match=r"no evaluation has a spearman.*collapsed; lower learning-rate \(0.001\)"):
        train(encoder, data, tmp_path / "none", "classify", recipe)


@pytest.mark.parametrize("budget", ["{}", "{max-drop: 0.5}"])
def test_an_artifact_without_a_metric_is_left_out(
    tmp_path: Path, encoder: Path, write_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, budget: str
) -> None:
    compiled = quantise.compile

    def flat(source: Path, out: Path, *, dtype: str, **options: Any) -> Path:
        """Of the second checkpoint all answers are equal in int8."""
        if dtype == "int8" and Path(source).name.startswith("2-"):
            module = transformers.AutoModelForSequenceClassification.from_pretrained(source)
            module.classifier.weight.data.zero_()
            shutil.copytree(source, out.parent / "flat")
            module.save_pretrained(out.parent / "flat")
            source = out.parent / "flat"
        return compiled(source, out, dtype=dtype, **options)

    def found(source: Path, data: Dataset, *, out: Path, **options: Any) -> Any:
        flat(source, out, dtype="int8", task="classify")
        with encast.load(out, threads=1) as engine:
            score(engine, data)
        return SimpleNamespace(chosen=SimpleNamespace(text="int8"), to_json=lambda: {"missed": None})

    monkeypatch.setattr(quantise, "compile", flat)
    monkeypatch.setattr(quantise.budget, "find", found)
    data = write_rows("data", rising(64), rising(18))
    trained = "fine-tune: {epochs: 15, learning-rate: 4.0e-3, batch-size: 8, dropout: 0}"
    stages = [f"{{{trained}}}", "{fine-tune: {name: b, epochs: 0}}", "{fine-tune: {name: c, epochs: 0}}"]
    recipe = f"stages: [{', '.join(stages)}, {{quantise: {budget}}}]"
    result = train(encoder, data, tmp_path / "out", "classify", recipe)
    record = result.stages["quantise"]
    assert [entry["name"] for entry in record["front"]] == ["fine-tune f32", "fine-tune int8", "c int8"]
    assert record["failed"] == ["b"]
    assert "not finite: b compiled" in "\n".join(report.lines(result))
    if budget == "{}":
        recipe = f"stages: [{', '.join(stages[:2])}, quantise]"
        with pytest.raises(InputError, match=r"b in int8 answers all rows of .* alike, or not with finite numbers"):
            train(encoder, data, tmp_path / "last", "classify", recipe)
        assert not (tmp_path / "last" / "last.encast").exists(), "no other takes its place"


def test_words(tmp_path: Path, encoder: Path) -> None:
    """A word of two tokens is a place; a label that only begins gets its I- too."""

    def written(count: int, seed: int) -> str:
        lines = []
        for text in sentences(count, seed):
            lines += [f"{word}\t{'B-place' if word == 'that' else 'O'}" for word in text.split()]
            lines += ["47\tB-place", ""]
        return "\n".join(lines) + "\n"

    data = tmp_path / "data"
    data.mkdir()
    (data / "train.conll").write_text(written(400, 1))
    (data / "dev.conll").write_text(written(100, 2))
    result = train(encoder, data, tmp_path / "out", "tag")
    assert best(result) > 80
    config = json.loads((result.checkpoint / "config.json").read_text())
    assert list(config["id2label"].values()) == ["O", "B-place", "I-place"]
    ours, theirs = logits(result, sentences(10, 5), "AutoModelForTokenClassification")
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_the_first_token_of_a_word_learns_its_label(encoder: Path) -> None:
    """Also where the normaliser drops the word's first character, as ``label_words`` reads it."""
    rows = [
        Sentence(("\u200bthe", "47", "\u00adof", "", "\u200b", "the"), ("B-x", "B-y", "I-y", "B-x", "B-x", "O")),
        Sentence(("the",) * 20, ("B-x", *("O",) * 19)),
    ]
    data = Dataset("here", "entities", rows)
    task = find_task("tag", data)(data, 16, None)
    learned = [
        [None if target == -100 else task.labels[target] for target in example.target]
        for example in task.examples(rows, open_tokenizer(open_checkpoint(encoder), 16))
    ]
    assert learned == [[None, "B-x", "B-y", None, "I-y", "O", None], [None, "B-x", *["O"] * 13, None]]


def spans(count: int, seed: int, words: int, unanswered: float = 0.0) -> Rows:
    """Where is the word of two tokens? In contexts of more than one window."""
    generator = random.Random(seed)
    rows = []
    for number in range(count):
        context = generator.choices(WORDS, k=generator.randint(words // 2, words))
        at = generator.randrange(len(context))
        context[at] = "47"
        answers = [{"text": "47", "answer_start": " ".join(context).index("47")}]
        if generator.random() < unanswered:
            context[at], answers = "by", []
        rows.append({"id": str(number), "question": "what", "context": " ".join(context), "answers": answers})
    return rows


def squad(rows: Rows) -> str:
    paragraphs = [
        {"context": row["context"], "qas": [{k: row[k] for k in ("id", "question", "answers")}]} for row in rows
    ]
    return json.dumps({"data": [{"title": "t", "paragraphs": paragraphs}]})


@pytest.mark.parametrize("unanswered", [0.0, 0.4], ids=["squad-1.1", "squad-2.0"])
def test_spans_over_windows(tmp_path: Path, encoder: Path, unanswered: float) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.json").write_text(squad(spans(300, 1, 30, unanswered)))
    (data / "dev.json").write_text(squad(spans(80, 2, 60, unanswered)))
    recipe = (
        "stages: [{fine-tune: {epochs: 14, learning-rate: 5.0e-3, batch-size: 16, max-length: 40, stride: 8, "
        "evaluations: 1}}]"
    )
    result = train(encoder, data, tmp_path / "out", "answer", recipe)
    assert best(result) > 85
    ours, theirs = logits(result, [("what", "the of 47 and to")], "AutoModelForQuestionAnswering")
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_spans_need_their_beginnings(tmp_path: Path, encoder: Path, write_rows: Callable[..., Path]) -> None:
    rows = [{**row, "answers": [row["answers"][0]["text"]]} for row in spans(4, 1, 10)]
    with pytest.raises(InputError, match="answer_start"):
        train(encoder, write_rows("data", rows, rows), tmp_path / "out", "answer")


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedder") / "bert"
    return make_checkpoint(
        folder, "bert", "embed", layers=2, hidden=32, heads=2, pooling=("mean",), normalize=True,
        dense=((24, "Tanh"),),
    )  # fmt: skip


def likeness(count: int, seed: int) -> Rows:
    """Alike are texts whose first words are."""
    generator = random.Random(seed)
    rows = []
    for text in sentences(count, seed, 2, 5):
        words = text.split()
        other = [words[0] if generator.random() < 0.5 else generator.choice(WORDS), *generator.choices(WORDS, k=3)]
        rows.append({"sentence1": text, "sentence2": " ".join(other), "score": 5.0 * (other[0] == words[0])})
    return rows


def test_embeddings_by_scores(tmp_path: Path, embedder: Path, write_rows: Callable[..., Path]) -> None:
    data = write_rows("data", likeness(500, 1), likeness(150, 2))
    before = encast.compile(embedder, tmp_path / "before.encast", dtype="f32")
    from encast.scoring import score

    with encast.load(before, threads=1) as engine:
        found = score(engine, open_dataset(data / "dev.jsonl")).metrics["spearman"]
    # With dropout such a small model learns this late, and how late is the processor's rounding.
    recipe = RECIPE.replace("}}", ", dropout: 0}}")
    result = train(embedder, data, tmp_path / "out", "embed", recipe)
    assert best(result) > max(75.0, found + 20)
    # Still a folder of sentence-transformers, its other modules as they were.
    assert (result.checkpoint / "modules.json").read_bytes() == (embedder / "modules.json").read_bytes()
    assert best(result) == pytest.approx(_spearman(result, data), abs=1e-6)


def test_embeddings_by_pairs(tmp_path: Path, embedder: Path, write_rows: Callable[..., Path]) -> None:
    def belonging(count: int, seed: int) -> Rows:
        generator = random.Random(seed)
        names = [f"{a}{b}" for a in "bcdfgl" for b in "aeiou"]
        rows = []
        for _ in range(count):
            name = generator.choice(names)
            a, b = (" ".join([name, *generator.choices(WORDS, k=2)]) for _ in range(2))
            rows.append({"anchor": a, "positive": b})
        return rows

    data = write_rows("data", belonging(500, 1), belonging(20, 2))
    recipe = "stages: [{fine-tune: {epochs: 8, learning-rate: 4.0e-3, batch-size: 16}}]"
    (record,) = train(embedder, data, tmp_path / "out", "embed", recipe).stages.values()
    first = record["history"][0]
    assert record["metric"] == "mrr_at_10"
    assert record["best"] > first["mrr_at_10"]
    assert record["history"][-1]["loss"] < first["loss"]


def _spearman(result: Result, data: Path) -> float:
    from encast.scoring import score

    artifact = encast.compile(result.checkpoint, result.out / "again.encast", dtype="f32")
    with encast.load(artifact, threads=1) as engine:
        return score(engine, open_dataset(data / "dev.jsonl")).metrics["spearman"]


def test_classes_that_differ_in_case_alone(tmp_path: Path, encoder: Path, write_rows: Callable[..., Path]) -> None:
    def cased(count: int, seed: int) -> Rows:
        return [{**row, "label": "Good" if row["label"] == "early" else "good"} for row in classes(count, seed)]

    assert best(train(encoder, write_rows("data", cased(400, 1), cased(100, 2)), tmp_path / "out", "classify")) > 90


def test_a_head_keeps_its_order_of_classes(tmp_path: Path, write_rows: Callable[..., Path]) -> None:
    names = {"id2label": {"0": "late", "1": "early"}}
    source = make_checkpoint(
        tmp_path / "bert", "bert", "classify", layers=2, hidden=32, heads=2, labels=2, config=names
    )
    data = write_rows("data", classes(20, 1), classes(10, 2))
    result = train(source, data, tmp_path / "out", "classify", "stages: [{fine-tune: {epochs: 0}}]")
    config = json.loads((result.checkpoint / "config.json").read_text())
    assert config["id2label"] == names["id2label"]
    before, after = (open_checkpoint(folder).tensors.f32("classifier.weight") for folder in (source, result.checkpoint))
    np.testing.assert_array_equal(before, after)


def test_a_head_of_another_size_is_replaced_and_said(
    tmp_path: Path, write_rows: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_checkpoint(tmp_path / "bert", "bert", "classify", layers=2, hidden=32, heads=2, labels=3)
    data = write_rows("data", classes(400, 1), classes(100, 2))
    assert best(train(source, data, tmp_path / "out", "classify")) > 90
    assert "is for 3 outputs" in capsys.readouterr().err


@pytest.mark.parametrize("task", ["tag", "classify"])
def test_parts_of_a_batch_learn_what_the_whole_would(tmp_path: Path, encoder: Path, task: str) -> None:
    kind = "entities" if task == "tag" else "classes"
    rows: list[Any] = [
        Sentence(tuple(text.split()), tuple("B-x" if word == "that" else "O" for word in text.split()))
        if task == "tag"
        else Labelled(text, text.split()[0])
        for text in sentences(24, 3, 1, 9)
    ]
    data = Dataset("here", kind, rows)

    def learned(epochs: int, accumulate: int) -> np.ndarray:
        options = f"epochs: {epochs}, batch-size: 12, accumulate: {accumulate}, dropout: 0, precision: f32"
        recipe = f"stages: [{{fine-tune: {{{options}}}}}]"
        out = tmp_path / f"{epochs}-{accumulate}"
        result = compress(encoder, out, task=task, recipe=parse_recipe(recipe, "here"), train=data, device="cpu")
        return open_checkpoint(result.checkpoint).tensors.f32("classifier.weight")

    before, whole, parts = learned(0, 1), learned(2, 1), learned(2, 3)
    # AdamW divides a gradient by its own size: where one is nearly 0, rounding decides a good part of the step.
    assert np.linalg.norm(parts - whole) < 0.01 * np.linalg.norm(whole - before)


def test_equal_positives_of_a_batch_are_no_negatives(encoder: Path) -> None:
    """Against the cross entropy of each row with its own positive and those that differ, one after the other."""
    rows = [Pair("the", "of"), Pair("in", "is"), Pair("on", "of"), Pair("by", "he")]
    data = Dataset("here", "pairs", rows)
    task = find_task("embed", data)(data, 16, None)
    examples = list(task.examples(rows, open_tokenizer(open_checkpoint(encoder), 16)))
    targets = task.targets([example.target for example in examples], 8)
    answers = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    loss = task.loss(answers, targets)
    a, b = (part / np.linalg.norm(part, axis=1, keepdims=True) for part in np.split(_by_side(answers), 2))
    expected = []
    for row, pair in enumerate(rows):
        others = [at for at, other in enumerate(rows) if other.positive != pair.positive]
        scores = 20 * b[[row, *others]] @ a[row]
        expected.append(np.log(np.exp(scores).sum()) - scores[0])
    assert float(loss.detach()) == pytest.approx(np.mean(expected))
    loss.backward()
    assert bool(answers.grad.isfinite().all())


def _by_side(answers: Any) -> np.ndarray:
    """First all anchors, then all positives."""
    values = answers.detach().numpy()
    return np.concatenate([values[0::2], values[1::2]])


@pytest.mark.parametrize("arch", TRAINABLE)
def test_dropout_is_that_of_the_stage(tmp_path: Path, arch: str) -> None:
    source = make_checkpoint(tmp_path / arch, arch, "features", layers=1, hidden=32, heads=2)
    data = Dataset("here", "classes", [Labelled("the", "a"), Labelled("of", "b")])
    model = load_model(open_checkpoint(source), find_task("classify", data)(data, 16, None), seed=0, dropout=0.25)
    shares = {name: one.p for name, one in model.module.named_modules() if isinstance(one, torch.nn.Dropout)}
    assert shares == dict.fromkeys(shares, 0.25)


def test_a_class_of_more_digits_than_python_reads() -> None:
    long = "9" * 5000
    data = Dataset("here", "classes", [Labelled("the", long), Labelled("of", "10"), Labelled("in", "9")])
    assert find_task("classify", data)(data, 16, None).head()["id2label"] == {0: "9", 1: "10", 2: long}
