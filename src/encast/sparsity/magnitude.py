"""Pruning by magnitude: the blocks whose elements are smallest become zero."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from encast.errors import InputError
from encast.sparsity.pattern import Pattern

__all__ = ["check_sparsity", "magnitude_mask"]

Array = np.ndarray[Any, Any]


def magnitude_mask(weight: Array, pattern: Pattern, sparsity: float) -> Array:
    """Which elements of ``weight: f32[outputs, inputs]`` stay, as ``bool[outputs, inputs]``.

    Of all blocks the share ``sparsity`` (to the nearest whole block, halves up) goes: those with the smallest mean
    magnitude, of equal ones the first. The same weight gives the same mask everywhere. Raises ``InputError`` when
    ``sparsity`` is not from 0 to 1.
    """
    check_sparsity(sparsity)
    means = pattern.means(weight)
    gone = math.floor(sparsity * means.size + 0.5)
    stays = np.ones(means.size, bool)
    stays[np.argsort(means, axis=None, kind="stable")[:gone]] = False
    return pattern.spread(stays.reshape(means.shape), (weight.shape[0], weight.shape[1]))


def check_sparsity(sparsity: float) -> None:
    """Raises ``InputError`` when it is not a share from 0 to 1."""
    if not 0 <= sparsity <= 1:
        raise InputError(f"the sparsity is {sparsity:g}; the share of zeros is from 0 to 1: 0.8 is 80 %")
