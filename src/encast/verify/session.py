"""What every runtime is to the process that runs an original."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Input", "Session", "usable_threads"]

Array = np.ndarray[Any, Any]


_MOST_THREADS = 8
"""Each takes address space, which is bounded, for its stack and its heap."""


def usable_threads() -> int:
    return min(len(os.sched_getaffinity(0)), _MOST_THREADS)


@dataclass(frozen=True)
class Input:
    """``shape``: numbers, and what else stands for sizes that are open."""

    dtype: np.dtype[Any]
    shape: Sequence[Any]


@dataclass(frozen=True)
class Session:
    """An original that was loaded. ``outputs``: shapes as ``Input.shape``; ``run``: from inputs to outputs by name."""

    version: str
    inputs: Mapping[str, Input]
    outputs: Mapping[str, Sequence[Any]]
    run: Callable[[Mapping[str, Array]], Mapping[str, Array]]
