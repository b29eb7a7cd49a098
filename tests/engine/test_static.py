"""Static int8, and outliers moved to weights: the engine gives the reference's answers (test_isa.py: at all levels)."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import Opened, open_case, task_of
from checkpoints import CASES
from compiled import cosine, same_bits

import encast
from encast import artifact
from encast.archs import build_graph
from encast.backends.cpu import CpuRunnable
from encast.backends.reference import Reference
from encast.batch import Batch
from encast.errors import CheckpointError, InputError
from encast.importers import open_checkpoint
from encast.lower import Target
from encast.lower.unfuse import ABLATIONS
from encast.passes import optimise
from encast.passes.move_outliers import move_outliers
from encast.quant import Calibration, QuantSpec

NAMES = (
    "bert-embed",
    "albert-odd",
    "roberta-tag",
    "mpnet-fill_mask",
    "distilbert-classify",
    "modernbert-tag",
    "deberta-v2-tag",
)
TEXTS = ["the cat", "a dog runs over the wide green hill", "", "one two three four five six", "the the the and"] * 4
SPECS = {
    "minmax": QuantSpec(activations="static", ranges="minmax"),
    "symmetric": QuantSpec(activations="static", ranges="percentile", percentile=99.0, zero_point="never"),
    "moved": QuantSpec(activations="static", move_outliers=0.5),
    "dynamic moved": QuantSpec(move_outliers=0.5),
}


@functools.cache
def calibrated(folder: Path, name: str, scheme: str) -> Calibration:
    return encast.calibrate(folder, TEXTS, task=task_of(CASES[name]), quant=SPECS[scheme])


@functools.cache
def _compiled(folder: Path, name: str, scheme: str) -> Path:
    out = folder.with_name(f"{name}-{scheme.replace(' ', '-')}.encast")
    calibration = calibrated(folder, name, scheme)
    return encast.compile(
        folder, out, task=task_of(CASES[name]), quant=SPECS[scheme], calibration=calibration, strict=True
    )


def opened_and_compiled(name: str, scheme: str, factory: pytest.TempPathFactory) -> tuple[Opened, Path]:
    opened = open_case(name, factory)
    return opened, _compiled(opened.folder, name, scheme)


@pytest.mark.parametrize("scheme", SPECS)
@pytest.mark.parametrize("name", NAMES)
def test_the_engine_follows_the_reference(name: str, scheme: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """As in test_exactness.py: of the engine's own there is less than of the dtype's."""
    opened, path = opened_and_compiled(name, scheme, tmp_path_factory)
    calibration = calibrated(opened.folder, name, scheme)
    graph, _ = optimise(opened.graph, SPECS[scheme], calibration=calibration)
    cpu = CpuRunnable(artifact.open(path), threads=2)
    got = cpu.run(opened.output, opened.batch, opened.select).astype(np.float64)
    same = Reference(graph).evaluate(opened.output, opened.batch, opened.select)
    wide = Reference(opened.graph).evaluate(opened.output, opened.batch, opened.select)
    of_engine, of_dtype = (np.sqrt((difference**2).mean()) for difference in (got - same, same - wide))
    assert of_engine <= 0.7 * of_dtype + 1e-6 * np.sqrt((wide**2).mean())


@pytest.mark.parametrize("name", NAMES)
def test_static_products_read_fixed_ranges(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    opened, path = opened_and_compiled(name, "minmax", tmp_path_factory)
    plan = CpuRunnable(artifact.open(path), threads=1).plan
    narrow = [line for line in plan.splitlines() if line.startswith("step narrow") or " also=" in line]
    assert narrow
    assert all("q8_scale=" in line for line in narrow)
    assert "quantize(" not in str(artifact.open(path).graph)
    assert opened.graph.meta.layers > 0


@pytest.mark.parametrize("scheme", SPECS)
@pytest.mark.parametrize("name", NAMES)
def test_bits_depend_on_the_text_alone(
    name: str, scheme: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = opened_and_compiled(name, scheme, tmp_path_factory)
    made = artifact.open(path)
    meta = made.graph.meta
    random = np.random.default_rng(4)
    lengths = [min(length, meta.max_len) for length in (1, 2, 31, 40, 7, 17, 33)]
    texts = [random.integers(0, meta.vocab, length).tolist() for length in lengths]
    one = CpuRunnable(made, threads=1)
    alone = [one.run("last_hidden_state", Batch.of([text])) for text in texts]
    assert all(np.isfinite(rows).all() for rows in alone)
    monkeypatch.setenv("ENCAST_CHUNK_TOKENS", "1")
    monkeypatch.setenv("ENCAST_BLOCK_ROWS", "32")
    small = CpuRunnable(made, threads=2)
    for cpu in (one, small):
        together = cpu.run("last_hidden_state", Batch.of(texts))
        assert same_bits(together, np.concatenate(alone))


@pytest.mark.parametrize("scheme", ["minmax", "moved"])
@pytest.mark.parametrize("without", ["norm_fusion", "qkv_fusion", "row_blocks", "head_tasks"])
def test_ablations_change_no_bit(without: str, scheme: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert without in ABLATIONS
    opened, path = opened_and_compiled("bert-embed", scheme, tmp_path_factory)
    made = artifact.open(path)
    whole = CpuRunnable(made, threads=2).run("embedding", opened.batch)
    target = replace(Target.here(), without=frozenset({without}))
    apart = CpuRunnable(made, threads=2, target=target).run("embedding", opened.batch)
    assert same_bits(whole, apart)


@pytest.mark.parametrize("name", NAMES)
def test_moved_outliers_change_no_bit_of_f32(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The kernels too: their sums of products are the same, and their scales are powers of two."""
    opened = open_case(name, tmp_path_factory)
    graph, _ = optimise(opened.graph, QuantSpec("f32"))
    changed = graph.copy()
    assert move_outliers(changed, SPECS["moved"], calibrated(opened.folder, name, "moved").largest).changes > 0
    card = artifact.open(_compiled(opened.folder, name, "moved")).card
    tokenizer = open_checkpoint(opened.folder).tokenizer.json
    answers = []
    for number, one in enumerate((graph, optimise_again(changed))):
        path = artifact.write(tmp_path / f"{number}.encast", one, tokenizer, {**card, "dtype": "f32"})
        cpu = CpuRunnable(artifact.open(path), threads=2)
        answers.append(cpu.run(opened.output, opened.batch, opened.select))
    assert same_bits(*answers)


