"""Where an int8 product without its zero blocks is faster than the dense one: what was measured, by ISA level.

``core/kernels/sparse/README.md`` has the measurements. The share of a weight that is left decides, and with VNNI the
rows: a sparse product reads inputs here and there, which pays where one load serves many rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

__all__ = ["DENSE_ROWS", "GAIN", "MANY_ROWS", "MEASURED_ZEROS", "DenseRows", "Gain", "dense_rows", "faster_form"]


class DenseRows(NamedTuple):
    """With up to ``left`` of a weight left (``ir.blocks.Shares``), dense products are faster for so many rows a thread.

    ``cached``: where the weights of the model stay in the last cache between forwards; ``streamed``: where they come
    from memory. A sparse form brings fewer bytes, one and a half of the dense one's for each weight that is left.
    """

    left: float
    cached: int
    streamed: int


_HALF = (DenseRows(0.5, 0, 0),)
_VNNI_ROWS = (
    DenseRows(0.27, 0, 0),
    DenseRows(0.35, 4, 0),
    DenseRows(0.44, 8, 0),
    DenseRows(0.55, 12, 8),
    DenseRows(0.62, 24, 12),
    DenseRows(0.72, 48, 24),
    DenseRows(0.85, 48, 63),
)

DENSE_ROWS: dict[str, tuple[DenseRows, ...]] = {
    "scalar": _HALF,
    "avx2": _HALF,
    "avxvnni": (DenseRows(0.4, 0, 0),),
    "avx512": _HALF,
    "avx512vnni": _VNNI_ROWS,
    "avx512bf16": _VNNI_ROWS,  # the same kernels
    "amx": (DenseRows(0.21, 0, 0),),
}
"""By ISA level, shares in hundredths, rising; with more left than the last one, the dense product is always faster.

With AMX whole models decided: few rows are faster sparse long before many are, and no product keeps both forms for
that.
"""


def dense_rows(isa: str, left: float, *, cached: bool) -> int | None:
    """Most rows a thread for which the dense product is the faster one, where the share ``left`` of its weight is left.

    0: for none. None: for any. Threads that share the rows of a product want twice as many, measured with two. Raises
    ``KeyError`` for a level that there is not.
    """
    for row in DENSE_ROWS[isa]:
        # Groups are filled up, so a little more is left than a layer was pruned to.
        if round(left, 2) <= row.left:
            return row.cached if cached else row.streamed
    return None


def faster_form(isa: str, left: float) -> str:
    """``sparse``, ``dense``, or ``both`` where it depends on the rows or on the caches of the machine that runs it."""
    rows = {dense_rows(isa, left, cached=cached) for cached in (True, False)}
    return {frozenset({0}): "sparse", frozenset({None}): "dense"}.get(frozenset(rows), "both")


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
        ((0.57, 0.75), (0.71, 0.92), (0.99, 1.18), (1.37, 1.72), (1.93, 2.92), (2.6, 5.2)),
        ((0.37, 0.52), (0.46, 0.57), (0.56, 0.99), (0.74, 1.21), (0.90, 1.66), (1.1, 2.6)),
    ),
}
"""By ISA level, the table of ``core/kernels/sparse/README.md``; a test holds both to the same numbers. The scalar level
was not measured."""
