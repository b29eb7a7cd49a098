"""Computes at compile time what depends on tables alone.

    layer_norm(table), linear(table)                →   a constant
    linear(embedding(ids, table) + ...)             →   embedding(ids, linear(table)) + ...

The first is DeBERTa's: every layer projects the table of relative positions. The second is that of embeddings narrower
than the layers: the projected tables are larger, and no token is projected again. Both are computed in float64 and
rounded once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from encast.ir import Graph, Node
from encast.passes.patch import Index, MismatchError, Patch, apply, fresh_name
from encast.passes.report import Outcome

__all__ = ["fold_tables"]

Float64 = np.ndarray[Any, np.dtype[np.float64]]


def fold_tables(graph: Graph) -> Outcome:
    """Nodes of other ops that read constants alone stay as they are."""
    outcome = Outcome()
    made: dict[str, Float64] = {}
    gone: list[Patch] = []
    for node in graph.nodes:
        known = all(name in made or name in graph.constants for name in node.inputs if name)
        if node.op in _COMPUTED and known and node.attrs.get("activation", "none") == "none":
            made[node.outputs[0]] = _COMPUTED[node.op](node, *(_array(graph, made, name) for name in node.inputs))
            gone.append(Patch((node,), ()))
    outcome.changes = apply(graph, gone)
    read = {name for node in graph.nodes for name in node.inputs} | set(graph.outputs.values())
    for name, array in made.items():
        if name in read:
            graph.add_constant(name, array.astype(np.float32))
    for node in [node for node in graph.nodes if node.op == "linear"]:
        try:
            outcome.changes += _fold_projection(graph, Index(graph), node)
        except MismatchError:
            continue
    return outcome


def _array(graph: Graph, made: dict[str, Float64], name: str) -> Float64 | None:
    if not name:
        return None
    return made[name] if name in made else graph.constants[name].array.astype(np.float64)


def _linear(node: Node, x: Float64, weight: Float64, bias: Float64 | None = None) -> Float64:
    made: Float64 = x @ weight.T
    return made if bias is None else made + bias


def _layer_norm(node: Node, x: Float64, gamma: Float64, beta: Float64) -> Float64:
    centred = x - x.mean(axis=1, keepdims=True)
    variance = (centred * centred).mean(axis=1, keepdims=True)
    made: Float64 = centred / np.sqrt(variance + node.attrs["eps"]) * gamma + beta
    return made


_COMPUTED: dict[str, Any] = {"linear": _linear, "layer_norm": _layer_norm}


def _fold_projection(graph: Graph, index: Index, node: Node) -> int:
    """Puts the weight of ``node``, which reads a sum of embeddings, into their tables; a bias into one of them."""
    x, weight, bias = (*node.inputs, "")[:3]
    if node.attrs["activation"] != "none" or any(name and name not in graph.constants for name in (weight, bias)):
        raise MismatchError(f"{node.name!r} is no projection by constants")
    inner = _sum(graph, index, x, node)
    projection = graph.constants[weight].array.astype(np.float64).T
    added: list[Node] = []
    # Inner nodes come behind those that read them.
    for one in reversed(inner):
        outputs = node.outputs if one is inner[0] else one.outputs
        inputs = one.inputs
        if one.op == "embedding":
            table = graph.constants[inputs[1]].array.astype(np.float64) @ projection
            if bias:
                table, bias = table + graph.constants[bias].array, ""
            name = graph.add_constant(fresh_name(graph, f"{inputs[1]}.projected"), table.astype(np.float32))
            inputs = [inputs[0], name]
        added.append(Node(one.op, inputs, outputs, dict(one.attrs), one.name, one.layer))
    return apply(graph, [Patch((*inner, node), tuple(added))])


def _sum(graph: Graph, index: Index, value: str, reader: Node) -> list[Node]:
    """The adds and embeddings of constant tables that make a value, the last one first; nobody else reads them."""
    made = index.made_by(value, "add", "embedding")
    index.need_private(value, reader)
    if made.op == "embedding":
        if made.inputs[1] not in graph.constants:
            raise MismatchError(f"the table {made.inputs[1]!r} is not a constant")
        return [made]
    if made.inputs[0] == made.inputs[1]:
        raise MismatchError(f"{made.name!r} adds {made.inputs[0]!r} to itself")
    return [made, *(node for operand in made.inputs for node in _sum(graph, index, operand, made))]
