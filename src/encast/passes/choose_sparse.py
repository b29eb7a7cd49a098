"""Leaves out the zeros of int8 weights: linear_int8 → linear_sparse_int8, the same sums with fewer products.

    linear_int8(x, weight, scale, bias)  →  linear_sparse_int8(x, values, columns, starts, sums, scale, bias)

Where the dense form is the faster one for few rows, and the sparse one for many, the product keeps both:

    linear_int8(x, weight, scale, bias)  →  linear_int8(x, weight, scale, bias, values, columns, starts)

Layers that share their weights share the blocks.
"""

from __future__ import annotations

import numpy as np

from encast.crossover import faster_form
from encast.ir import Graph, Node
from encast.ir.blocks import Shares, pack_blocks, shares
from encast.passes.patch import Patch, apply, fresh_name
from encast.passes.report import SPARSE_PRODUCT, Miss, Outcome

__all__ = ["SPARSE", "choose_sparse"]

SPARSE = ("never", "auto", "always")
"""Which int8 products leave out zeros."""


def choose_sparse(graph: Graph, sparse: str, isa: str) -> Outcome:
    """Does nothing but look where ``sparse`` is "never"; with "auto" what ``crossover.py`` says of ``isa``.

    ``Outcome.zeros`` has the shares of every int8 product. Each that leaves out zeros counts as a fusion. A product of
    a layer that is to be sparse ("always") and whose weight has no block of zeros is a miss: it becomes sparse all the
    same, computes all that a dense one would, and takes longer.
    """
    outcome = Outcome()
    known: dict[str, Shares] = {}
    blocks: dict[str, list[str]] = {}
    patches = []
    for node in graph.nodes:
        if node.op != "linear_int8":
            continue
        x, weight, scale, bias = (*node.inputs, "")[:4]
        if weight not in known:
            known[weight] = shares(graph.constants[weight].array)
        found = outcome.zeros[node.name] = known[weight]
        form = faster_form(isa, found.left) if sparse == "auto" else {"never": "dense", "always": "sparse"}[sparse]
        if form == "dense":
            continue
        if found.zero:
            outcome.fused.append((SPARSE_PRODUCT, node.layer))
        elif node.layer >= 0:  # what is outside of the layers is not pruned
            reason = "no block of four outputs x one input of its weight is zero: nothing is left out"
            outcome.missed.append(Miss(SPARSE_PRODUCT, node.layer, node.name, reason))
        if weight not in blocks:
            blocks[weight] = _in_blocks(graph, weight)
        if form == "both":
            op, inputs = "linear_int8", [x, weight, scale, bias, *blocks[weight][:3]]
        else:
            op, inputs = "linear_sparse_int8", [x, *blocks[weight], scale, bias]
        added = Node(op, inputs, node.outputs, dict(node.attrs), node.name, node.layer)
        patches.append(Patch((node,), (added,)))
    outcome.changes = apply(graph, patches)
    return outcome


def _in_blocks(graph: Graph, weight: str) -> list[str]:
    array = graph.constants[weight].array
    values, columns, starts = pack_blocks(array)
    sums = array.sum(axis=1, dtype=np.int32)
    parts = (("values", values, "s8"), ("columns", columns, "u16"), ("starts", starts, "i32"), ("sums", sums, "i32"))
    return [graph.add_constant(fresh_name(graph, f"{weight}.{name}"), part, dtype) for name, part, dtype in parts]
