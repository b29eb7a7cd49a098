"""Pearson's and Spearman's correlation."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from encast.errors import InputError

__all__ = ["average_ranks", "pearson", "spearman"]


def pearson(predicted: ArrayLike, gold: ArrayLike) -> float:
    """Product-moment correlation of two vectors, -1 to 1; nan when one of them is constant.

    Raises ``InputError`` when the lengths differ or there are fewer than two values.
    """
    x, y = np.asarray(predicted, np.float64), np.asarray(gold, np.float64)
    if x.shape != y.shape or x.ndim != 1 or x.size < 2:
        raise InputError(
            f"correlation needs two vectors of equal length, at least 2; their shapes are {x.shape}, {y.shape}"
        )
    if (x == x[0]).all() or (y == y[0]).all():  # their mean may differ from them by a rounding
        return float("nan")
    return float(np.clip(_direction(x) @ _direction(y), -1.0, 1.0))


def _direction(x: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The centred vector at length 1; scaled first, since squares of very large or small numbers are none."""
    x = x - x.mean()
    x = x / np.max(np.abs(x))
    unit: np.ndarray[Any, np.dtype[np.float64]] = x / np.linalg.norm(x)
    return unit


def spearman(predicted: ArrayLike, gold: ArrayLike) -> float:
    """Pearson's correlation of the ranks, where equal values share their average rank."""
    x, y = np.asarray(predicted, np.float64), np.asarray(gold, np.float64)
    if np.isnan(x).any() or np.isnan(y).any():
        return float("nan")
    return pearson(average_ranks(x), average_ranks(y))


def average_ranks(values: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Ranks from 1; equal values share the average of the ranks that they take up."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: np.ndarray[Any, np.dtype[np.float64]] = (last - (counts - 1) / 2.0)[group]
    return ranks