def optimise_again(graph: Any) -> Any:
    """A tied decoder whose weight was moved needs no name for each of its forms; others do."""
    from encast.passes.separate_weights import separate_weights

    separate_weights(graph)
    return graph


@pytest.mark.parametrize("scheme", SPECS)
def test_sparse_products_have_the_same_bits(scheme: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    opened, path = opened_and_compiled("bert-embed", scheme, tmp_path_factory)
    seen = calibrated(opened.folder, "bert-embed", scheme)
    out = tmp_path_factory.mktemp("sparse") / "m.encast"
    sparse = encast.compile(opened.folder, out, task="embed", quant=SPECS[scheme], calibration=seen, sparse="always")
    answers = [CpuRunnable(artifact.open(one), threads=2).run("embedding", opened.batch) for one in (path, sparse)]
    assert same_bits(*answers)


def test_outside_of_the_range_bytes_saturate(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A calibration of a hundredth of the range: wrong answers, but finite ones, and the reference's."""
    opened = open_case("bert-embed", tmp_path_factory)
    data = calibrated(opened.folder, "bert-embed", "minmax").to_json()
    for value in data["values"].values():
        value["low"], value["high"] = ([x / 100 for x in value[end]] for end in ("low", "high"))
    calibration = Calibration.from_json(json.loads(json.dumps(data)))
    folder = tmp_path_factory.mktemp("narrow")
    path = encast.compile(
        opened.folder, folder / "m.encast", task="embed", quant=SPECS["minmax"], calibration=calibration
    )
    graph, _ = optimise(opened.graph, SPECS["minmax"], calibration=calibration)
    got = CpuRunnable(artifact.open(path), threads=1).run("embedding", opened.batch)
    same = Reference(graph).evaluate("embedding", opened.batch)
    wide = Reference(opened.graph).evaluate("embedding", opened.batch)
    assert np.isfinite(got).all()
    assert cosine(got, same).min() > 0.999
    assert cosine(got, wide).min() < 0.99


class TestCalibrate:
    def test_what_is_seen_is_what_the_model_reads(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        """Exact forms differ from the coarse ones by 1e-4 at most in what gelu makes."""
        opened = open_case("bert-embed", tmp_path_factory)
        calibration = encast.calibrate(opened.folder, TEXTS[:5], task="embed")
        path = encast.compile(opened.folder, tmp_path_factory.mktemp("f32") / "f32.encast", dtype="f32", task="embed")
        with encast.load(path, threads=1) as engine:
            ids = [encoding.ids for encoding in engine.session.tokenizer.encode(TEXTS[:5])]
        batch = Batch.of(ids)
        assert calibration.tokens == batch.tokens
        values = Reference(optimise(opened.graph, QuantSpec("f32"))[0]).values(
            ["encoder.layer.0.attention.context"], batch
        )
        seen = calibration.values["encoder.layer.0.attention.context"]
        rows = values["encoder.layer.0.attention.context"]
        np.testing.assert_allclose(seen.low, rows.min(axis=0))
        np.testing.assert_allclose(seen.high, rows.max(axis=0))
        assert seen.histogram.counts.sum() == rows.size

    def test_batches_do_not_matter(
        self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import sys

        opened = open_case("bert-embed", tmp_path_factory)
        whole = encast.calibrate(opened.folder, TEXTS, task="embed")
        monkeypatch.setattr(sys.modules["encast.calibrate"], "_BATCH_TOKENS", 1)
        done: list[tuple[int, int]] = []
        apart = encast.calibrate(
            opened.folder, TEXTS, task="embed", progress=lambda now, total: done.append((now, total))
        )
        assert len(done) == len(TEXTS)
        assert done[-1] == (whole.tokens, whole.tokens)
        for name, seen in whole.values.items():
            np.testing.assert_allclose(apart.values[name].low, seen.low, rtol=1e-9, atol=1e-12)
            assert np.abs(apart.values[name].histogram.counts - seen.histogram.counts).sum() <= 10

    def test_a_pair_is_two_texts_for_embeddings(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        folder = open_case("bert-embed", tmp_path_factory).folder
        alone, pair = (encast.calibrate(folder, rows, task="embed") for rows in (["the", "cat"], [("the", "cat")]))
        assert alone.to_json() == pair.to_json()

    def test_pairs(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        folder = open_case("bert-classify", tmp_path_factory).folder
        alone = encast.calibrate(folder, ["the cat", "a dog"])
        pair = encast.calibrate(folder, [("the cat", "a dog")])
        assert pair.tokens == alone.tokens - 1  # one [CLS]

    @pytest.mark.parametrize("texts", [[], [3], "text"])
    def test_bad_texts(self, texts: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
        with pytest.raises(InputError):
            encast.calibrate(open_case("bert-embed", tmp_path_factory).folder, texts)

    def test_weights_that_overflow_are_no_models(
        self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import sys

        def broken(*arguments: Any) -> Any:
            graph = build_graph(*arguments)
            norm = next(node for node in graph.nodes if node.op == "layer_norm")
            gamma = graph.constants[norm.inputs[1]]
            graph.constants[norm.inputs[1]] = replace(gamma, array=np.full_like(gamma.array, np.inf))
            return graph

        monkeypatch.setattr(sys.modules["encast.calibrate"], "build_graph", broken)
        with np.errstate(all="ignore"), pytest.raises(CheckpointError, match="not finite"):
            encast.calibrate(open_case("bert-embed", tmp_path_factory).folder, TEXTS[:2], task="embed")
