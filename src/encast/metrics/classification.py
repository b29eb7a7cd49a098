"""Accuracy, F1 and the Matthews correlation of predicted classes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from encast.errors import InputError

__all__ = ["accuracy", "f1_binary", "f1_macro", "matthews"]


def accuracy(predicted: ArrayLike, gold: ArrayLike) -> float:
    """The share of equal entries."""
    x, y = _classes(predicted, gold)
    return float(np.mean(x == y))


def f1_binary(predicted: ArrayLike, gold: ArrayLike, positive: int = 1) -> float:
    """F1 of one class, ``2 tp / (2 tp + fp + fn)``; 0 when it occurs on neither side."""
    x, y = _classes(predicted, gold)
    hits = int(np.sum((x == positive) & (y == positive)))
    total = int(np.sum(x == positive)) + int(np.sum(y == positive))
    return 2 * hits / total if total else 0.0


def f1_macro(predicted: ArrayLike, gold: ArrayLike) -> float:
    """The mean of every class's F1, over the classes that occur on either side."""
    x, y = _classes(predicted, gold)
    return float(np.mean([f1_binary(x, y, int(c)) for c in np.union1d(x, y)]))


def matthews(predicted: ArrayLike, gold: ArrayLike) -> float:
    """Matthews correlation, -1 to 1, for any number of classes; 0 when one side holds a single class.

    Gorodkin's R_K ("Comparing two K-category assignments by a K-category correlation coefficient", 2004),
    which equals the two-class formula for two classes.
    """
    x, y = _classes(predicted, gold)
    classes = np.union1d(x, y)
    counts_x = np.array([np.sum(x == c) for c in classes], np.float64)
    counts_y = np.array([np.sum(y == c) for c in classes], np.float64)
    n = float(x.size)
    above = n * float(np.sum(x == y)) - float(counts_x @ counts_y)
    below = (n * n - float(counts_x @ counts_x)) * (n * n - float(counts_y @ counts_y))
    return above / float(np.sqrt(below)) if below > 0 else 0.0


def _classes(predicted: ArrayLike, gold: ArrayLike) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    x, y = np.asarray(predicted), np.asarray(gold)
    if x.shape != y.shape or x.ndim != 1 or x.size == 0:
        raise InputError(f"predictions and gold classes must be vectors of equal length, not {x.shape} and {y.shape}")
    return x, y
