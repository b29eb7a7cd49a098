"""Gives every linear and every attention the dtype that a ``QuantSpec`` asks for.

A linear gets narrow weights, and a narrow copy of what it reads:

    linear(x)  →  linear_int8(quantize(x))   or   linear_bf16(cast_bf16(x))

(``quantize_static`` where a calibration fixes the range)

    attention(qkv)  →  the same with products "bf16" or "int8"   (one with tables of distances stays f32)

Linears that read one value share its narrow copy; layers that share their weights share the narrow ones. An f32
weight that nothing reads any more is let go at once, so that a large model is never held twice. A weight that was
stored as integers keeps them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from encast.errors import InputError
from encast.ir import Graph, Integers, Node
from encast.ir.ops import ATTENTIONS, NARROW_ATTENTIONS
from encast.passes.patch import Index, Patch, apply, fresh_name
from encast.passes.report import Outcome
from encast.quant.calibration import Calibration
from encast.quant.rounding import bf16_bits, quantize_rows
from encast.quant.spec import QuantSpec

__all__ = ["set_precision"]

Array = np.ndarray[Any, Any]


def set_precision(graph: Graph, spec: QuantSpec, calibration: Calibration | None = None) -> Outcome:
    """``calibration`` has the ranges of static activations.

    Raises ``InputError`` for a pattern of ``spec.keep`` that matches the name of no linear and no attention, and for a
    value without a range.
    """
    linears = [node for node in graph.nodes if node.op == "linear"]
    attentions = [node for node in graph.nodes if node.op in ATTENTIONS]
    products = linears + attentions
    for pattern, _ in spec.keep:
        if not any(fnmatchcase(node.name, pattern) for node in products):
            shown = [node.name for node in (*linears[:6], *attentions[:1])]
            names = ", ".join(shown) + (", ..." if len(products) > len(shown) else "")
            raise InputError(f"the pattern {pattern!r} in keep matches none of the {len(products)} products: {names}")
    for node in attentions:
        narrow = node.op in NARROW_ATTENTIONS
        node.attrs["products"] = spec.dtype_of_attention(node.name) if narrow else "f32"
    graph.meta = replace(graph.meta, dtype=spec.dtype)
    narrowing = _Narrowing(graph, spec, calibration)
    patches = [
        Patch((node,), narrowing.narrowed(node, dtype))
        for node in linears
        if (dtype := dtype_of(graph, node, spec)) != "f32"
    ]
    narrow_attentions = sum(node.attrs["products"] != "f32" for node in attentions)
    return Outcome(changes=apply(graph, patches) + narrow_attentions, kept=narrowing.kept)


def dtype_of(graph: Graph, node: Node, spec: QuantSpec) -> str:
    """The dtype of a linear's operands under ``spec``."""
    outputs = graph.type_of(node.inputs[1]).shape[0]
    rows = graph.type_of(node.outputs[0]).shape[0]
    return spec.dtype_of(node.name, str(rows), int(outputs))


class _Narrowing:
    """Makes narrow operands, each once."""

    def __init__(self, graph: Graph, spec: QuantSpec, calibration: Calibration | None) -> None:
        self._graph = graph
        self._spec = spec
        self._calibration = calibration if spec.activations == "static" else None
        self._index = Index(graph)
        self._values: dict[tuple[str, str], str] = {}
        self._weights: dict[tuple[str, str], list[str]] = {}
        self.kept: dict[str, tuple[int, int]] = {}
        self._rows: dict[str, tuple[int, int]] = {}
        self._readers = Counter(operand for node in graph.nodes for operand in set(node.inputs))

    def narrowed(self, node: Node, dtype: str) -> tuple[Node, ...]:
        """The nodes that take the place of ``node``."""
        x, weight, bias = (*node.inputs, "")[:3]
        before: list[Node] = []
        if (x, dtype) not in self._values:
            before.append(self._narrow_value(x, dtype, node.layer))
            self._values[x, dtype] = before[0].outputs[0]
        if (weight, dtype) not in self._weights:
            self._weights[weight, dtype] = self._narrow_weight(weight, dtype)
        if dtype == "int8":
            self.kept[node.name] = self._rows.get(weight, (0, int(self._graph.type_of(weight).shape[0])))
        self._readers[weight] -= 1
        if not self._readers[weight]:
            del self._graph.constants[weight]
        inputs = [self._values[x, dtype], *self._weights[weight, dtype], bias]
        return (*before, Node(f"linear_{dtype}", inputs, node.outputs, dict(node.attrs), node.name, node.layer))

    def _narrow_value(self, x: str, dtype: str, layer: int) -> Node:
        if dtype == "bf16":
            name = fresh_name(self._graph, f"{x}.bf16")
            return Node("cast_bf16", [x], [name], {}, name, layer)
        name = fresh_name(self._graph, f"{x}.q8")
        zero_point = self._spec.zero_point == "always"
        if self._spec.zero_point == "after_activation":
            maker = self._index.producer(x)
            zero_point = maker is not None and (
                maker.op == "activation" or maker.attrs.get("activation", "none") != "none"
            )
        if self._calibration is not None:
            scale, zero = self._calibration.fixed(x, self._spec, zero_point)
            return Node("quantize_static", [x], [name], {"scale": scale, "zero_point": zero}, name, layer)
        return Node("quantize", [x], [name], {"zero_point": zero_point}, name, layer)

    def _narrow_weight(self, weight: str, dtype: str) -> list[str]:
        constant = self._graph.constants[weight]
        array = constant.array
        name = fresh_name(self._graph, f"{weight}.{dtype}")
        if dtype == "bf16":
            return [self._graph.add_constant(name, bf16_bits(array), "bf16")]
        narrow, scale = quantize_rows(array) if constant.integers is None else self._held(weight, constant.integers)
        scale_name = fresh_name(self._graph, f"{name}.scale")
        return [self._graph.add_constant(name, narrow), self._graph.add_constant(scale_name, scale.astype(np.float32))]

    def _held(self, weight: str, integers: Integers) -> tuple[Array, Array]:
        """The integers and scales that a weight was stored with; rows that s8 does not hold are rounded anew."""
        narrow, fits = integers.narrow()
        scale = integers.scale.copy()
        if not fits.all():
            narrow[~fits], scale[~fits] = quantize_rows(self._graph.constants[weight].array[~fits])
        self._rows[weight] = (int(fits.sum()), len(fits))
        return narrow, scale
