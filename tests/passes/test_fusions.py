"""The small fusions: what they match, what they must not, and that answers stay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from graphs import Builder, batch, encoder

from encast.backends.reference import Reference
from encast.errors import GraphError
from encast.ir import Graph, Node, verify
from encast.ir.types import ValueType
from encast.passes.fold_constants import fold_constants
from encast.passes.fuse_add_layer_norm import fuse_add_layer_norm
from encast.passes.fuse_embed_layer_norm import fuse_embed_layer_norm
from encast.passes.fuse_linear_activation import fuse_linear_activation
from encast.passes.patch import Index, Patch, apply, fresh_name
from encast.passes.report import Outcome


def run(graph: Graph, rewrite: Callable[[Graph], Outcome]) -> tuple[Graph, Outcome]:
    changed = graph.copy()
    outcome = rewrite(changed)
    changed.drop_unused()
    verify(changed)
    return changed, outcome


def difference(graph: Graph, changed: Graph, output: str = "last_hidden_state") -> float:
    requests = batch(graph)
    plain = Reference(graph).evaluate(output, requests)
    return float(np.abs(Reference(changed).evaluate(output, requests) - plain).max())


def add_scaled(graph: Graph, value: str) -> None:
    graph.outputs["extra"] = graph.add("scale", value, name="extra", factor=2.0)


class TestLinearActivation:
    @pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu", "silu", "tanh"])
    def test_takes_the_activation_in(self, kind: str) -> None:
        graph = encoder(activation=kind)
        changed, outcome = run(graph, fuse_linear_activation)
        assert outcome.fused == [("linear_activation", 0), ("linear_activation", 1)]
        assert [node.attrs["activation"] for node in changed.nodes if node.name.endswith("inner")] == [kind, kind]
        assert difference(graph, changed) == 0.0

    @pytest.mark.parametrize("reason", ["also read by", "output of the graph", "ends in relu already", "not by linear"])
    def test_near_misses(self, reason: str) -> None:
        graph = encoder(layers=1)
        inner = next(node for node in graph.nodes if node.name.endswith("inner"))
        activation = next(node for node in graph.nodes if node.op == "activation")
        if reason == "also read by":
            add_scaled(graph, inner.outputs[0])
        elif reason == "output of the graph":
            graph.outputs["extra"] = inner.outputs[0]
        elif reason == "ends in relu already":
            inner.attrs["activation"] = "relu"
        else:
            position = graph.nodes.index(activation)
            graph.nodes.insert(position, Node("scale", [inner.outputs[0]], ["between"], {"factor": 2.0}, "between", 0))
            graph.values["between"] = graph.type_of(inner.outputs[0])
            activation.inputs[0] = "between"
        changed, outcome = run(graph, fuse_linear_activation)
        assert not outcome.fused
        assert reason in outcome.missed[0].reason
        assert difference(graph, changed) == 0.0

    def test_an_output_keeps_its_name(self) -> None:
        graph = encoder(layers=1)
        graph.outputs["inner"] = "encoder.layer.0.activation"
        changed, _ = run(graph, fuse_linear_activation)
        assert changed.outputs["inner"] == "encoder.layer.0.activation"
        assert difference(graph, changed, "inner") == 0.0


class TestAddLayerNorm:
    def test_takes_the_residual_in(self) -> None:
        graph = encoder()
        changed, outcome = run(graph, fuse_add_layer_norm)
        # The embedding sum ends in an add too; in the pipeline it is gone by then.
        assert outcome.fused == [("add_layer_norm", layer) for layer in (-1, 0, 0, 1, 1)]
        assert difference(graph, changed) == 0.0

    @pytest.mark.parametrize("reason", ["also read by", "output of the graph", "not by add"])
    def test_near_misses(self, reason: str) -> None:
        builder = Builder()
        x = builder.embeddings()
        total = builder.graph.add("add", builder.linear(x, "l", 32), x, name="sum")
        if reason == "also read by":
            add_scaled(builder.graph, total)
        elif reason == "output of the graph":
            builder.graph.outputs["extra"] = total
        else:
            total = builder.graph.add("scale", total, name="scaled", factor=2.0)
        builder.graph.outputs["last_hidden_state"] = builder.norm(total, "norm")
        changed, outcome = run(builder.graph, fuse_add_layer_norm)
        assert ("norm", True) in [(miss.node, reason in miss.reason) for miss in outcome.missed]
        assert [node.op for node in changed.nodes if node.name == "norm"] == ["layer_norm"]


class TestEmbedLayerNorm:
    @pytest.mark.parametrize("order", ["wtp", "wpt", "ptw", "tpw"])
    @pytest.mark.parametrize("type_vocab", [0, 2])
    @pytest.mark.parametrize("skip_id", [-1, 1])
    def test_any_order_of_adds(self, order: str, type_vocab: int, skip_id: int) -> None:
        graph = encoder(order=order, type_vocab=type_vocab, skip_id=skip_id)
        changed, outcome = run(graph, fuse_embed_layer_norm)
        assert outcome.fused == [("embed_layer_norm", -1)]
        assert not {node.op for node in changed.nodes} & {"embedding", "position_ids"}
        assert difference(graph, changed) < 1e-13

    def test_without_positions(self) -> None:
        graph = encoder(positions=False)
        changed, outcome = run(graph, fuse_embed_layer_norm)
        assert outcome.fused == [("embed_layer_norm", -1)]
        assert difference(graph, changed) < 1e-13

    @pytest.mark.parametrize(
        "reason",
        [
            "output of the graph",
            "also read by",
            "two tables of kind word",
            "to itself",
            "not by add or embedding",
            "not those of token_ids",
            "no table is read by token_ids",
        ],
    )
    def test_near_misses(self, reason: str) -> None:
        builder = Builder(type_vocab=2)
        graph = builder.graph
        graph.add_input("token_type_ids", ValueType("i32", ("tokens",)))
        tables = {name: builder.constant(name, 50, 32) for name in ("word", "other", "position", "type")}
        source = "token_type_ids" if reason.startswith("not those") else "token_ids"
        ids = graph.add("position_ids", source, name="ids", offset=0, skip_id=-1)
        position = graph.add("embedding", ids, tables["position"], name="positions")
        if reason.startswith("no table"):
            words = graph.add("embedding", "token_type_ids", tables["type"], name="words")
        else:
            words = graph.add("embedding", "token_ids", tables["word"], name="words")
        if reason == "two tables of kind word":
            position = graph.add("embedding", "token_ids", tables["other"], name="others")
        if reason == "not by add or embedding":
            position = graph.add("scale", position, name="scaled", factor=2.0)
        total = graph.add("add", words, words if reason == "to itself" else position, name="sum")
        graph.outputs["last_hidden_state"] = builder.norm(total, "norm")
        if reason == "output of the graph":
            graph.outputs["extra"] = words
        if reason == "also read by":
            add_scaled(graph, position)
        changed, outcome = run(graph, fuse_embed_layer_norm)
        assert not outcome.fused
        assert reason in outcome.missed[0].reason
        assert str(changed) == str(run(graph, lambda graph: Outcome())[0])


class TestFoldConstants:
    @pytest.mark.parametrize("order", ["wtp", "ptw", "tpw", "wpt"])
    def test_the_only_token_type_goes_into_the_positions(self, order: str) -> None:
        graph = encoder(type_vocab=1, order=order)
        changed, outcome = run(graph, fold_constants)
        assert outcome.changes == 1
        assert "token_type_ids" not in changed.inputs
        tables = [node.inputs[1] for node in changed.nodes if node.op == "embedding"]
        assert sorted(tables) == ["embeddings.position.weight+embeddings.token_type.weight", "embeddings.word.weight"]
        assert difference(graph, changed) < 1e-6

    def test_without_positions_it_goes_into_the_words(self) -> None:
        graph = encoder(type_vocab=1, positions=False)
        changed, outcome = run(graph, fold_constants)
        assert outcome.changes == 1
        assert difference(graph, changed) < 1e-6

    @pytest.mark.parametrize("type_vocab", [0, 2])
    def test_tables_of_more_rows_stay(self, type_vocab: int) -> None:
        graph = encoder(type_vocab=type_vocab)
        changed, outcome = run(graph, fold_constants)
        assert outcome.changes == 0
        assert str(changed) == str(graph)

    @pytest.mark.parametrize("value", ["embeddings.token_type", "embeddings.sum_t"])
    def test_values_that_are_wanted_stay(self, value: str) -> None:
        graph = encoder(type_vocab=1)
        graph.outputs["extra"] = value
        changed, outcome = run(graph, fold_constants)
        assert outcome.changes == 0
        assert difference(graph, changed, "extra") == 0.0


class TestPatch:
    def test_overlapping_patches_are_a_defect(self) -> None:
        graph = encoder(layers=1)
        node = graph.nodes[-1]
        with pytest.raises(GraphError, match="two rewrites claim node 'normalize'"):
            apply(graph, [Patch((node,), (node,)), Patch((node,), (node,))])

    def test_foreign_nodes_are_a_defect(self) -> None:
        with pytest.raises(GraphError, match="not in the graph"):
            apply(encoder(layers=1), [Patch((Node("add", [], []),), ())])

    def test_names_do_not_collide(self) -> None:
        graph = encoder(layers=1)
        assert fresh_name(graph, "new") == "new"
        assert fresh_name(graph, "normalize") == "normalize.2"
        assert fresh_name(graph, "token_ids") == "token_ids.2"

    def test_the_index_agrees_with_the_graph(self) -> None:
        graph = encoder(relative=True)
        index = Index(graph)
        for name in (*graph.values, *graph.constants, *graph.inputs):
            assert index.producer(name) is graph.producer(name)
            assert list(index.users(name)) == graph.users(name)
            assert index.is_output(name) == graph.is_output(name)
