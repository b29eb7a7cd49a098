"""When steps end: on a card by CUDA's events, on the CPU by the clock."""

from __future__ import annotations

import time
from typing import Any

import torch

__all__ = ["CardClock", "HostClock"]

_CYCLES_A_STEP = 60_000
"""That the card waits for each step: some 30 us, longer than the host takes to launch one."""


class HostClock:
    """For steps that are done when they return."""

    def __init__(self) -> None:
        self._moments: list[float] = []

    def start(self) -> None:
        self.mark()

    def mark(self) -> None:
        self._moments.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between each mark and the one before it."""
        return [end - begin for begin, end in zip(self._moments, self._moments[1:], strict=False)]


class CardClock:
    """For the current stream of the current card. The card waits first, while the host gives it its steps: what is
    measured is theirs, without pauses for the host."""

    def __init__(self, steps: int) -> None:
        self._events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        self._marked = 0

    def start(self) -> None:
        torch.cuda._sleep(_CYCLES_A_STEP * len(self._events))
        self.mark()

    def mark(self) -> None:
        self._events[self._marked].record()
        self._marked += 1

    def seconds(self) -> list[float]:
        """Between each mark and the one before it; waits for the last."""
        self._events[-1].synchronize()
        pairs = zip(self._events, self._events[1:], strict=False)
        return [begin.elapsed_time(end) / 1000 for begin, end in pairs]
