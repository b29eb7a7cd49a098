"""A service in miniature, to measure set-ups with: requests wait for their group, idle instances take what waits.

An instance takes the texts that are due, in their order, up to ``batch_tokens`` (one longer text runs alone), and runs
them as one batch. Tokenising, network and the making of answers are left out: they are the same for every set-up.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from encast.backends.groups import Setup
from encast.batch import Batch

__all__ = ["Saturated", "Service", "Streamed"]

Int64 = np.ndarray[Any, np.dtype[np.int64]]

_START_NS = 20_000_000
"""From the start of the threads to the first arrival."""

_WINDOWS = 4
"""Of a saturated measurement, unless it takes longer than ``longest``."""


@dataclass(frozen=True)
class Saturated:
    """``rate`` in texts a second, and of every text the nanoseconds of the run that it was in."""

    rate: float
    runs_ns: list[int]
    texts: int


@dataclass(frozen=True)
class Streamed:
    """``(due, begun, ended)`` of every request that was answered, nanoseconds from the stream's begin, by arrival.

    ``gave_up``: one would have waited for too long, and the rest was not tried.
    """

    answered: list[tuple[int, int, int]]
    gave_up: bool


class _Threads:
    """One thread an instance. The first error ends them all and is raised."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def run(self, work: Callable[[int], None], groups: Sequence[int]) -> None:
        def guarded(group: int) -> None:
            try:
                work(group)
            except BaseException as error:
                self.error = self.error or error

        threads = [threading.Thread(target=guarded, args=(group,), daemon=True) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error


@dataclass
class _Line:
    """The requests of one group, in their order. Who has the turn takes the next ones; other idle instances sleep."""

    order: list[int]
    turn: threading.Lock = field(default_factory=threading.Lock)
    head: int = 0


class Service:
    """Answers ``requests`` (batches of one text each) with ``run``, on the instances of ``setup``."""

    def __init__(self, setup: Setup, requests: Sequence[Batch], run: Callable[[Batch], Any]) -> None:
        self.setup, self.requests, self._run = setup, requests, run
        self._lengths = [request.tokens for request in requests]
        bounds = [group.longest for group in setup.groups[:-1] if group.longest is not None]
        self._group_of = [bisect_left(bounds, length) for length in self._lengths]
        self._instances = [index for index, group in enumerate(setup.groups) for _ in range(group.instances)]

    def stream(self, due: Sequence[int], give_up_ns: int) -> Streamed:
        """Answers requests that arrive at ``due`` nanoseconds, rising, from now; over and over the same ones.

        Gives up when one has waited for ``give_up_ns``: more arrive than can be answered.
        """
        count = len(self.requests)
        lines = [_Line([]) for _ in self.setup.groups]
        for index in range(len(due)):
            lines[self._group_of[index % count]].order.append(index)
        begun, ended = [0] * len(due), [0] * len(due)
        threads = _Threads()
        origin = time.perf_counter_ns() + _START_NS
        hopeless = threading.Event()

        def take(line: _Line) -> list[int]:
            """The next run of the group, once it is due; empty when there is no more."""
            with line.turn:
                if line.head == len(line.order):
                    return []
                first = due[line.order[line.head]]
                while (left := first - (now := time.perf_counter_ns() - origin)) > 0:
                    if hopeless.is_set() or threads.error is not None:
                        return []
                    time.sleep(min(left / 1e9, 0.05))
                if now - first > give_up_ns:
                    hopeless.set()
                if hopeless.is_set() or threads.error is not None:
                    return []
                taken: list[int] = []
                tokens = 0
                while line.head < len(line.order):
                    index = line.order[line.head]
                    length = self._lengths[index % count]
                    if due[index] > now or (taken and tokens + length > self.setup.batch_tokens):
                        break
                    taken.append(index)
                    tokens += length
                    line.head += 1
                return taken

        def serve(group: int) -> None:
            while taken := take(lines[group]):
                start = time.perf_counter_ns() - origin
                self._run(self._joined([index % count for index in taken]))
                end = time.perf_counter_ns() - origin
                for index in taken:
                    begun[index], ended[index] = start, end

        threads.run(serve, self._instances)
        answered = [(due[index], begun[index], ended[index]) for index in range(len(due)) if ended[index]]
        return Streamed(answered, hopeless.is_set())

    def saturate(self, seconds: float, longest: float) -> Saturated:
        """Answers for at least that long, and not much longer than ``longest``, while there is always enough to do.

        Of the workload's order a window is open: from the oldest text without an answer, twice as many as the instances
        hold at once. So no group runs ahead of the others by more, and what is answered has the workload's proportion
        of short and long texts. Ends once that window has passed ``_WINDOWS`` times or the time is over; the runs that
        are under way then are finished beside others, as those before them, or they would be quicker.
        """
        count = len(self.requests)
        mean = max(1.0, float(np.mean(self._lengths)))
        window = 2 * math.ceil(len(self._instances) * max(1.0, self.setup.batch_tokens / mean))
        waiting: list[deque[int]] = [deque() for _ in self.setup.groups]
        changed = threading.Condition()
        threads = _Threads()
        finished: set[int] = set()
        oldest = admitted = 0
        runs: list[tuple[int, int, int]] = []  # end, nanoseconds, texts
        under_way: list[int] = []  # when they began
        begin, end = time.perf_counter_ns(), 0
        soon, late = begin + int(seconds * 1e9), begin + int(longest * 1e9)

        def admit() -> None:
            nonlocal admitted
            while admitted < oldest + window:
                waiting[self._group_of[admitted % count]].append(admitted)
                admitted += 1

        def over() -> bool:
            nonlocal end
            now = time.perf_counter_ns()
            # However late it is, there is one run to tell of.
            if not end and (runs or under_way) and (now >= late or (now >= soon and oldest >= _WINDOWS * window)):
                end = now
            return threads.error is not None or (end > 0 and all(start >= end for start in under_way))

        def take(line: deque[int]) -> tuple[int, list[int]]:
            with changed:
                while not over():
                    if not line:
                        changed.wait(0.01)
                        continue
                    taken = [line.popleft()]
                    tokens = self._lengths[taken[0] % count]
                    while line and tokens + self._lengths[line[0] % count] <= self.setup.batch_tokens:
                        taken.append(line.popleft())
                        tokens += self._lengths[taken[-1] % count]
                    under_way.append(time.perf_counter_ns())
                    return under_way[-1], taken
                return 0, []

        def serve(group: int) -> None:
            nonlocal oldest
            while True:
                start, taken = take(waiting[group])
                if not taken:
                    return
                self._run(self._joined([index % count for index in taken]))
                with changed:
                    now = time.perf_counter_ns()
                    under_way.remove(start)
                    runs.append((now, now - start, len(taken)))
                    finished.update(taken)
                    while oldest in finished:
                        finished.remove(oldest)
                        oldest += 1
                    admit()
                    changed.notify_all()

        admit()
        threads.run(serve, self._instances)
        return _saturated(runs, begin, end, window)

    def _joined(self, indices: Sequence[int]) -> Batch:
        if len(indices) == 1:
            return self.requests[indices[0]]
        parts = [self.requests[index] for index in indices]
        cu_seqlens = np.zeros(len(parts) + 1, np.int32)
        np.cumsum([part.tokens for part in parts], out=cu_seqlens[1:])
        types = [part.token_type_ids for part in parts if part.token_type_ids is not None]
        return Batch(
            np.concatenate([part.token_ids for part in parts]),
            cu_seqlens,
            np.concatenate(types) if len(types) == len(parts) else None,
        )


def _saturated(runs: Sequence[tuple[int, int, int]], begin: int, end: int, window: int) -> Saturated:
    """The rate from the end of the first window, in which short texts may run ahead of long ones, to ``end``.

    A run that begins before that time or ends after it counts by its share in it. Counted by their ends, the runs of
    instances that end side by side would be one too many or too few: of 12 long ones 8 %.
    """
    ends, durations, texts = (np.array(column, np.int64) for column in zip(*sorted(runs), strict=True))
    answered = np.cumsum(texts)
    start = ends[np.searchsorted(answered, min(window, answered[-1] // 2))]
    shares = np.clip(np.minimum(ends, end) - np.maximum(ends - durations, start), 0, None) / np.maximum(durations, 1)
    counted, kept = float(shares @ texts), shares > 0
    if counted >= window:
        rate = counted * 1e9 / float(end - start)
    else:
        # Too few runs to leave any out of those that began in time.
        kept = ends - durations < end
        rate = float(texts[kept].sum()) * 1e9 / float(ends[kept][-1] - begin)
    return Saturated(rate, np.repeat(durations[kept], texts[kept]).tolist(), int(texts[kept].sum()))
