"""From what a value was seen to hold to one range for all of its rows: extremes, percentiles, or least divergence.

``ONNX Runtime`` names the methods alike (onnxruntime/python/tools/quantization/calibrate.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from encast.errors import InputError

__all__ = ["BINS", "RANGES", "Histogram", "fixed_point", "range_of"]

Array = np.ndarray[Any, Any]

RANGES = ("minmax", "percentile", "entropy")

BINS = 4096
"""Of a histogram; half of them on either side of zero."""

_LEVELS = 256
_STEP = 4
_SMALL = 1e-4


class Histogram:
    """Counts of values in ``BINS`` equal bins from ``-reach`` to ``reach``, a power of two that grows as needed.

    Doubling the reach joins bins in pairs, so the counts depend on the order in which values came
    for values alone that lie on a reach.
    """

    def __init__(self, reach: float = 0.0, counts: Array | None = None) -> None:
        self.reach = reach
        self.counts = np.zeros(BINS, np.int64) if counts is None else counts

    def add(self, values: Array) -> None:
        """Counts finite ``values``, of any shape."""
        largest = float(np.abs(values).max(initial=0.0))
        if largest == 0.0 and not self.reach:
            largest = float(np.finfo(np.float32).tiny)
        if not self.reach:
            self.reach = 2.0 ** np.ceil(np.log2(largest))
        while self.reach < largest:
            joined = self.counts.reshape(-1, 2).sum(axis=1)
            quarter = BINS // 4
            self.counts = np.concatenate([np.zeros(quarter, np.int64), joined, np.zeros(quarter, np.int64)])
            self.reach *= 2
        bins = np.floor((values.reshape(-1) + self.reach) * (BINS / (2 * self.reach))).astype(np.int64)
        self.counts = self.counts + np.bincount(np.clip(bins, 0, BINS - 1), minlength=BINS)

    def edges(self) -> Array:
        """The ends of all bins, ``f64[BINS + 1]``."""
        return np.linspace(-self.reach, self.reach, BINS + 1)


def range_of(histogram: Histogram, low: float, high: float, method: str, percentile: float) -> tuple[float, float]:
    """The range that is to be represented, within the extremes ``low`` and ``high`` of the value.

    ``minmax``: the extremes. ``percentile``: of all elements that share lies inside, as much cut off above as below.
    ``entropy``: the range around zero whose 256 levels lose the least information, see ``least_divergence``.
    Raises ``InputError`` for another method.
    """
    if method == "minmax":
        return low, high
    if method == "percentile":
        share = np.cumsum(histogram.counts) / histogram.counts.sum()
        cut = (100.0 - percentile) / 200.0
        edges = histogram.edges()
        first, last = int(np.searchsorted(share, cut, "right")), int(np.searchsorted(share, 1.0 - cut))
        return max(low, float(edges[min(first, BINS - 1)])), min(high, float(edges[min(last, BINS - 1) + 1]))
    if method == "entropy":
        reach = least_divergence(histogram)
        return max(low, -reach), min(high, reach)
    raise InputError(f"ranges is {method!r}; one of {', '.join(RANGES)} is needed")


def least_divergence(histogram: Histogram) -> float:
    """The reach of the range around zero with the least Kullback-Leibler divergence from what was seen.

    The method of TensorRT (S. Migacz, "8-bit Inference with TensorRT", GTC 2017), as ONNX Runtime's
    ``EntropyCalibrater.get_entropy_threshold`` implements it: for every candidate, ``p`` has the counts inside, those
    outside added to its ends; ``q`` has the counts inside put together to levels and spread over the bins that were not
    empty (before the ends took the rest; ONNX Runtime looks after that); both are smoothed. Candidates are 4 bins
    apart, from one bin a level to all bins.
    """
    counts, middle = histogram.counts, BINS // 2
    outside = np.concatenate([[0], np.cumsum(counts)])
    best, reach = np.inf, histogram.reach
    for half in range(_LEVELS // 2, middle + 1, _STEP):
        begin, end = middle - half, middle + half
        inside = counts[begin:end].astype(np.float64)
        p = inside.copy()
        p[0] += outside[begin]
        p[-1] += outside[-1] - outside[end]
        starts = np.arange(_LEVELS) * len(inside) // _LEVELS
        filled = inside > 0
        held = np.add.reduceat(filled, starts, dtype=np.float64)
        level = np.add.reduceat(inside, starts) / np.maximum(held, 1.0)
        q = np.where(filled, np.repeat(level, np.diff(np.append(starts, len(inside)))), 0.0)
        if not q.any():
            continue
        divergence = _divergence(_smooth(p), _smooth(q))
        if divergence < best:
            best, reach = divergence, half * 2 * histogram.reach / BINS
    return reach


def _smooth(counts: Array) -> Array:
    """A distribution without zeros: they get a small share, taken evenly from the others."""
    filled = counts > 0
    taken = _SMALL * float((~filled).sum()) / float(filled.sum())
    made: Array = np.where(filled, np.maximum(counts - taken, _SMALL), _SMALL)
    return np.asarray(made / made.sum())


def _divergence(p: Array, q: Array) -> float:
    return float((p * np.log(p / q)).sum())


def fixed_point(low: float, high: float, zero_point: bool) -> tuple[float, int]:
    """The f32 scale (a float) and the zero point with which bytes stand for ``low`` to ``high``, and for zero exactly.

    With ``zero_point`` ``scale = (high - low) / 255``, else ``scale = max(|low|, |high|) / 127`` and 128. A range
    of nothing but zero has scale 1.
    """
    low, high = min(low, 0.0), max(high, 0.0)
    extent = (high - low) / 255 if zero_point else max(-low, high) / 127
    scale = float(np.float32(extent))
    if scale < float(np.finfo(np.float32).tiny):
        return 1.0, 0 if zero_point else 128
    return scale, int(np.rint(-low / scale)) if zero_point else 128
