"""Buckets of relative positions (T5's two-sided rule, which MPNet shares)."""

from __future__ import annotations

from typing import Any

import numpy as np

from encast.errors import GraphError

__all__ = ["relative_buckets"]


def relative_buckets(distances: np.ndarray[Any, Any], buckets: int, max_distance: int) -> np.ndarray[Any, Any]:
    """The bucket of every ``distance = key - query``, as i64 of the same shape.

    Keys after the query use the upper half of the ``buckets``. In a half of ``m`` buckets, distances
    below ``e = m / 2`` have one each; bucket ``e + j`` begins at ``e * (max_distance / e) ** (j / (m - e))``,
    and the last one takes all the rest (Raffel et al. 2020, "Exploring the Limits of Transfer Learning",
    section 2.1). The beginnings are found in integers, so no logarithm's rounding can move one.

    Raises ``GraphError`` when the numbers admit no such buckets.
    """
    half = buckets // 2
    exact = half // 2
    if buckets % 2 or exact < 1 or max_distance <= exact:
        raise GraphError(f"{buckets} buckets up to distance {max_distance} are no two-sided rule; 32 and 128 are")
    steps = half - exact
    starts = []
    for step in range(1, steps):
        wanted = max_distance**step * exact ** (steps - step)
        start = round(wanted ** (1.0 / steps))
        while start**steps >= wanted:
            start -= 1
        while start**steps < wanted:
            start += 1
        starts.append(start)
    size = np.abs(distances).astype(np.int64)
    large = exact + np.searchsorted(np.array(starts, np.int64), size, side="right")
    result: np.ndarray[Any, Any] = np.where(distances > 0, half, 0) + np.where(size < exact, size, large)
    return result
