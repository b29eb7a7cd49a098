"""f32 or bf16: by a trial on this machine, since bf16 pays only where its products are native."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["can_bf16", "choose_precision"]

_ROUNDS = 3
_GAIN = 1.1


def can_bf16(device: Any) -> bool:
    """Whether a trial may show that bf16 is faster."""
    return device.type != "cpu" or bool(torch.cpu._is_avx512_bf16_supported())


def choose_precision(wanted: str, step: Callable[[str], float], device: Any) -> str:
    """ "f32" or "bf16"; for "auto" bf16 where the seconds of ``step(precision)`` are at most 1/1.1 of those in f32.

    Processors without bf16 products are not tried: there torch emulates them.
    """
    if wanted != "auto":
        return wanted
    if not can_bf16(device):
        return "f32"
    seconds: dict[str, list[float]] = {"f32": [], "bf16": []}
    for round_ in range(_ROUNDS + 1):
        for precision, times in seconds.items():
            taken = step(precision)
            if round_:
                times.append(taken)
    f32, bf16 = (statistics.median(times) for times in seconds.values())
    return "bf16" if f32 >= _GAIN * bf16 else "f32"
