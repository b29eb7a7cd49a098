"""How a share grows over a stage: sparsity and learning rate, as functions of the share of steps that are done."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

__all__ = ["LEARNING_RATES", "SPARSITIES", "learning_rate", "sparsity"]

Curve = Callable[[float], float]

SPARSITIES: Mapping[str, Curve] = {
    "cubic": lambda t: 1.0 - (1.0 - t) ** 3,
    "linear": lambda t: t,
    "one-shot": lambda t: 1.0,
}
"""From 0 at the beginning to 1 at the end. ``cubic``: Zhu and Gupta, 2017 (arXiv:1710.01878)."""

LEARNING_RATES: Mapping[str, Curve] = {
    "linear": lambda t: 1.0 - t,
    "cosine": lambda t: 0.5 * (1.0 + math.cos(math.pi * t)),
    "constant": lambda t: 1.0,
}
"""From 1 at the end of the warm-up to the end of the stage."""


def sparsity(schedule: str, done: float, *, initial: float, final: float, begin: float, end: float) -> float:
    """The share of zeros when the share ``done`` of steps is done: 0 before ``begin``, ``final`` from ``end`` on."""
    if done < begin:
        return 0.0
    if done >= end:
        return final
    share = SPARSITIES[schedule]((done - begin) / (end - begin))
    return initial * (1.0 - share) + final * share


def learning_rate(decay: str, step: int, steps: int, warmup: float) -> float:
    """The factor of the peak for step ``step`` of ``steps``, counted from 0: rises in the first ``warmup`` share."""
    rising = math.floor(warmup * steps)
    if step < rising:
        return (step + 1) / (rising + 1)
    return LEARNING_RATES[decay]((step - rising) / max(1, steps - rising))
