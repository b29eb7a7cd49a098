"""When steps end: on a card by CUDA's events, on the CPU by the clock."""

from __future__ import annotations

import time
from typing import Any

import torch

__all__ = ["CYCLES", "CardClock", "HostClock"]

CYCLES = (100_000, 400_000, 1_600_000)
"""That the card waits for each step: some 50 us, and more where the host took longer to launch one."""


class HostClock:
    """For steps that are done when they return."""

    ahead = True

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

    def __init__(self, steps: int, cycles: int) -> None:
        self._events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        self._cycles, self._marked = cycles, 0
        self.ahead = True
        """Whether the card had not begun when it was given its last step."""

    def start(self) -> None:
        torch.cuda._sleep(self._cycles * len(self._events))
        self.mark()

    def mark(self) -> None:
        self._events[self._marked].record()
        self._marked += 1
        if self._marked == len(self._events):
            self.ahead = not self._events[0].query()

    def seconds(self) -> list[float]:
        """Between each mark and the one before it; waits for the last."""
        self._events[-1].synchronize()
        pairs = zip(self._events, self._events[1:], strict=False)
        return [begin.elapsed_time(end) / 1000 for begin, end in pairs]
