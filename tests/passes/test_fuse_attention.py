"""Attention fuses when it computes exactly what the fused op computes, and says why when it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import Builder, batch, encoder

from encast.archs.expansion import hide_expansion
from encast.backends.reference import Reference
from encast.ir import Graph, Node, verify
from encast.passes.fuse_attention import fuse_attention
from encast.passes.report import Outcome


def one_attention(**options: object) -> tuple[Builder, Graph]:
    builder = Builder(layers=1)
    x = builder.embeddings()
    builder.graph.outputs["last_hidden_state"] = builder.attention(x, "attention", 0, **options)  # type: ignore[arg-type]
    return builder, builder.graph


def fused(graph: Graph, exact: bool = False) -> tuple[Graph, Outcome]:
    changed = graph.copy()
    outcome = fuse_attention(changed, exact)
    changed.drop_unused()
    verify(changed)
    return changed, outcome


def node(graph: Graph, op: str, name: str = "") -> Node:
    return next(node for node in graph.nodes if node.op == op and name in node.name)


@pytest.mark.parametrize("scale", ["scores", "q", "none"])
@pytest.mark.parametrize("relative", [False, True])
def test_every_form_fuses_to_the_same_bits(scale: str, relative: bool) -> None:
    """Heads of 16: the factor 1/4 is a power of two, so that folding it is exact."""
    _, graph = one_attention(scale=scale, relative=relative)
    changed, outcome = fused(graph)
    assert outcome.fused == [("qkv", 0), ("attention", 0)]
    attention = node(changed, "attention")
    assert attention.attrs == {"heads": 2, "scale": 1.0, "products": "f32"}
    requests = batch(graph)
    plain = Reference(graph).evaluate("last_hidden_state", requests)
    assert np.abs(Reference(changed).evaluate("last_hidden_state", requests) - plain).max() < 1e-14


@pytest.mark.parametrize("relative", [False, True])
def test_hidden_keys_become_an_operand(relative: bool) -> None:
    _, graph = one_attention(relative=relative)
    requests = batch(graph)
    token = int(requests.token_ids[-1])
    seen_all = Reference(graph).evaluate("last_hidden_state", requests)
    hide_expansion(graph, token, 2, "the checkpoint")
    verify(graph)
    plain = Reference(graph).evaluate("last_hidden_state", requests)
    assert np.abs(plain - seen_all).max() > 1e-3
    changed, outcome = fused(graph)
    assert outcome.fused == [("qkv", 0), ("attention", 0)]
    assert node(changed, "attention").inputs[2] == "seen_tokens"
    assert np.abs(Reference(changed).evaluate("last_hidden_state", requests) - plain).max() < 1e-14


def test_hidden_scores_that_are_read_elsewhere_do_not_fuse() -> None:
    _, graph = one_attention()
    hide_expansion(graph, 1, 2, "the checkpoint")
    graph.outputs["extra"] = graph.add("scale", node(graph, "hide_keys").outputs[0], name="extra", factor=2.0)
    _, outcome = fused(graph)
    assert outcome.fused == []


def test_qkv_holds_all_rows_of_q_then_k_then_v() -> None:
    _, graph = one_attention()
    changed, _ = fused(graph)
    weight = changed.constants["attention.self.qkv.weight"].array
    bias = changed.constants["attention.self.qkv.bias"].array
    for index, (part, factor) in enumerate((("query", 0.25), ("key", 1.0), ("value", 1.0))):
        rows = slice(32 * index, 32 * (index + 1))
        assert (weight[rows] == graph.constants[f"attention.self.{part}.weight"].array * factor).all()
        assert (bias[rows] == graph.constants[f"attention.self.{part}.bias"].array * factor).all()


def test_exact_mode_leaves_a_factor_that_would_round() -> None:
    builder = Builder(layers=1, hidden=24, heads=2)
    builder.graph.outputs["last_hidden_state"] = builder.attention(builder.embeddings(), "attention", 0)
    graph = builder.graph
    changed, _ = fused(graph, exact=True)
    assert node(changed, "attention").attrs["scale"] == pytest.approx(12**-0.5)
    assert (
        changed.constants["attention.self.qkv.weight"].array[:24]
        == graph.constants["attention.self.query.weight"].array
    ).all()
    folded, _ = fused(graph)
    assert node(folded, "attention").attrs["scale"] == 1.0


def test_folding_rounds_once() -> None:
    builder = Builder(layers=1, hidden=24, heads=2)
    builder.graph.outputs["last_hidden_state"] = builder.attention(builder.embeddings(), "attention", 0)
    changed, _ = fused(builder.graph)
    weight = builder.graph.constants["attention.self.query.weight"].array
    wanted = (weight.astype(np.float64) * 12**-0.5).astype(np.float32)
    assert (changed.constants["attention.self.qkv.weight"].array[:24] == wanted).all()


def test_missing_biases_become_zeros_and_no_bias_stays_none() -> None:
    for part in ("query", "key", "value", "all"):
        _, graph = one_attention()
        for linear in graph.nodes:
            if linear.op == "linear" and part in (linear.name.rpartition(".")[2], "all"):
                del linear.inputs[2:]
        changed, _ = fused(graph)
        joined = node(changed, "linear")
        assert bool(joined.inputs[2]) == (part != "all")
        requests = batch(graph)
        plain = Reference(graph).evaluate("last_hidden_state", requests)
        assert np.abs(Reference(changed).evaluate("last_hidden_state", requests) - plain).max() < 1e-14


def test_layers_that_share_weights_share_the_joined_ones() -> None:
    graph = encoder(layers=4, shared=True, relative=True)
    changed, outcome = fused(graph)
    assert outcome.changes == 4
    joined = [node for node in changed.nodes if node.name.endswith("qkv")]
    assert len(joined) == 4
    assert len({tuple(node.inputs[1:]) for node in joined}) == 1
    assert len({node.inputs[1] for node in changed.nodes if node.op == "attention"}) == 1


def test_the_distance_table_reaches_max_len() -> None:
    _, graph = one_attention(relative=True)
    changed, _ = fused(graph)
    assert changed.type_of(node(changed, "attention").inputs[1]).shape == (2, 2 * 24 - 1)


def alibi() -> Graph:
    """Attention whose scores a linear bias lowers, of 2 heads."""
    builder = Builder(layers=1)
    graph, x = builder.graph, builder.embeddings()
    q, k, v = (builder.linear(x, f"attention.self.{part}", 32, 0) for part in ("query", "key", "value"))
    scores = graph.add("attention_scores", q, k, name="attention.scores", layer=0, heads=2)
    scores = graph.add("scale", scores, name="attention.scaled", layer=0, factor=0.25)
    slopes = graph.add_constant("slopes", np.array([0.5, 2.0**-0.5], np.float32))
    scores = graph.add("linear_bias", scores, slopes, name="attention.biased", layer=0)
    probs = graph.add("softmax", scores, name="attention.probs", layer=0)
    graph.outputs["last_hidden_state"] = graph.add("attention_context", probs, v, name="attention.context", layer=0)
    return graph


def test_a_linear_bias_is_a_table_of_distances() -> None:
    graph = alibi()
    changed, outcome = fused(graph)
    assert outcome.fused == [("qkv", 0), ("attention", 0)]
    table = changed.constants[node(changed, "attention").inputs[1]].array
    assert table.shape == (2, 2 * 24 - 1)
    distances = np.abs(np.arange(-23, 24))
    slopes = graph.constants["slopes"].array.astype(np.float64)
    np.testing.assert_array_equal(table, (-slopes[:, None] * distances).astype(np.float32))
    requests = batch(graph)
    plain = Reference(graph).evaluate("last_hidden_state", requests)
    assert np.abs(Reference(changed).evaluate("last_hidden_state", requests) - plain).max() < 1e-6


def test_a_linear_bias_that_is_read_elsewhere_stays_plain() -> None:
    graph = alibi()
    graph.outputs["extra"] = graph.add("scale", "attention.biased", name="extra", factor=2.0)
    changed, outcome = fused(graph)
    assert not outcome.fused
    assert "also read by scale 'extra'" in outcome.missed[0].reason
    assert "linear_bias" in {node.op for node in changed.nodes}


def modern(reach: int = 3, rate: tuple[float, float] = (1.0, 1.0), **theta: float) -> Graph:
    """Attention with rotary positions and a local mask, in heads of 16; ``theta``: other bases, of q or of k, as
    ``rate``: other rates.
    """
    builder = Builder(layers=1)
    graph, x = builder.graph, builder.embeddings()
    q, k, v = (builder.linear(x, f"attention.self.{part}", 32, 0) for part in ("query", "key", "value"))
    of_q = {"theta": theta.get("q", 100.0), "rate": rate[0]}
    of_k = {"theta": theta.get("k", 100.0), "rate": rate[1]}
    q = graph.add("rotary", q, name="attention.rotary.query", layer=0, heads=2, **of_q)
    k = graph.add("rotary", k, name="attention.rotary.key", layer=0, heads=2, **of_k)
    scores = graph.add("attention_scores", q, k, name="attention.scores", layer=0, heads=2)
    scores = graph.add("scale", scores, name="attention.scaled", layer=0, factor=0.25)
    scores = graph.add("local_mask", scores, name="attention.near", layer=0, reach=reach)
    probs = graph.add("softmax", scores, name="attention.probs", layer=0)
    graph.outputs["last_hidden_state"] = graph.add("attention_context", probs, v, name="attention.context", layer=0)
    return graph


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_rotary_and_local_attention(rate: float) -> None:
    graph = modern(rate=(rate, rate))
    changed, outcome = fused(graph)
    assert outcome.fused == [("qkv", 0), ("attention", 0)]
    assert node(changed, "local_attention").attrs == {"heads": 2, "scale": 1.0, "products": "f32", "reach": 3}
    turned = node(changed, "rotary_qkv")
    assert turned.attrs == {"heads": 2}
    table = changed.constants[turned.inputs[1]].array
    assert table.shape == (24, 16)
    angles = 23 * rate * 100.0 ** (-np.arange(0, 16, 2) / 16)
    np.testing.assert_array_equal(table[23], np.r_[np.cos(angles), np.sin(angles)].astype(np.float32))
    requests = batch(graph)
    plain = Reference(graph).evaluate("last_hidden_state", requests)
    # The table is rounded to f32.
    difference = np.abs(Reference(changed).evaluate("last_hidden_state", requests) - plain).max()
    assert 0 < difference < 1e-6


@pytest.mark.parametrize("unlike", [{"k": 101.0}, {"rate": (1.0, 0.5)}])
def test_unlike_rotaries_stay_plain(unlike: dict[str, Any]) -> None:
    changed, outcome = fused(modern(**unlike))
    assert not outcome.fused
    assert "do not turn the heads of the scores alike" in outcome.missed[0].reason
    assert "attention" not in {node.op for node in changed.nodes}


def only_queries_turned(graph: Graph) -> None:
    graph.nodes.remove(node(graph, "rotary", "key"))
    del graph.values["attention.rotary.key"]
    node(graph, "attention_scores").inputs[1] = "attention.self.key"


MODERN_MISSES = {
    "keys are not turned": (only_queries_turned, "not by rotary"),
    "near scores are read": (lambda graph: also_read("attention.near")(graph), "also read by scale 'extra'"),
    "turned queries are read": (lambda graph: also_read("attention.rotary.query")(graph), "also read by scale 'extra'"),
    "keys are an output": (lambda graph: also_output("attention.self.key")(graph), "output of the graph"),
}


@pytest.mark.parametrize("miss", MODERN_MISSES)
def test_near_misses_of_rotary_and_local_attention(miss: str) -> None:
    spoil, reason = MODERN_MISSES[miss]
    graph = modern()
    spoil(graph)
    verify(graph)
    changed, outcome = fused(graph)
    assert outcome.fused == []
    assert reason in outcome.missed[0].reason, outcome.missed
    assert not {"local_attention", "rotary_qkv"} & {node.op for node in changed.nodes}


def distances(widths: tuple[int, int] = (36, 36), scaled: bool = True, **changes: object) -> Graph:
    """Scores with vectors of distances, as DeBERTa has them; ``changes``: of the second one.

    ``widths``: of the tables, 12 for one of all heads. Without ``scaled`` they are added behind the scale.
    """
    builder = Builder(layers=1, hidden=36, heads=3)
    graph = builder.graph
    x = builder.embeddings()
    q, k, v = (builder.linear(x, f"self.{part}", 36, 0) for part in ("query", "key", "value"))
    scores = graph.add("attention_scores", q, k, name="scores", layer=0, heads=3)
    scale = {"name": "scaled", "layer": 0, "factor": 36**-0.5}
    if not scaled:
        scores = graph.add("scale", scores, **scale)
    tables = [builder.constant(f"pos_{part}", 16, width) for part, width in zip(("key", "query"), widths, strict=True)]
    rule = {"of": "key", "max_distance": 20, **changes}
    scores = graph.add("relative_scores", scores, q, tables[0], name="c2p", layer=0, of="query", max_distance=0)
    scores = graph.add("relative_scores", scores, k, tables[1], name="p2c", layer=0, **rule)
    if scaled:
        scores = graph.add("scale", scores, **scale)
    probs = graph.add("softmax", scores, name="probs", layer=0)
    graph.outputs["last_hidden_state"] = graph.add("attention_context", probs, v, name="context", layer=0)
    return graph


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("width", [36, 12])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("sides", [("query", "key"), ("query",), ("key",)])
def test_vectors_of_distances(sides: tuple[str, ...], scaled: bool, width: int, exact: bool) -> None:
    """In both modes: with the factor in the queries, where it goes into the other table too, and left to the end.

    Of each head and of all; scaled with the scores, or added to scaled ones, for which the tables are divided.
    """
    graph = distances((width, width), scaled)
    for side, name in (("query", "c2p"), ("key", "p2c")):
        if side not in sides:
            left_out = node(graph, "relative_scores", name)
            for other in graph.nodes:
                other.inputs = [left_out.inputs[0] if one == left_out.outputs[0] else one for one in other.inputs]
            graph.nodes.remove(left_out)
            del graph.values[left_out.outputs[0]]
    verify(graph)
    changed, outcome = fused(graph, exact)
    assert outcome.fused == [("qkv", 0), ("attention", 0)]
    attention = node(changed, "disentangled_attention")
    assert attention.attrs == {
        "heads": 3,
        "scale": pytest.approx(36**-0.5 if exact else 1.0),
        "products": "f32",
        "shared": width == 12,
    }
    assert [bool(name) for name in attention.inputs[1:]] == [side in sides for side in ("query", "key")]
    requests = batch(graph)
    plain = Reference(graph).evaluate("last_hidden_state", requests)
    difference = np.abs(Reference(changed).evaluate("last_hidden_state", requests) - plain).max()
    # What is divided is rounded too.
    assert difference < (1e-14 if exact and scaled else 1e-6)


def same_side(graph: Graph) -> None:
    node(graph, "relative_scores", "p2c").attrs["of"] = "query"
    node(graph, "relative_scores", "p2c").inputs[1] = node(graph, "relative_scores", "c2p").inputs[1]


def other_rows(graph: Graph) -> None:
    node(graph, "relative_scores", "c2p").inputs[1] = node(graph, "attention_scores").inputs[1]


def computed_table(graph: Graph) -> None:
    table = node(graph, "relative_scores", "c2p")
    place = graph.nodes.index(table)
    rest, graph.nodes = graph.nodes[place:], graph.nodes[:place]
    table.inputs[2] = graph.add("scale", table.inputs[2], name="scaled_table", factor=2.0)
    graph.nodes += rest


def scores_elsewhere(graph: Graph) -> None:
    scores = node(graph, "relative_scores", "c2p").outputs[0]
    graph.outputs["scores"] = graph.add("softmax", scores, name="other")


def scale_between(graph: Graph) -> None:
    """One side is added before the scores are scaled, the other one behind."""
    first, second, scale = (
        node(graph, op, name)
        for op, name in (("relative_scores", "c2p"), ("relative_scores", "p2c"), ("scale", "scaled"))
    )
    graph.nodes.remove(scale)
    graph.nodes.insert(graph.nodes.index(second), scale)
    scale.inputs = list(first.outputs)
    second.inputs[0] = scale.outputs[0]
    node(graph, "softmax").inputs = list(second.outputs)


DISTANCES_MISSES = {
    "same side": (same_side, "is a second one of its side"),
    "other rows": (other_rows, "'c2p' reads 'self.key', not 'self.query'"),
    "computed table": (computed_table, "is not a constant"),
    "scores elsewhere": (scores_elsewhere, "also read by"),
    "scale between": (scale_between, "is scaled, and what is added to it later is not"),
}


@pytest.mark.parametrize("miss", DISTANCES_MISSES)
def test_near_misses_of_vectors_of_distances(miss: str) -> None:
    change, reason = DISTANCES_MISSES[miss]
    graph = distances()
    change(graph)
    need_missed(graph, reason)


def test_tables_of_each_head_and_of_all_do_not_mix() -> None:
    need_missed(distances((36, 12)), "are of unlike widths")


def need_missed(graph: Graph, reason: str) -> None:
    verify(graph)
    changed, outcome = fused(graph)
    assert not outcome.fused
    assert {miss.fusion for miss in outcome.missed} == {"qkv", "attention"}
    assert reason in outcome.missed[0].reason, outcome.missed
    assert [node.name for node in changed.nodes] == [node.name for node in graph.nodes]


def also_output(value: str) -> Callable[[Graph], None]:
    def spoil(graph: Graph) -> None:
        graph.outputs["extra"] = value

    return spoil


def also_read(value: str) -> Callable[[Graph], None]:
    def spoil(graph: Graph) -> None:
        graph.outputs["extra"] = graph.add("scale", value, name="extra", factor=2.0)

    return spoil


def other_source(part: str) -> Callable[[Graph], None]:
    def spoil(graph: Graph) -> None:
        linear = node(graph, "linear", part)
        embedded = graph.nodes.index(node(graph, "layer_norm"))
        doubled = Node("scale", ["embeddings.LayerNorm"], ["doubled"], {"factor": 2.0}, "doubled")
        graph.nodes.insert(embedded + 1, doubled)
        graph.values["doubled"] = graph.type_of("embeddings.LayerNorm")
        linear.inputs[0] = "doubled"

    return spoil


def activated(part: str) -> Callable[[Graph], None]:
    def spoil(graph: Graph) -> None:
        node(graph, "linear", part).attrs["activation"] = "relu"

    return spoil


def same_key_as_query(graph: Graph) -> None:
    scores = node(graph, "attention_scores")
    scores.inputs[1] = scores.inputs[0]


def value_is_no_projection(graph: Graph) -> None:
    node(graph, "attention_context").inputs[1] = "embeddings.LayerNorm"


def negative_factor(graph: Graph) -> None:
    node(graph, "scale").attrs["factor"] = -1.0


MISSES = {
    "scores are an output": (also_output("attention.scores"), "output of the graph"),
    "scaled scores are an output": (also_output("attention.scaled"), "output of the graph"),
    "biased scores are read": (also_read("attention.biased"), "also read by scale 'extra'"),
    "probabilities are read": (also_read("attention.probs"), "also read by scale 'extra'"),
    "query is read": (also_read("attention.self.query"), "also read by scale 'extra'"),
    "key is an output": (also_output("attention.self.key"), "output of the graph"),
    "value is read": (also_read("attention.self.value"), "also read by scale 'extra'"),
    "query of another source": (other_source("query"), "reads 'embeddings.LayerNorm'"),
    "value of another source": (other_source("value"), "reads 'doubled'"),
    "activation on the key": (activated("key"), "ends in an activation"),
    "key is the query": (same_key_as_query, "the same value"),
    "value is no projection": (value_is_no_projection, "also read by"),
    "negative factor": (negative_factor, "scaled by -1.0"),
}


@pytest.mark.parametrize("miss", MISSES)
def test_near_misses_stay_plain_and_say_why(miss: str) -> None:
    spoil, reason = MISSES[miss]
    _, graph = one_attention(relative=True)
    spoil(graph)
    verify(graph)
    before = {node.name for node in graph.nodes}
    changed, outcome = fused(graph)
    assert outcome.fused == []
    assert any(reason in missed.reason for missed in outcome.missed), outcome.missed
    assert {missed.fusion for missed in outcome.missed} == {"attention", "qkv"}
    assert {node.name for node in changed.nodes} <= before
    assert "attention" not in {node.op for node in changed.nodes}


def test_values_of_another_width_stay_plain() -> None:
    builder = Builder(layers=1)
    x = builder.embeddings()
    q, k = (builder.linear(x, f"a.{part}", 32, 0) for part in "qk")
    v = builder.linear(x, "a.v", 64, 0)
    scores = builder.graph.add("attention_scores", q, k, name="scores", layer=0, heads=2)
    probs = builder.graph.add("softmax", scores, name="probs", layer=0)
    builder.graph.outputs["last_hidden_state"] = builder.graph.add(
        "attention_context", probs, v, name="context", layer=0
    )
    changed, outcome = fused(builder.graph)
    assert not outcome.fused
    assert "values are f32[tokens, 64]" in outcome.missed[0].reason
    assert str(changed) == str(builder.graph)
