"""When calls are timed: after a warm-up that has become stable, and by turns, A B A B and B A B A."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

__all__ = ["Bursting", "Round", "Timing", "WarmUp", "take_turns", "warm_up"]

_WARM_SECONDS = 0.1
_WARM_BURSTS = 3

C = TypeVar("C")


@dataclass(frozen=True)
class Timing:
    """See ``conf/config.yaml``."""

    seconds: float = 8.0
    rounds_least: int = 5
    rounds_most: int = 100
    warm_up_seconds: float = 10.0
    stable: float = 0.05
    together: int = 8


class Bursting(Protocol):
    """What a warm-up needs of a contender."""

    def burst(self, *, calls: int | None = None, seconds: float | None = None) -> list[list[int]]: ...


@dataclass(frozen=True)
class WarmUp:
    """``stable``: whether the last bursts were alike; if not, time was up."""

    seconds: float
    calls: int
    stable: bool


@dataclass(frozen=True)
class Round:
    """``number`` counts from 0; ``places`` says for every contender, by its place in the list, where the processors
    were while it was taken (``placement.placement``), or ``moved``."""

    number: int
    places: Mapping[int, str]


def warm_up(contender: Bursting, timing: Timing) -> WarmUp:
    """Bursts until the medians of three in a row lie within ``timing.stable`` of each other, or time is up."""
    begin = time.perf_counter()
    medians: list[float] = []
    calls = 0
    while True:
        times = contender.burst(seconds=_WARM_SECONDS)
        calls += sum(map(len, times))
        medians.append(max(float(np.median(own)) for own in times))
        last = medians[-_WARM_BURSTS:]
        seconds = time.perf_counter() - begin
        if len(last) == _WARM_BURSTS and max(last) <= min(last) * (1 + timing.stable):
            return WarmUp(seconds, calls, True)
        if seconds > timing.warm_up_seconds:
            return WarmUp(seconds, calls, False)


def take_turns(
    contenders: Sequence[C],
    take: Callable[[int, C], bool],
    timing: Timing,
    place: Callable[[], str],
    enough: Callable[[Sequence[Round]], bool] = lambda rounds: True,
) -> list[Round]:
    """Rounds until the time is over; in each, every contender is taken once, in the reverse of the last round's order.

    ``take(number, contender)`` says whether it may go on; one that may not is left out of later rounds. When time is
    over and the rounds are not ``enough``, as much time as they took is given once more. Ends early when no contender
    is left.
    """
    left = list(enumerate(contenders))
    budget = timing.seconds * len(left)
    begin = time.perf_counter()
    before = place()
    rounds: list[Round] = []
    last = None
    while left and len(rounds) < timing.rounds_most:
        spent = time.perf_counter() - begin
        if len(rounds) >= timing.rounds_least and spent >= budget:
            # The fewest rounds may have taken far longer than the budget.
            last = 2 * spent if last is None else last
            if spent >= last or enough(rounds):
                break
        places = {}
        gone = set()
        for index, contender in left if len(rounds) % 2 == 0 else left[::-1]:
            if not take(len(rounds), contender):
                gone.add(index)
            after = place()
            places[index] = after if after == before else "moved"
            before = after
        left = [(index, contender) for index, contender in left if index not in gone]
        rounds.append(Round(len(rounds), places))
    return rounds
