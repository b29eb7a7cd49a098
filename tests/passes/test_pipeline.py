"""The whole pipeline on every architecture and head: same answers, every promised fusion, or a reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import CASES, Opened, open_case
from graphs import batch, encoder, masked_lm

from encast.backends.reference import EVALUATORS, Context, Reference
from encast.errors import ArtifactError, InputError, StrictError
from encast.ir import FusionPromise, Graph, verify
from encast.passes import FusionReport, optimise
from encast.passes.fold_tables import fold_tables
from encast.passes.report import OUTSIDE
from encast.quant import QuantSpec

F32 = QuantSpec("f32")


@pytest.fixture(params=CASES)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return open_case(request.param, tmp_path_factory)


def ops(graph: Graph) -> set[str]:
    return {node.op for node in graph.nodes}


def _rotary_of_f32(context: Context, x: Any, *, heads: int, theta: float, rate: float) -> Any:
    size = x.shape[1] // heads
    positions = np.concatenate([np.arange(length) for _, _, length in context.sequences()])
    angles = positions[:, None] * rate * theta ** (-np.arange(0, size, 2) / size)
    cos, sin = (part.astype(np.float32).astype(np.float64)[:, None] for part in (np.cos(angles), np.sin(angles)))
    a, b = np.split(x.reshape(len(x), heads, size), 2, axis=2)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2).reshape(x.shape)


def _linear_bias_of_f32(context: Context, scores: Any, slopes: Any) -> Any:
    return scores + EVALUATORS["linear_bias"](context, np.zeros_like(scores), slopes).astype(np.float32)


@pytest.mark.parametrize("exact", [False, True])
def test_fused_graphs_answer_as_plain_ones(opened: Opened, exact: bool) -> None:
    fused, report = optimise(opened.graph, F32, strict=True, exact=exact)
    assert not report.misses
    assert fused.meta.math == ("exact" if exact else "fast")
    # The tables of a fused rotary and of a linear bias are rounded to f32 once, and nothing else may differ.
    # So are tables that are projected at compile time: test_fold_tables.py has what that costs.
    rounded = {"rotary": _rotary_of_f32, "linear_bias": _linear_bias_of_f32}
    tabled = opened.graph.copy()
    fold_tables(tabled)
    plain = opened.evaluate(tabled, evaluators={**EVALUATORS, **rounded})
    got = opened.evaluate(fused)
    # Folding a scale that is no power of two rounds q's weights to f32 once more; exact mode folds none.
    bound = 1e-13 if exact else 2e-5
    assert np.abs(got - plain).max() <= bound * np.abs(plain).max()


def test_nothing_plain_is_left_of_a_fusion(opened: Opened) -> None:
    """The backends have no kernels for the parts."""
    fused, _ = optimise(opened.graph, F32, strict=True)
    left = {"attention_scores", "softmax", "attention_context", "relative_bias", "scale", "embedding", "position_ids"}
    left |= {"rotary", "local_mask", "linear_bias", "relative_scores"}
    if not fused.meta.expected["embed_layer_norm"].other:  # words that no norm reads alone have a step of their own
        left -= {"embedding"}
    assert not ops(fused) & left
    for node in fused.nodes:
        assert node.op != "activation" or fused.type_of(node.inputs[0]).shape[0] == "seqs"


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(("features", "fill_mask"))])
def test_every_dtype_verifies_and_stays_near(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    opened = open_case(name, tmp_path_factory)
    plain = opened.evaluate()
    scale = np.abs(plain).max()
    for dtype, bound in (("bf16", 0.2), ("int8", 0.5)):
        graph, report = optimise(opened.graph, QuantSpec(dtype), strict=True)
        assert graph.meta.dtype == dtype
        assert dtype in report.linears.values()
        # Random checkpoints with outliers: what is asked here is that the arithmetic is the right one.
        assert np.abs(opened.evaluate(graph) - plain).mean() <= bound * scale


def test_the_given_graph_stays_as_it_is() -> None:
    graph = encoder()
    before, arrays = str(graph), {name: constant.array.copy() for name, constant in graph.constants.items()}
    optimise(graph, QuantSpec())
    assert str(graph) == before
    assert all((graph.constants[name].array == array).all() for name, array in arrays.items())


def test_counts_are_per_layer() -> None:
    _, report = optimise(encoder(layers=3), F32)
    assert report.counts["add_layer_norm"] == {0: (2, 2), 1: (2, 2), 2: (2, 2), OUTSIDE: (0, 0)}
    assert report.counts["embed_layer_norm"][OUTSIDE] == (1, 1)


def spoiled(layer: int) -> Graph:
    """An encoder in which one layer's attention scores are an output too, so that they must exist."""
    graph = encoder(layers=3)
    graph.outputs["scores"] = f"encoder.layer.{layer}.attention.scores"
    return graph


