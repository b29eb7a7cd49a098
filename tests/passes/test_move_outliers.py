"""Outliers moved to the weights: the same f32 function to the last bit, and where it is possible."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from graphs import Builder, batch, encoder, masked_lm

from encast.backends.reference import Reference
from encast.errors import InputError
from encast.ir import Graph, verify
from encast.passes import optimise
from encast.passes.move_outliers import move_outliers
from encast.passes.report import Outcome
from encast.quant import Calibration, QuantSpec

SPEC = QuantSpec(move_outliers=0.5)


def fused(graph: Graph) -> Graph:
    return optimise(graph, QuantSpec("f32"))[0]


def seen_by(graph: Graph) -> dict[str, np.ndarray]:
    """The largest magnitude of every channel of what linears read."""
    requests = batch(graph)
    names = {node.inputs[0] for node in graph.nodes if node.op == "linear"}
    values = Reference(graph).values(names, requests, np.arange(requests.tokens, dtype=np.int32))
    return {name: np.abs(values[name]).max(axis=0) for name in names}


def moved(graph: Graph, spec: QuantSpec = SPEC) -> tuple[Graph, Outcome]:
    """A copy of a fused graph with outliers moved."""
    changed = graph.copy()
    outcome = move_outliers(changed, spec, seen_by(graph))
    verify(changed)
    return changed, outcome


def answers(graph: Graph, output: str) -> np.ndarray:
    requests = batch(graph)
    select = np.arange(0, requests.tokens, 2, dtype=np.int32) if output == "logits" else None
    return Reference(graph).evaluate(output, requests, select)


def pre_norm(rms: bool = False) -> Graph:
    """One block in which only products read what the norm makes."""
    builder = Builder()
    x = builder.embeddings()
    gamma = builder.constant("gamma", 32, scale=0.2, offset=1.3)
    y = builder.graph.add("rms_norm", x, gamma, name="norm", eps=1e-5) if rms else builder.norm(x, "norm")
    a, b = builder.linear(y, "a", 32), builder.linear(y, "b", 32)
    total = builder.graph.add("add", a, b, name="ab")
    builder.graph.outputs["last_hidden_state"] = builder.graph.add("add", total, x, name="out")
    builder.graph.meta = replace(builder.graph.meta, layers=0)
    return builder.graph


@pytest.mark.parametrize(
    ("graph", "output"),
    [
        (encoder(layers=2), "embedding"),
        (encoder(layers=2, activation="relu"), "embedding"),
        (encoder(layers=3, shared=True), "embedding"),
        (encoder(layers=2, relative=True), "embedding"),
        (masked_lm(), "logits"),
        (pre_norm(), "last_hidden_state"),
        (pre_norm(rms=True), "last_hidden_state"),
    ],
    ids=["gelu", "relu", "shared", "relative", "masked", "pre-norm", "rms"],
)
@pytest.mark.parametrize("exponent", [0.0, 0.5, 0.8, 1.0])
def test_the_function_keeps_every_bit(graph: Graph, output: str, exponent: float) -> None:
    before = fused(graph)
    after, outcome = moved(before, QuantSpec(move_outliers=exponent))
    assert outcome.changes > 0
    assert any(name.endswith(".moved") for name in after.constants)
    assert np.array_equal(answers(before, output), answers(after, output))


def test_where_it_is_possible_in_post_norm() -> None:
    """Contexts, and by a second norm what norms make; not what gelu makes, nor the norm of the embeddings."""
    before = fused(encoder(layers=2))
    after, outcome = moved(before)
    counts = Counter(node.op for node in after.nodes)
    assert counts["add_layer_norm"] == Counter(node.op for node in before.nodes)["add_layer_norm"] + 3
    assert counts["embed_layer_norm"] == 1
    # Two contexts, and three norms of the layers; products read no more of the last.
    assert outcome.changes == 2 + 3
    for node in after.nodes:
        if node.name.endswith((".inner", ".self.qkv")) and "layer.0.attention.self" not in node.name:
            assert node.inputs[0].endswith(".moved"), node.name
        if node.op == "add_layer_norm":
            assert not node.inputs[1].endswith(".moved"), "a residual reads the norm as it was"


def test_relu_passes_factors_on() -> None:
    after, outcome = moved(fused(encoder(layers=2, activation="relu")))
    assert outcome.changes == 2 + 3 + 2
    output = next(node for node in after.nodes if node.name == "encoder.layer.0.output")
    assert output.inputs[1].endswith(".moved")


def test_a_norm_that_products_alone_read_has_no_twin() -> None:
    before = fused(pre_norm())
    after, outcome = moved(before)
    assert outcome.changes == 1
    assert len(after.nodes) == len(before.nodes)
    norm = next(node for node in after.nodes if node.op == "layer_norm")
    gamma, old = after.constants[norm.inputs[1]].array, before.constants["norm.weight"].array
    factor = old / gamma
    x = seen_by(before)["norm"]
    w = np.maximum(*(np.abs(before.constants[f"{name}.weight"].array).max(axis=0) for name in "ab"))
    np.testing.assert_array_equal(factor, np.exp2(np.rint(np.log2(np.sqrt(x / w)))))
    assert len(set(factor.tolist())) > 1
    assert "norm.weight" not in after.constants, "what nothing reads is let go"


def test_a_channel_that_is_far_out_is_far_out_no_more() -> None:
    builder = Builder()
    graph = encoder(layers=1, seed=3)
    value, dense = "encoder.layer.0.attention.self.value", "encoder.layer.0.attention.output.weight"
    constants = graph.constants
    for name in (f"{value}.weight", f"{value}.bias"):
        array = constants[name].array.copy()
        array[5] *= 256
        constants[name] = replace(constants[name], array=array)
    array = constants[dense].array.copy()
    array[:, 5] /= 256
    constants[dense] = replace(constants[dense], array=array)
    assert builder.hidden == array.shape[1]
    before = fused(graph)
    after, _ = moved(before)
    context = "encoder.layer.0.attention.context"
    was, now = seen_by(before)[context], seen_by(after)[context]
    assert was[5] / np.median(was) > 50
    assert now[5] / np.median(now) < 5
    assert np.array_equal(answers(before, "embedding"), answers(after, "embedding"))


def test_layers_that_share_their_weights_share_the_moved_ones() -> None:
    """The first layer's projection reads the embeddings' norm, which has no twin: it keeps its own weights."""
    spec = replace(SPEC, activations="dynamic")
    before = fused(encoder(layers=4, shared=True))
    graph, _ = optimise(
        encoder(layers=4, shared=True), spec, calibration=Calibration({}, 1, 0.5, seen_by(before)), strict=True
    )
    assert Counter(node.op for node in graph.nodes)["linear_int8"] == 16
    assert len([constant for constant in graph.constants.values() if constant.type.dtype == "s8"]) == 5


def test_products_that_stay_wide_keep_what_they_read() -> None:
    before = fused(encoder(layers=2))
    after, outcome = moved(before, replace(SPEC, keep=(("*", "f32"),)))
    assert outcome.changes == 0
    assert list(after.constants) == list(before.constants)
    kept, _ = moved(before, replace(SPEC, keep=(("*.inner", "f32"),)))
    for node in kept.nodes:
        if node.name.endswith(".inner"):
            assert not node.inputs[0].endswith(".moved")


def test_the_embedding_that_a_decoder_shares_stays() -> None:
    before = fused(masked_lm())
    after, _ = moved(before)
    word = next(node for node in after.nodes if node.op == "embed_layer_norm").inputs[2]
    assert after.constants[word].array is before.constants["embeddings.word.weight"].array


@pytest.mark.parametrize("change", ["absent", "of other sizes"])
def test_another_models_calibration_is_refused(change: str) -> None:
    graph = fused(encoder(layers=2))
    seen: dict[str, Any] = seen_by(graph)
    name = "encoder.layer.0.attention.context"
    if change == "absent":
        del seen[name]
    else:
        seen[name] = seen[name][:-1]
    with pytest.raises(InputError, match=r"has not seen 'encoder.layer.0.attention.context'"):
        move_outliers(graph, SPEC, seen)


def test_without_the_wish_nothing_moves() -> None:
    graph = fused(encoder(layers=1))
    text = str(graph)
    assert move_outliers(graph, QuantSpec(), {}).changes == 0
    assert str(graph) == text


@pytest.mark.parametrize(
    ("spec", "calibration", "message"),
    [
        (QuantSpec(activations="static"), None, "static activations need a calibration"),
        (SPEC, None, "move_outliers need a calibration"),
        (QuantSpec(), Calibration({}, 1), "int8 with dynamic activations needs none"),
        (SPEC, Calibration({}, 1, 0.7), "made with move_outliers 0.7, 0.5 is asked for"),
    ],
)
def test_spec_and_calibration_must_fit(spec: QuantSpec, calibration: Calibration | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        optimise(encoder(layers=1), spec, calibration=calibration)
