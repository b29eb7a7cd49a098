"""Leaves out the zeros of int8 weights: linear_int8 → linear_sparse_int8, the same sums with fewer products.

    linear_int8(x, weight, scale, bias)  →  linear_sparse_int8(x, values, columns, starts, sums, scale, bias)

Layers that share their weights share the blocks.
"""

from __future__ import annotations

import numpy as np

from encast.ir import Graph, Node
from encast.ir.blocks import pack_blocks, share_left
from encast.passes.patch import Patch, apply, fresh_name
from encast.passes.report import Outcome

__all__ = ["CROSSOVER", "SPARSE", "choose_sparse"]

SPARSE = ("never", "auto", "always")
"""Which int8 products leave out zeros."""

CROSSOVER = {
    "scalar": 0.5, "avx2": 0.5, "avxvnni": 0.4, "avx512": 0.5, "avx512vnni": 0.3, "avx512bf16": 0.3, "amx": 0.02,
}  # fmt: skip
"""By ISA level: the largest share of a weight that may be left for its sparse product to be the faster one with 16 rows
and more, in steps of 0.1. ``core/kernels/sparse/README.md`` has the measurements.
"""


def choose_sparse(graph: Graph, sparse: str, isa: str) -> Outcome:
    """Does nothing where ``sparse`` is "never"; with "auto" what ``CROSSOVER`` says of ``isa``."""
    if sparse == "never":
        return Outcome()
    most = CROSSOVER[isa] if sparse == "auto" else None
    blocks: dict[str, list[str] | None] = {}
    patches = []
    for node in graph.nodes:
        if node.op != "linear_int8":
            continue
        x, weight, scale, bias = (*node.inputs, "")[:4]
        if weight not in blocks:
            few = most is None or share_left(graph.constants[weight].array) <= most
            blocks[weight] = _in_blocks(graph, weight) if few else None
        if (parts := blocks[weight]) is None:
            continue
        inputs = [x, *parts, scale, bias]
        added = Node("linear_sparse_int8", inputs, node.outputs, dict(node.attrs), node.name, node.layer)
        patches.append(Patch((node,), (added,)))
    return Outcome(changes=apply(graph, patches))


def _in_blocks(graph: Graph, weight: str) -> list[str]:
    array = graph.constants[weight].array
    values, columns, starts = pack_blocks(array)
    sums = array.sum(axis=1, dtype=np.int32)
    parts = (("values", values, "s8"), ("columns", columns, "u16"), ("starts", starts, "i32"), ("sums", sums, "i32"))
    return [graph.add_constant(fresh_name(graph, f"{weight}.{name}"), part, dtype) for name, part, dtype in parts]