def test_a_miss_names_layer_fusion_and_condition() -> None:
    _, report = optimise(spoiled(1), F32)
    assert report.counts["attention"] == {0: (1, 1), 1: (1, 0), 2: (1, 1), OUTSIDE: (0, 0)}
    assert {(miss.layer, miss.fusion) for miss in report.misses} == {(1, "attention"), (1, "qkv")}
    reason = next(miss.reason for miss in report.misses if miss.fusion == "attention")
    assert "encoder.layer.1.attention.scores" in reason
    assert "output of the graph" in reason


def test_strict_makes_a_miss_an_error() -> None:
    with pytest.raises(StrictError, match=r"layer 2: attention at 'encoder.layer.2.attention.context'"):
        optimise(spoiled(2), F32, strict=True)


def test_a_fusion_with_no_beginning_is_a_miss_too() -> None:
    graph = encoder()
    promised = {**graph.meta.expected, "linear_activation": FusionPromise(1, 1)}
    graph.meta = replace(graph.meta, expected=promised)
    _, report = optimise(graph, F32)
    assert [(miss.fusion, miss.layer, miss.reason) for miss in report.misses] == [
        ("linear_activation", OUTSIDE, "no node begins the pattern")
    ]


def test_missed_fusions_still_answer_right() -> None:
    graph = spoiled(1)
    fused, _ = optimise(graph, F32)
    plain = Reference(graph).evaluate("embedding", batch(graph))
    assert np.abs(Reference(fused).evaluate("embedding", batch(graph)) - plain).max() < 1e-6


def test_the_report_survives_json() -> None:
    _, report = optimise(spoiled(0), F32)
    assert FusionReport.from_json(report.to_json()) == report


@pytest.mark.parametrize("data", [{}, {"counts": []}, {"counts": {}, "misses": [{}], "passes": [], "linears": {}}])
def test_a_malformed_report_is_refused(data: Any) -> None:
    with pytest.raises(ArtifactError, match="malformed"):
        FusionReport.from_json(data)


def test_word_table_and_decoder_share_an_array_under_two_names() -> None:
    graph, _ = optimise(masked_lm(), F32, strict=True)
    decoder = next(node for node in graph.nodes if node.name == "cls.decoder")
    assert decoder.inputs[1] == "embeddings.word.weight.panels_f32"
    assert graph.constants[decoder.inputs[1]].array is graph.constants["embeddings.word.weight"].array


def test_a_deep_model_fuses_whole() -> None:
    graph = encoder(layers=96, hidden=8, inner=8)
    fused, report = optimise(graph, F32, strict=True)
    assert len(fused.nodes) == 1 + 96 * 7 + 2
    assert not report.misses


@pytest.mark.parametrize("pattern", ["encoder.layer.7.*", "query"])
def test_a_keep_pattern_that_matches_nothing_is_an_error(pattern: str) -> None:
    with pytest.raises(InputError, match="matches none of the 10 products"):
        optimise(encoder(), QuantSpec(keep=((pattern, "f32"),)))


def test_verify_accepts_every_stage() -> None:
    for spec in (F32, QuantSpec("bf16"), QuantSpec(zero_point="never")):
        verify(optimise(encoder(relative=True, skip_id=1), spec)[0])
