"""Leaves out the zeros of int8 weights: linear_int8 → linear_sparse_int8, the same sums with fewer products.

    linear_int8(x, weight, scale, bias)  →  linear_sparse_int8(x, values, columns, starts, sums, scale, bias)

Layers that share their weights share the blocks.
"""

from __future__ import annotations

import numpy as np

from encast.ir import Graph, Node
from encast.ir.blocks import pack_blocks
from encast.passes.patch import Patch, apply, fresh_name
from encast.passes.report import Outcome

__all__ = ["SPARSE", "choose_sparse"]

SPARSE = ("never", "always")
"""Which int8 products leave out zeros."""


def choose_sparse(graph: Graph, sparse: str) -> Outcome:
    """Does nothing where ``sparse`` is "never"."""
    if sparse == "never":
        return Outcome()
    blocks: dict[str, list[str]] = {}
    patches = []
    for node in graph.nodes:
        if node.op != "linear_int8":
            continue
        x, weight, scale, bias = (*node.inputs, "")[:4]
        if weight not in blocks:
            blocks[weight] = _in_blocks(graph, weight)
        inputs = [x, *blocks[weight], scale, bias]
        added = Node("linear_sparse_int8", inputs, node.outputs, dict(node.attrs), node.name, node.layer)
        patches.append(Patch((node,), (added,)))
    return Outcome(changes=apply(graph, patches))


def _in_blocks(graph: Graph, weight: str) -> list[str]:
    array = graph.constants[weight].array
    values, columns, starts = pack_blocks(array)
    sums = array.sum(axis=1, dtype=np.int32)
    parts = (("values", values, "s8"), ("columns", columns, "u16"), ("starts", starts, "i32"), ("sums", sums, "i32"))
    return [graph.add_constant(fresh_name(graph, f"{weight}.{name}"), part, dtype) for name, part, dtype in parts]
