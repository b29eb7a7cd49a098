"""Leaves out the zeros of int8 weights: linear_int8 → linear_sparse_int8, the same sums with fewer products.

    linear_int8(x, weight, scale, bias)  →  linear_sparse_int8(x, values, columns, starts, sums, scale, bias)

Layers that share their weights share the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from encast.ir import Graph, Node
from encast.ir.blocks import Shares, pack_blocks, shares
from encast.passes.patch import Patch, apply, fresh_name
from encast.passes.report import SPARSE_PRODUCT, Miss, Outcome

__all__ = ["CROSSOVER", "GAIN", "MANY_ROWS", "MEASURED_ZEROS", "SPARSE", "Gain", "choose_sparse"]

SPARSE = ("never", "auto", "always")
"""Which int8 products leave out zeros."""

CROSSOVER = {
    "scalar": 0.5, "avx2": 0.5, "avxvnni": 0.4, "avx512": 0.5, "avx512vnni": 0.38, "avx512bf16": 0.38, "amx": 0.02,
}  # fmt: skip
"""By ISA level: the largest share of a weight's blocks that may be left, in hundredths, for its sparse product to be
the faster one with 16 rows and more. ``core/kernels/sparse/README.md`` has the measurements.
"""


MEASURED_ZEROS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Shares of zero blocks at which ``GAIN`` was measured."""

MANY_ROWS = 1024

Range = tuple[float, float]


@dataclass(frozen=True)
class Gain:
    """How many times as fast as the dense product of the same level a sparse one was measured, on one thread.

    ``few`` with ``few_rows`` rows and ``many`` with ``MANY_ROWS``: at each of ``MEASURED_ZEROS`` the worst and the best
    of five shapes.
    """

    few_rows: int
    few: tuple[Range, ...]
    many: tuple[Range, ...]

    def expected(self, zeros: float) -> tuple[Range, Range]:
        """With few rows and with many, where the share ``zeros`` of a weight's blocks is zero.

        The time of a product is a constant and a part that falls with the zeros, so times are interpolated. Outside of
        what was measured it is the figure at the nearest end.
        """
        return self._at(zeros, self.few), self._at(zeros, self.many)

    @staticmethod
    def _at(zeros: float, measured: tuple[Range, ...]) -> Range:
        worst, best = (
            1 / float(np.interp(zeros, MEASURED_ZEROS, [1 / ends[end] for ends in measured])) for end in (0, 1)
        )
        return worst, best


_VNNI = Gain(
    16,
    ((0.77, 0.83), (0.94, 1.05), (1.21, 1.35), (1.64, 1.96), (2.55, 3.64), (3.5, 6.6)),
    ((1.24, 1.68), (1.42, 2.01), (1.70, 2.53), (2.16, 3.52), (2.81, 6.38), (3.3, 10.3)),
)
GAIN = {
    "avx2": Gain(
        16,
        ((1.37, 1.48), (1.70, 1.87), (2.19, 2.42), (3.09, 3.56), (5.22, 6.82), (7.8, 12.9)),
        ((1.27, 1.37), (1.56, 1.71), (2.06, 2.22), (2.93, 3.20), (5.12, 6.01), (7.5, 10.9)),
    ),
    "avxvnni": Gain(
        16,
        ((1.07, 1.29), (1.34, 1.61), (1.66, 2.23), (2.21, 3.22), (3.42, 6.03), (4.5, 10.5)),
        ((0.93, 1.06), (1.19, 1.30), (1.47, 1.68), (1.95, 2.41), (2.91, 4.43), (3.7, 7.6)),
    ),
    "avx512": Gain(
        32,
        ((1.68, 1.77), (2.10, 2.20), (2.76, 2.86), (3.85, 4.25), (6.87, 8.18), (10.7, 15.1)),
        ((1.61, 1.68), (1.97, 2.10), (2.48, 2.66), (3.39, 3.91), (5.33, 7.31), (7.5, 12.0)),
    ),
    "avx512vnni": _VNNI,
    "avx512bf16": _VNNI,  # the same kernels
    "amx": Gain(
        16,
        ((0.34, 0.76), (0.39, 0.93), (0.52, 1.25), (0.71, 1.93), (1.03, 3.72), (1.4, 6.5)),
        ((0.29, 0.47), (0.34, 0.56), (0.40, 0.71), (0.48, 0.98), (0.57, 1.63), (0.6, 2.5)),
    ),
}
"""By ISA level, the table of ``core/kernels/sparse/README.md``; a test holds both to the same numbers. The scalar level
was not measured."""


def choose_sparse(graph: Graph, sparse: str, isa: str) -> Outcome:
    """Does nothing but look where ``sparse`` is "never"; with "auto" what ``CROSSOVER`` says of ``isa``.

    ``Outcome.zeros`` has the shares of every int8 product. Each that leaves out zeros counts as a fusion. A product of
    a layer that is to be sparse ("always") and whose weight has no block of zeros is a miss: it becomes sparse all the
    same, computes all that a dense one would, and takes longer.
    """
    most = CROSSOVER[isa] if sparse == "auto" else None
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
        # Of a layer that is pruned to a share, the blocks that do not divide are left.
        if sparse == "never" or (most is not None and round(1 - found.zero, 2) > most):
            continue
        if found.zero:
            outcome.fused.append((SPARSE_PRODUCT, node.layer))
        elif node.layer >= 0:  # what is outside of the layers is not pruned
            reason = "no block of four outputs x one input of its weight is zero: nothing is left out"
            outcome.missed.append(Miss(SPARSE_PRODUCT, node.layer, node.name, reason))
        if weight not in blocks:
            blocks[weight] = _in_blocks(graph, weight)
        inputs = [x, *blocks[weight], scale, bias]
        added = Node("linear_sparse_int8", inputs, node.outputs, dict(node.attrs), node.name, node.layer)
        patches.append(Patch((node,), (added,)))
    outcome.changes = apply(graph, patches)
    return outcome


def _in_blocks(graph: Graph, weight: str) -> list[str]:
    array = graph.constants[weight].array
    values, columns, starts = pack_blocks(array)
    sums = array.sum(axis=1, dtype=np.int32)
    parts = (("values", values, "s8"), ("columns", columns, "u16"), ("starts", starts, "i32"), ("sums", sums, "i32"))
    return [graph.add_constant(fresh_name(graph, f"{weight}.{name}"), part, dtype) for name, part, dtype in parts]
