"""What a candidate is: a dtype for the whole model, and the layers that keep a wider one."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from encast.errors import InputError
from encast.ir import Graph
from encast.ir.ops import ATTENTIONS
from encast.quant import QuantSpec

__all__ = ["BF16", "F32", "INT8", "Plan", "alone", "narrow_layers"]


@dataclass(frozen=True)
class Plan:
    """``wide``: names of layers with their dtype, in the order of the model; the others have ``dtype``.

    A layer is a product, or an attention (its products of queries by keys and of powers by values), by its module name.
    Those that share their weights (ALBERT) have names of their own: a weight is then stored once a dtype.
    """

    dtype: str
    wide: tuple[tuple[str, str], ...] = ()

    @property
    def spec(self) -> QuantSpec:
        return QuantSpec(self.dtype, keep=tuple((glob.escape(name), dtype) for name, dtype in self.wide))

    @property
    def text(self) -> str:
        """``int8``, ``int8 but 3 bf16, 1 f32``."""
        counts = Counter(dtype for _, dtype in self.wide)
        but = ", ".join(f"{counts[dtype]} {dtype}" for dtype in ("bf16", "f32") if counts[dtype])
        return f"{self.dtype} but {but}" if but else self.dtype

    def to_json(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "wide": [list(pair) for pair in self.wide]}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Plan:
        """The inverse of ``to_json``; raises ``InputError`` for dtypes that no QuantSpec has."""
        pairs = [(name, dtype) for name, dtype in data["wide"]]
        if not all(isinstance(name, str) for name, _ in pairs):
            raise InputError(f"wide is {data['wide']!r}; pairs of a name and a dtype are needed")
        plan = Plan(data["dtype"], tuple(pairs))
        _ = plan.spec
        return plan


F32, BF16, INT8 = Plan("f32"), Plan("bf16"), Plan("int8")


def alone(layer: str) -> QuantSpec:
    """Only this layer is int8."""
    return QuantSpec("int8", keep=((glob.escape(layer), "int8"), ("*", "f32")))


def narrow_layers(graph: Graph) -> list[tuple[str, str]]:
    """(name, "product" or "attention") of what is int8 in a graph, each name once, in the order of the model."""
    found: dict[str, str] = {}
    for node in graph.nodes:
        if node.op in ("linear_int8", "linear_sparse_int8"):
            found.setdefault(node.name, "product")
        elif node.op in ATTENTIONS and node.attrs["products"] == "int8":
            found.setdefault(node.name, "attention")
    return list(found.items())
