"""Comparing an exported graph with the one that an architecture writes, and what that says of the weights' names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from encast.archs.modules import is_zeros
from encast.archs.weights import Float32
from encast.ir import Graph, Integers, Node
from encast.ir.relative import distance_rows

__all__ = ["Comparison", "NoFitError", "alike", "same_number"]


Distances = Mapping[str, np.ndarray[Any, Any]]

_BASE = 4e-6
"""Relatively, how well angles in f32 tell the base that they were made with."""
_UNSURE = 1e-4
"""Of a bucket's number: what a logarithm in f32 may be off."""
_F16 = 2.0**-11
_SMALL, _LOST = 2.0**-14, 2.0**-23


class NoFitError(Exception):
    """Graph and architecture differ; ``depth`` counts the nodes that were found alike before."""

    def __init__(self, message: str, depth: int) -> None:
        super().__init__(message)
        self.depth = depth


def alike(a: Float32, b: Float32) -> bool:
    return a is b or (a.shape == b.shape and np.array_equal(a, b))


def same_number(found: float, wanted: float, rounding: float) -> bool:
    """Whether ``found`` of an export is ``wanted``, rounded by up to ``rounding``, relatively; 0 for f32.

    Two roundings may add up: the scale of scores is split between queries and keys. Below 2^-14, f16 has steps of
    2^-24, and converters write up to 2^-23 for what is lost.
    """
    lost = _LOST if rounding == _F16 and abs(wanted) < _SMALL else 0.0
    return bool(np.isclose(found, wanted, rtol=max(1e-6, 2.0 * rounding), atol=lost))


