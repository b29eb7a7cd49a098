"""Timing by turns: ours, theirs, the instruction peak, again and again, until the time of a row is over."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from peers.placement import placement

__all__ = ["Round", "Spread", "by_placement", "run_rounds", "spread"]

PEAK_SECONDS = 0.06
BURST_SECONDS = 0.2
FEWEST_ROUNDS = 5


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    def text(self, digits: int) -> str:
        return f"{self.median:.{digits}f} [{self.low:.{digits}f} to {self.high:.{digits}f}]"


def spread(values: Sequence[float]) -> Spread:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high)


@dataclass(frozen=True)
class Round:
    """Neighbouring bursts: seconds of a call of each, the machine's operations a second, and where it all ran."""

    ours: float
    theirs: float
    peak: float
    place: str  # placement.placement(), or "moved"


def calls_of_a_burst(first: float) -> int:
    """Calls that take about ``BURST_SECONDS``, at least 3, given the time of one."""
    return max(3, round(BURST_SECONDS / first))


def run_rounds(
    ours: Callable[[int], float],
    theirs: Callable[[int], float],
    peak: Callable[[float], float],
    seconds: float,
    fewest: int = FEWEST_ROUNDS,
    calls: int | None = None,
) -> list[Round]:
    """``ours`` and ``theirs`` take a number of calls and give the seconds of one; who begins alternates.

    At least ``fewest`` rounds; ``calls`` of a burst: by default as many as take a good part of a second.
    """
    begin = time.perf_counter()
    backends = (ours, theirs)
    counts = [calls or calls_of_a_burst(backend(1)) for backend in backends]
    rounds: list[Round] = []
    before = placement()
    while len(rounds) < fewest or time.perf_counter() - begin < seconds:
        times = [0.0, 0.0]
        for index in (0, 1) if len(rounds) % 2 == 0 else (1, 0):
            times[index] = backends[index](counts[index])
        most = peak(PEAK_SECONDS)
        after = placement()
        rounds.append(Round(times[0], times[1], most, after if after == before else "moved"))
        before = after
    return rounds


def by_placement(rounds: Sequence[Round]) -> Iterator[tuple[str, list[Round]]]:
    """The rounds of each place that has enough of them for quartiles; those during which it changed are left out.

    All rounds, as "mixed", where no place has enough.
    """
    places = {place: [item for item in rounds if item.place == place] for place in ("near", "far", "unknown")}
    enough = {place: found for place, found in places.items() if len(found) >= 3}
    yield from (enough or {"mixed": list(rounds)}).items()
