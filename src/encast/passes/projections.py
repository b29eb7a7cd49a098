"""Joins the projections of queries, keys and values into one: all rows of q, then of k, then of v."""

from __future__ import annotations

import math

import numpy as np

from encast.ir import Graph, Integers, Node
from encast.passes.patch import Index, MismatchError, fresh_name

__all__ = ["ProjectionJoiner", "need_joinable"]


def need_joinable(graph: Graph, index: Index, q: Node, k: Node, v: Node) -> None:
    """Raises ``MismatchError`` unless the three linears may become one."""
    if len({id(q), id(k), id(v)}) != 3:
        raise MismatchError("two of query, key and value are the same projection")
    for node in (q, k, v):
        if node.inputs[0] != q.inputs[0]:
            raise MismatchError(f"{q.name!r} reads {q.inputs[0]!r}, {node.name!r} reads {node.inputs[0]!r}")
        if node.attrs["activation"] != "none":
            raise MismatchError(f"{node.name!r} ends in an activation")
        if graph.type_of(node.inputs[1]) != graph.type_of(q.inputs[1]):
            raise MismatchError(
                f"{q.name!r} is {graph.type_of(q.inputs[1])}, {node.name!r} is {graph.type_of(node.inputs[1])}"
            )
        for operand in node.inputs[1:]:
            if operand and operand not in graph.constants:
                raise MismatchError(f"{operand!r} of {node.name!r} is not a constant")


class ProjectionJoiner:
    """Makes joined projections; layers that share their weights (ALBERT) share the joined ones too.

    ``factor``, which the graph applies to the scores, is multiplied into the rows of q. For a power of two
    (1/8 for heads of 64) that is exact. Any other factor rounds each weight once more, by at most half a unit in
    the last place of f32, the size of one rounding in the product itself; with ``exact`` such a factor is
    left to the attention.
    """

    def __init__(self, graph: Graph, exact: bool) -> None:
        self._graph = graph
        self._exact = exact
        self._made: dict[tuple[str, ...], tuple[str, str]] = {}

    def join(self, q: Node, k: Node, v: Node, factor: float) -> tuple[Node, float]:
        """The linear that makes ``qkv: f32[tokens, 3 * hidden]``, and the factor that remains for the scores."""
        folded = factor if not self._exact or math.frexp(factor)[0] == 0.5 else 1.0
        name = fresh_name(self._graph, _joined_name(q.name, k.name, v.name))
        operands = tuple(operand for node in (q, k, v) for operand in (*node.inputs[1:], "")[:2])
        key = (*operands, repr(folded))
        if key not in self._made:
            self._made[key] = self._constants(name, operands, folded)
        weight, bias = self._made[key]
        node = Node("linear", [q.inputs[0], weight, bias], [name], {"activation": "none"}, name, q.layer)
        return node, factor / folded

    def _constants(self, name: str, operands: tuple[str, ...], factor: float) -> tuple[str, str]:
        constants = self._graph.constants
        weights = [constants[operand].array for operand in operands[::2]]
        rows, columns = weights[0].shape
        weight = np.empty((3 * rows, columns), np.float32)
        bias = np.zeros(3 * rows, np.float32)
        for part, (array, operand) in enumerate(zip(weights, operands[1::2], strict=True)):
            weight[part * rows : (part + 1) * rows] = array
            if operand:
                bias[part * rows : (part + 1) * rows] = constants[operand].array
        if factor != 1.0:
            # In float64, so that the product is rounded once.
            np.multiply(weight[:rows], np.float64(factor), out=weight[:rows], casting="same_kind")
            np.multiply(bias[:rows], np.float64(factor), out=bias[:rows], casting="same_kind")
        parts = [constants[operand].integers for operand in operands[::2]]
        if factor != 1.0 and parts[0] is not None:
            parts[0] = parts[0].scaled(factor)
        stacked = Integers.stacked(parts)
        made = self._graph.add_constant(fresh_name(self._graph, f"{name}.weight"), weight, integers=stacked)
        if not any(operands[1::2]):
            return made, ""
        return made, self._graph.add_constant(fresh_name(self._graph, f"{name}.bias"), bias)


def _joined_name(*names: str) -> str:
    """``a.self.query``, ``a.self.key``, ``a.self.value`` → ``a.self.qkv``."""
    shared: list[str] = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join([*shared, "qkv"])
