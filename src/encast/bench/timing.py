"""When calls are timed: after a warm-up that has become stable, in rounds that interleave the systems: A B C, C B A."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from encast.measure.statistics import FEWEST_ROUNDS

if TYPE_CHECKING:
    from encast.bench.system import System

__all__ = ["Limits", "Timing", "interleave", "warm_up"]

_WARM_SECONDS = 0.1
_WARM_BURSTS = 3
_STABLE = 0.05
"""The share by which the last bursts of a warm-up may differ."""

S = TypeVar("S")


@dataclass(frozen=True)
class Timing:
    """See ``conf/config.yaml``."""

    seconds: float = 8.0
    warm_up_seconds: float = 10.0
    together: int = 8


@dataclass(frozen=True)
class Limits:
    """What a backend may take before it is ended: seconds, and growth of resident memory after its warm-up.

    ``memory_share`` is of the machine's memory, or of what the control group leaves of it, for each instance.
    """

    export_seconds: float = 1800
    open_seconds: float = 600
    bind_seconds: float = 600
    call_seconds: float = 120
    growth_mib: float = 1024
    memory_share: float = 0.8


def warm_up(system: System, most_seconds: float) -> dict[str, Any]:
    """Bursts until the medians of three in a row lie within 5 % of each other (``stable``), or time is up.

    The field ``warm_up`` of a row.
    """
    begin = time.perf_counter()
    medians: list[float] = []
    calls = 0
    while True:
        times = system.burst(seconds=_WARM_SECONDS)
        calls += sum(map(len, times))
        medians.append(max(float(np.median(own)) for own in times))
        last = medians[-_WARM_BURSTS:]
        seconds = time.perf_counter() - begin
        stable = len(last) == _WARM_BURSTS and max(last) <= min(last) * (1 + _STABLE)
        if stable or seconds > most_seconds:
            return {"seconds": seconds, "calls": calls, "stable": stable}


def interleave(systems: Sequence[S], take: Callable[[int, S], bool], seconds: float) -> None:
    """Rounds until ``seconds`` for each system are over, and ``FEWEST_ROUNDS`` at least.

    In each round every system is taken once, in the reverse of the last round's order. ``take(number, system)`` says
    whether it may go on; one that may not is left out of later rounds.
    """
    left = list(systems)
    end = time.perf_counter() + seconds * len(left)
    for number in itertools.count():
        if not left or (number >= FEWEST_ROUNDS and time.perf_counter() >= end):
            return
        left = [system for system in left if take(number, system)][::-1]
