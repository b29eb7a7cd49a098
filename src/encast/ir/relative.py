"""Relative positions: T5's two-sided buckets (also MPNet's), DeBERTa's, and tables of all distances for kernels."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from encast.errors import GraphError

__all__ = [
    "DISTANCE_BLOCK",
    "distance_columns",
    "distance_origin",
    "distance_rows",
    "pack_distances",
    "relative_buckets",
    "unpack_distances",
]


_UNSURE = 1e-9
"""Of a border: far more than a power in floating point is off."""


def _floor(border: float) -> tuple[int, bool]:
    """The largest integer that is not above the border, and True; where the border is too close to an integer to tell,
    that one, and False."""
    near = round(border)
    return (near, False) if abs(border - near) <= _UNSURE * border else (int(border), True)


def relative_buckets(distances: np.ndarray[Any, Any], buckets: int, max_distance: int) -> np.ndarray[Any, Any]:
    """The bucket of every ``distance = key - query``, as i64 of the same shape.

    Keys after the query use the upper half of the ``buckets``. In a half of ``m`` buckets, distances
    below ``e = m / 2`` have one each; bucket ``e + j`` begins at ``e * (max_distance / e) ** (j / (m - e))``,
    and the last one takes all the rest (Raffel et al. 2020, "Exploring the Limits of Transfer Learning",
    section 2.1). Those close to an integer are found in integers, so no logarithm's rounding can move one.

    Raises ``GraphError`` when the numbers admit no such buckets.
    """
    half = buckets // 2
    exact = half // 2
    if buckets % 2 or exact < 1 or max_distance <= exact:
        raise GraphError(f"{buckets} buckets up to distance {max_distance} are no two-sided rule; 32 and 128 are")
    steps = half - exact
    starts = []
    for step in range(1, steps):
        start, sure = _floor(exact * (max_distance / exact) ** (step / steps))
        if not sure and start**steps >= max_distance**step * exact ** (steps - step):
            start -= 1
        starts.append(start + 1)
    size = np.abs(distances).astype(np.int64)
    large = exact + np.searchsorted(np.array(starts, np.int64), size, side="right")
    result: np.ndarray[Any, Any] = np.where(distances > 0, half, 0) + np.where(size < exact, size, large)
    return result


DISTANCE_BLOCK = 16
"""Columns of a table of distances that lie together, see ``pack_distances``."""


def distance_rows(distances: np.ndarray[Any, Any], span: int, max_distance: int) -> np.ndarray[Any, Any]:
    """The row of a table of ``2 * span`` rows for every ``distance = query - key``, as i64 of the same shape.

    It is ``span`` plus the distance's bucket, cut to the table (He et al. 2021, "DeBERTa: Decoding-enhanced BERT with
    Disentangled Attention", section 3). With ``max_distance`` 0 a distance is its own bucket. Otherwise (v2) those up
    to ``m = span // 2`` are, and of longer ones bucket ``m + j`` takes those that are more than
    ``m * ((max_distance - 1) / m) ** ((j - 1) / (m - 1))`` and at most the same of ``j``; negative ones mirror them.
    Borders close to an integer are found in integers, so no logarithm's rounding can move one.

    Raises ``GraphError`` when the numbers admit no such buckets.
    """
    buckets = np.abs(distances).astype(np.int64)
    if max_distance:
        ends = np.array(_bucket_ends(span, max_distance))
        exact = ends[0]
        buckets = np.where(buckets <= exact, buckets, exact + np.searchsorted(ends, buckets, side="left"))
    result: np.ndarray[Any, Any] = np.clip(np.sign(distances).astype(np.int64) * buckets + span, 0, 2 * span - 1)
    return result


@functools.cache
def _bucket_ends(span: int, max_distance: int) -> tuple[int, ...]:
    """The longest distance of bucket ``m`` and of every bucket behind it, two more than the table has: what lies
    behind its end is cut."""
    exact = span // 2
    if exact < 2 or max_distance - 1 <= exact:
        raise GraphError(f"a span of {span} up to distance {max_distance} has no logarithmic rule; 256 and 512 have")
    steps = exact - 1
    ends = [exact]
    for step in range(1, exact + 2):
        end, sure = _floor(exact * ((max_distance - 1) / exact) ** (step / steps))
        if not sure and end**steps * exact**step > (max_distance - 1) ** step * exact**steps:
            end -= 1
        ends.append(end)
    return tuple(ends)


def distance_columns(longest: int) -> int:
    """Columns of a table of distances for texts of up to ``longest`` tokens: ``relative_columns`` of the core."""
    return 2 * (-(-longest // DISTANCE_BLOCK) * DISTANCE_BLOCK) + DISTANCE_BLOCK


def distance_origin(columns: int) -> int:
    """The column of distance 0: ``relative_origin`` of the core, which says why it stands there."""
    return columns // 2 + 7


def pack_distances(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """``rows: f32[2 * n - 1, heads * d]``, a row for each distance from ``1 - n`` on, as the kernels read it.

    The result, ``f32[heads * blocks * d, 16]``, holds for every head its columns (a column a distance, that of
    ``distance_origin`` for 0, zeros around them) in blocks of sixteen: ``[heads][blocks][d][16]``.
    """
    longest = (len(rows) + 1) // 2
    columns = distance_columns(longest)
    size = rows.shape[1] // heads
    table = np.zeros((heads, columns, size), np.float32)
    first = distance_origin(columns) - (longest - 1)
    table[:, first : first + len(rows)] = rows.reshape(len(rows), heads, size).transpose(1, 0, 2)
    blocks = table.reshape(heads, columns // DISTANCE_BLOCK, DISTANCE_BLOCK, size).transpose(0, 1, 3, 2)
    return np.ascontiguousarray(blocks).reshape(-1, DISTANCE_BLOCK)


def unpack_distances(table: np.ndarray[Any, Any], heads: int, size: int) -> np.ndarray[Any, Any]:
    """``[heads, columns, size]`` of what ``pack_distances`` made."""
    blocks = table.reshape(heads, -1, size, DISTANCE_BLOCK).transpose(0, 1, 3, 2)
    made: np.ndarray[Any, Any] = blocks.reshape(heads, -1, size)
    return made
