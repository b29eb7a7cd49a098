"""What depends on tables alone is computed once, at compile time, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from graphs import Builder, batch

from encast.backends.reference import Reference
from encast.ir import Graph, verify
from encast.passes.fold_tables import fold_tables
from encast.passes.report import Outcome


def folded(graph: Graph) -> tuple[Graph, Outcome]:
    changed = graph.copy()
    outcome = fold_tables(changed)
    verify(changed)
    return changed, outcome


def relative(**options: bool) -> Graph:
    """Scores with a projected table, normalised if asked for."""
    builder = Builder(layers=1)
    graph = builder.graph
    x = builder.embeddings()
    table = builder.constant("encoder.rel_embeddings.weight", 16, 32)
    if options.get("norm"):
        table = builder.norm(table, "encoder.LayerNorm")
    q, k = (builder.linear(x, part, 32) for part in ("query", "key"))
    scores = graph.add("attention_scores", q, k, name="scores", heads=2)
    made = builder.linear(table, "pos_key", 32)
    scores = graph.add("relative_scores", scores, q, made, name="c2p", of="query", max_distance=20)
    probs = graph.add("softmax", scores, name="probs")
    graph.outputs["last_hidden_state"] = graph.add("attention_context", probs, x, name="context")
    return graph


@pytest.mark.parametrize("norm", [False, True])
def test_projected_tables_become_constants_of_the_same_name(norm: bool) -> None:
    graph = relative(norm=norm)
    changed, outcome = folded(graph)
    assert outcome.changes == 1 + norm
    (name,) = [node.inputs[2] for node in graph.nodes if node.op == "relative_scores"]
    assert changed.constants[name].array.shape == (16, 32)
    assert changed.constants[name].array.dtype == np.float32
    # What only the projection read is no constant: a rounded norm would be one rounding more.
    assert sum(node.op == "layer_norm" for node in changed.nodes) == 1
    assert set(changed.constants) - set(graph.constants) == {name}
    requests = batch(graph)
    plain = Reference(graph).evaluate("last_hidden_state", requests)
    assert np.abs(Reference(changed).evaluate("last_hidden_state", requests) - plain).max() < 1e-6
    exact = np.asarray(Reference(graph).values([name], requests)[name])
    np.testing.assert_array_equal(changed.constants[name].array, exact.astype(np.float32))


def projected(positions: bool = True, bias: bool = False) -> Graph:
    builder = Builder(layers=1, hidden=24)
    graph = builder.graph
    total = ""
    graph.add_input("token_type_ids", graph.inputs["token_ids"])
    ids = graph.add("position_ids", "token_ids", name="ids", offset=0, skip_id=-1)
    terms = [("token_ids", "word", 50), ("token_type_ids", "type", 2), (ids, "position", 24)][: 3 if positions else 1]
    for source, name, rows in terms:
        row = graph.add("embedding", source, builder.constant(f"{name}.weight", rows, 24), name=name)
        total = graph.add("add", total, row, name=f"sum.{name}") if total else row
    x = builder.linear(total, "embed_proj", 32, bias=bias)
    graph.outputs["last_hidden_state"] = builder.norm(x, "norm")
    return graph


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_projection_of_embeddings_goes_into_their_tables(positions: bool, bias: bool) -> None:
    graph = projected(positions, bias)
    changed, outcome = folded(graph)
    assert outcome.changes == 1
    assert not [node for node in changed.nodes if node.op == "linear"]
    tables = {changed.type_of(node.inputs[1]).shape for node in changed.nodes if node.op == "embedding"}
    assert tables == ({(50, 32), (2, 32), (24, 32)} if positions else {(50, 32)})
    requests = batch(graph)
    plain = Reference(graph).evaluate("last_hidden_state", requests)
    assert np.abs(Reference(changed).evaluate("last_hidden_state", requests) - plain).max() < 1e-6


def also_output(graph: Graph) -> None:
    graph.outputs["sum"] = next(node.outputs[0] for node in graph.nodes if node.name == "sum.position")


def also_read(graph: Graph) -> None:
    word = next(node.outputs[0] for node in graph.nodes if node.name == "word")
    graph.outputs["other"] = graph.add("scale", word, name="other", factor=2.0)


def another_op(graph: Graph) -> None:
    """A norm between the sum and the projection."""
    linear = next(node for node in graph.nodes if node.op == "linear")
    total = linear.inputs[0]
    place = graph.nodes.index(linear)
    rest, graph.nodes = graph.nodes[place:], graph.nodes[:place]
    linear.inputs[0] = graph.add("scale", total, name="scaled", factor=0.5)
    graph.nodes += rest


def activated(graph: Graph) -> None:
    next(node for node in graph.nodes if node.op == "linear").attrs["activation"] = "gelu"


def added_to_itself(graph: Graph) -> None:
    total = next(node for node in graph.nodes if node.name == "sum.position")
    total.inputs[1] = total.inputs[0]


@pytest.mark.parametrize("change", [also_output, also_read, another_op, activated, added_to_itself])
def test_near_misses_of_a_projection_stay(change: Callable[[Graph], None]) -> None:
    graph = projected()
    change(graph)
    graph.drop_unused()
    changed, outcome = folded(graph)
    assert outcome.changes == 0
    assert [node.name for node in changed.nodes] == [node.name for node in graph.nodes]


def test_a_product_of_tokens_is_no_table() -> None:
    graph = relative()
    changed, _ = folded(graph)
    assert [node.name for node in changed.nodes if node.op == "linear"] == ["query", "key"]