class Comparison:
    """Two graphs, node by node from an output up; ``rounding``: that of the export's numbers, see ``same_number``;
    ``distances``: what its nodes ``relative_scores`` pick; ``angles``: the rounding of its rotary positions."""

    def __init__(
        self,
        graph: Graph,
        template: Graph,
        what: str,
        rounding: float = 0.0,
        distances: Distances | None = None,
        angles: float = 0.0,
    ) -> None:
        self.distances, self.angles = distances or {}, angles
        self.graph, self.template, self.what, self.rounding = graph, template, what, rounding
        self.makers = {output: node for node in graph.nodes for output in node.outputs}
        self.wanted = {output: node for node in template.nodes for output in node.outputs}
        self.bound: dict[str, Float32] = {}
        self.integers: dict[str, Integers] = {}
        self.met: dict[str, str] = {}

    def _same_attrs(self, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
        def same(key: str) -> bool:
            a, b = found[key], wanted[key]
            if key == "theta":  # of which angles tell less
                return bool(np.isclose(a, b, rtol=max(_BASE, 8.0 * self.angles), atol=0.0))
            if isinstance(a, float) and isinstance(b, float):
                return same_number(a, b, self.angles if key == "rate" else self.rounding)
            return bool(a == b)

        return set(found) == set(wanted) and all(same(key) for key in found)

    def run(self, value: str, wanted: str) -> dict[str, Float32]:
        """The arrays of ``graph`` by the names of ``template``; raises ``NoFitError``."""
        pairs = [(value, wanted)]
        while pairs:
            mine, theirs = pairs.pop()
            if not theirs:
                if mine:
                    raise self._differ(f"{mine!r} is added", "nothing")
            elif theirs in self.template.constants:
                self._bind(mine, theirs)
            elif theirs in self.template.inputs or mine in self.graph.inputs:
                if mine != theirs:
                    raise self._differ(f"{mine!r} is read", f"{theirs!r}")
            elif self.wanted[theirs].op == "select_rows":
                pairs.append((mine, self.wanted[theirs].inputs[0]))
            elif theirs in self.met:
                if self.met[theirs] != mine:
                    raise self._differ(f"{mine!r} is read", f"{self.met[theirs]!r} again, as {theirs!r}")
            else:
                self.met[theirs] = mine
                pairs += self._node(mine, theirs)
        return self.bound

    def read_by_products(self, found: Mapping[str, tuple[float, int]]) -> dict[str, tuple[float, int]]:
        """What ``found`` says of values that products of ``graph`` read, by the values' names in ``template``."""
        linears = [node for node in self.template.nodes if node.op == "linear" and node.outputs[0] in self.met]
        products = [(node.inputs[0], self.makers[self.met[node.outputs[0]]].inputs[0]) for node in linears]
        return {theirs: found[mine] for theirs, mine in products if mine in found}

    def _node(self, mine: str, theirs: str) -> list[tuple[str, str]]:
        node, wanted = self.makers.get(mine), self.wanted[theirs]
        if node is not None and _is_first_token(node) and _is_first_token(wanted):
            return [(node.inputs[0], wanted.inputs[0])]
        if node is not None and node.op == wanted.op == "relative_scores":
            return self._relative(node, wanted)
        if node is None or node.op != wanted.op or not self._same_attrs(node.attrs, wanted.attrs):
            found = "nothing" if node is None else f"{node.op}{_shown(node.attrs)} ({node.name!r})"
            raise self._differ(found, f"{wanted.op}{_shown(wanted.attrs)} ({wanted.name!r})")
        if node.op != "add":
            return list(zip(node.inputs, wanted.inputs, strict=True))
        # Sums of embeddings may be written in another order; which term is which follows from what makes it.
        ours, others = self._terms(mine, self.makers), self._terms(theirs, self.wanted)
        kinds = {self._kind(term, self.makers): term for term in ours}
        if len(ours) != len(others) or len(kinds) != len(ours):
            raise self._differ(f"a sum of {len(ours)} terms ({mine!r})", f"one of {len(others)} ({theirs!r})")
        pairs = []
        for other in others:
            kind = self._kind(other, self.wanted)
            if kind not in kinds:
                raise self._differ(f"a sum without {kind} ({mine!r})", f"one with it ({theirs!r})")
            pairs.append((kinds[kind], other))
        return pairs

    def _relative(self, node: Node, wanted: Node) -> list[tuple[str, str]]:
        span = int(self.template.type_of(wanted.inputs[2]).shape[0]) // 2
        rows, rule = self.distances[node.outputs[0]], int(wanted.attrs["max_distance"])
        if node.attrs["of"] != wanted.attrs["of"] or not _follow(rows, span, rule):
            raise self._differ(
                f"relative_scores of {node.attrs['of']} with rows {_shown_rows(rows)} ({node.name!r})",
                f"those of {wanted.attrs['of']} for {2 * span} rows and max_distance {rule}",
            )
        return list(zip(node.inputs, wanted.inputs, strict=True))

    def _terms(self, value: str, makers: Mapping[str, Node]) -> list[str]:
        node = makers.get(value)
        if node is None or node.op != "add":
            return [value]
        terms: list[str] = []
        for part in node.inputs:
            inner = makers.get(part)
            terms += inner.inputs if inner is not None and inner.op == "add" else [part]
        return terms

    def _kind(self, value: str, makers: Mapping[str, Node]) -> str:
        """What makes a term, and of what: the terms of one sum differ in it."""
        node = makers.get(value)
        if node is None:
            return value
        before = makers.get(node.inputs[0])
        return f"{node.op} of {node.inputs[0] if before is None else before.op}"

    def _bind(self, mine: str, theirs: str) -> None:
        shape = self.template.constants[theirs].array.shape
        if mine == "":
            array: Float32 = np.zeros(shape, np.float32)  # a bias that an optimiser left out
        elif mine in self.graph.constants:
            constant = self.graph.constants[mine]
            array = constant.array
            if constant.integers is not None:
                self.integers.setdefault(theirs, constant.integers)
        else:
            raise self._differ(f"{mine!r} is computed", f"the weight {theirs!r}")
        if array.shape != shape:
            raise self._differ(f"the weight {mine!r} of shape {list(array.shape)}", f"{theirs!r} of {list(shape)}")
        if is_zeros(theirs):
            if array.any():
                raise self._differ(f"{mine!r} is added", "nothing")
            return
        if theirs in self.bound and not alike(self.bound[theirs], array):
            raise self._differ(f"{mine!r} is another weight", f"{theirs!r} in both places")
        self.bound.setdefault(theirs, array)

    def _differ(self, found: str, wanted: str) -> NoFitError:
        return NoFitError(f"{self.what}, and there has {found} where that has {wanted}", len(self.met))


def _follow(rows: np.ndarray[Any, Any], span: int, max_distance: int) -> bool:
    """Whether rows by distance, from the most negative on, are those of ``distance_rows``.

    A logarithm in f32 may move a distance that is next to the border of two buckets into the other one.
    """
    most = len(rows) // 2
    distances = np.arange(-most, most + 1)
    moved = rows != distance_rows(distances, span, max_distance)
    exact = span // 2
    size = np.abs(distances[moved])
    if not max_distance or (size <= exact).any():
        return not moved.any()
    steps = np.log(size / exact) / np.log((max_distance - 1) / exact) * (exact - 1)
    border = np.rint(steps)
    allowed = [
        np.clip(np.sign(distances[moved]) * (exact + border + one) + span, 0, 2 * span - 1) == rows[moved]
        for one in (0, 1)
    ]
    return bool(((np.abs(steps - border) <= _UNSURE) & (allowed[0] | allowed[1])).all())


def _shown_rows(rows: np.ndarray[Any, Any]) -> str:
    middle = len(rows) // 2
    return f"{rows[middle : middle + 3].tolist()}, ..., {rows[-1]} for the distances 0, 1, 2, ..., {middle}"


def _is_first_token(node: Node) -> bool:
    return node.op == "first_token" or (node.op == "pooling" and list(node.attrs["modes"]) == ["cls"])


def _shown(attrs: Mapping[str, Any]) -> str:
    kept = {key: value for key, value in attrs.items() if value != "none"}
    return re.sub(r"[{}']", "", f" with {kept}") if kept else ""
