"""Runs a workload with and without a trace, by turns, until it knows how long each takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from encast.batch import Batch, Int32
from encast.profile.account import Account, account_of, mean_account
from encast.profile.workload import Workload

__all__ = ["Measured", "Quartiles", "Runner", "Traceable", "Traced", "measure", "settle"]

_Float32 = np.ndarray[Any, np.dtype[np.float32]]
_Int64 = np.ndarray[Any, np.dtype[np.int64]]

_BACK_TO_BACK_SECONDS = 0.004
_WARM_SECONDS = 2.0
_STABLE = 0.03


class Traceable(Protocol):
    """What ``CpuRunnable`` offers."""

    @property
    def threads(self) -> int: ...
    def run(self, output: str, batch: Batch, select: Int32 | None = None) -> _Float32: ...
    def trace(self, output: str, batch: Batch, select: Int32 | None = None) -> tuple[_Float32, int, _Int64]: ...


@dataclass(frozen=True)
class Quartiles:
    """Of a sample: the lower quartile, the median, the upper quartile, and how many there were."""

    low: float
    median: float
    high: float
    count: int

    @staticmethod
    def of(sample: Sequence[float]) -> Quartiles:
        low, median, high = (float(number) for number in np.percentile(sample, [25, 50, 75]))
        return Quartiles(low, median, high, len(sample))

    @property
    def spread(self) -> float:
        """The distance of the quartiles as a part of the median."""
        return (self.high - self.low) / self.median if self.median else 0.0


class Runner:
    """One output of a runnable on a workload."""

    def __init__(self, runnable: Traceable, output: str, workload: Workload, *, selected: bool) -> None:
        """``selected``: the output has rows of selected tokens."""
        self.runnable, self.output, self.workload = runnable, output, workload
        selects = workload.selects()
        self._requests = [
            (batch, select if selected else None) for batch, select in zip(workload.batches, selects, strict=True)
        ]

    def answers(self) -> list[_Float32]:
        """The output's rows, an array a batch."""
        return [self.runnable.run(self.output, batch, select) for batch, select in self._requests]

    def seconds(self) -> float:
        """How long all batches took."""
        begin = time.perf_counter_ns()
        for batch, select in self._requests:
            self.runnable.run(self.output, batch, select)
        return (time.perf_counter_ns() - begin) / 1e9

    def trace(self) -> list[Traced]:
        """A trace of every batch."""
        traces = []
        for batch, select in self._requests:
            begin = time.perf_counter_ns()
            _, wall, events = self.runnable.trace(self.output, batch, select)
            traces.append(Traced(wall, events, begin))
        return traces


@dataclass(frozen=True)
class Traced:
    """One traced run: nanoseconds inside of the core, ``i64[events, 9]``, and when it was called, in nanoseconds."""

    wall: int
    events: _Int64
    called: int


@dataclass(frozen=True)
class Measured:
    """``forward``: seconds of the whole workload, untraced. ``traced``: likewise, inside of the core.

    ``account`` is the mean over the middle half of the traced rounds, an account a batch added up. ``outside``:
    seconds of a forward that are not inside of the core (the call from Python, checks of the request).
    ``sample`` is one round from the middle.
    """

    forward: Quartiles
    traced: Quartiles
    account: Account
    outside: float
    sample: list[Traced]

    @property
    def trace_cost(self) -> float:
        """How much longer a forward takes with a trace, as a part of it."""
        return max(0.0, self.traced.median / (self.forward.median - self.outside) - 1)


def settle(runner: Runner, clock: Callable[[], float] = time.monotonic) -> None:
    """Runs until three runs in a row bring no more than 3 % over the best before them, or for two seconds."""
    end = clock() + _WARM_SECONDS
    best, calm = runner.seconds(), 0
    while calm < 3 and clock() < end:
        seconds = runner.seconds()
        calm = calm + 1 if seconds > best * (1 - _STABLE) else 0
        best = min(best, seconds)


def measure(
    runner: Runner, steps: int, *, seconds: float, repeats: int | None, clock: Callable[[], float] = time.monotonic
) -> Measured:
    """Rounds of plain and traced runs by turns, for so long or so often; at least five.

    Runs of a few milliseconds follow each other directly, as a busy engine's do: the first one of each group, which
    finds the threads asleep, does not count.
    """
    settle(runner, clock)
    once = runner.seconds()
    group = max(1, min(50, round(_BACK_TO_BACK_SECONDS / max(once, 1e-9))))
    skipped = 1 if once < 10 * _BACK_TO_BACK_SECONDS else 0
    wanted = repeats if repeats is not None else 5
    threads = runner.runnable.threads
    plain: list[float] = []
    rounds: list[tuple[float, list[Traced]]] = []
    pairs: list[float] = []
    end = clock() + seconds
    while len(rounds) < wanted or (repeats is None and clock() < end):
        times = [runner.seconds() for _ in range(group + skipped)][skipped:]
        traces = [runner.trace() for _ in range(group + skipped)][skipped:]
        walls = [sum(trace.wall for trace in traced) / 1e9 for traced in traces]
        plain += times
        pairs.append(statistics.median(times) - statistics.median(walls))
        middle = sorted(range(len(walls)), key=walls.__getitem__)[len(walls) // 2]
        rounds.append((walls[middle], traces[middle]))
    rounds.sort(key=lambda round: round[0])
    kept = rounds[len(rounds) // 4 : max(len(rounds) // 4 + 1, len(rounds) - len(rounds) // 4)]
    accounts = [_sum([account_of(one.events, one.wall, threads, steps) for one in traced]) for _, traced in kept]
    return Measured(
        Quartiles.of(plain),
        Quartiles.of([wall for wall, _ in rounds]),
        mean_account(accounts),
        max(0.0, statistics.median(pairs)),
        kept[len(kept) // 2][1],
    )


def _sum(accounts: Sequence[Account]) -> Account:
    mean = mean_account(accounts)
    n = len(accounts)
    return Account(mean.busy * n, mean.waiting * n, mean.idle * n, mean.between * n, mean.wall * n, mean.events * n)
