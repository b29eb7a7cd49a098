"""A service in miniature, to measure set-ups with: requests wait for their group, idle instances take what waits.

An instance takes the texts that are due, in their order, up to ``batch_tokens`` (one longer text runs alone), and runs
them as one batch. Tokenising, network and the making of answers are left out: they are the same for every set-up.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from encast.backends.groups import Setup
from encast.batch import Batch

__all__ = ["Saturated", "Service", "Streamed", "run_threads"]

_START_NS = 20_000_000
"""From the start of the threads to the first arrival."""

_LOOK_NS = 200_000
"""After which a group that ran ahead of the others looks whether they have come up."""

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


@dataclass
class _Queue:
    """The requests of one group. Who has the turn takes the next ones; other idle instances sleep.

    ``own``: their places in the workload, which comes over and over.
    """

    own: list[int]
    count: int
    turn: threading.Lock = field(default_factory=threading.Lock)
    taken: int = 0

    @property
    def next(self) -> int:
        """The number of the next request, counted over all groups."""
        return self.taken // len(self.own) * self.count + self.own[self.taken % len(self.own)]


@dataclass
class _Runs:
    """``(begin, end, requests)`` of all that ended, nanoseconds of the clock; and when those under way began."""

    ended: list[tuple[int, int, list[int]]] = field(default_factory=list)
    under_way: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Service:
    """Answers ``requests`` (batches of one text each) with ``run``, on the instances of ``setup``."""

    def __init__(self, setup: Setup, requests: Sequence[Batch], run: Callable[[Batch], Any]) -> None:
        self.setup, self.requests, self._run = setup, requests, run
        self._lengths = [request.tokens for request in requests]
        bounds = [group.longest for group in setup.groups[:-1] if group.longest is not None]
        self._own: list[list[int]] = [[] for _ in setup.groups]
        for index, length in enumerate(self._lengths):
            self._own[bisect_left(bounds, length)].append(index)
        self._instances = [index for index, group in enumerate(setup.groups) for _ in range(group.instances)]

    def stream(self, due: Sequence[int], give_up_ns: int) -> Streamed:
        """Answers requests that arrive at ``due`` nanoseconds, rising, from now; over and over the same ones.

        Gives up when one has waited for ``give_up_ns``: more arrive than can be answered.
        """
        origin = time.perf_counter_ns() + _START_NS
        hopeless = threading.Event()

        def wait(request: int, now: int) -> int | None:
            if request >= len(due) or hopeless.is_set():
                return None
            left = due[request] + origin - now
            if left < -give_up_ns:
                hopeless.set()
                return None
            return max(0, left)

        runs = _Runs()
        self._answer(wait, runs)
        answered = {request: (begin, end) for begin, end, requests in runs.ended for request in requests}
        return Streamed(
            [(due[request], begin - origin, end - origin) for request, (begin, end) in sorted(answered.items())],
            hopeless.is_set(),
        )

    def saturate(self, seconds: float, longest: float) -> Saturated:
        """Answers for at least that long, and not much longer than ``longest``, while there is always enough to do.

        Of the workload's order a window is open: from the oldest text without an answer, twice as many as the instances
        hold at once. So no group runs ahead of the others by more, and what is answered has the workload's proportion
        of short and long texts. Ends once that window has passed ``_WINDOWS`` times or the time is over; the runs that
        are under way then are finished beside others, as those before them, or they would be quicker.
        """
        mean = max(1.0, float(np.mean(self._lengths)))
        window = 2 * math.ceil(len(self._instances) * max(1.0, self.setup.batch_tokens / mean))
        runs = _Runs()
        finished: set[int] = set()
        seen = oldest = 0
        begin, end = time.perf_counter_ns(), 0
        soon, late = begin + int(seconds * 1e9), begin + int(longest * 1e9)

        def wait(request: int, now: int) -> int | None:
            nonlocal seen, oldest, end
            with runs.lock:
                for _, _, requests in runs.ended[seen:]:
                    finished.update(requests)
                seen = len(runs.ended)
                while oldest in finished:
                    finished.remove(oldest)
                    oldest += 1
                # However late it is, there is one run to tell of.
                some = bool(runs.ended or runs.under_way)
                if not end and some and (now >= late or (now >= soon and oldest >= _WINDOWS * window)):
                    end = now
                if end and all(start >= end for start in runs.under_way):
                    return None
                return 0 if request < oldest + window else _LOOK_NS

        self._answer(wait, runs)
        return _saturated(
            [(ended, ended - start, len(texts)) for start, ended, texts in runs.ended], begin, end, window
        )

    def _answer(self, wait: Callable[[int, int], int | None], runs: _Runs) -> None:
        """Every instance takes and runs until ``wait`` says None for its group's next request.

        ``wait(request, now)``: the nanoseconds until that request may be taken.
        """
        queues = [_Queue(own, len(self.requests)) for own in self._own]
        failed = threading.Event()

        def take(queue: _Queue) -> tuple[int, list[int]]:
            taken: list[int] = []
            tokens = now = 0
            with queue.turn:
                while queue.own and not failed.is_set():
                    now = now if taken else time.perf_counter_ns()
                    left = wait(queue.next, now)
                    length = self._lengths[queue.next % len(self.requests)]
                    if left is None or (taken and (left or tokens + length > self.setup.batch_tokens)):
                        break
                    if left:
                        time.sleep(min(left / 1e9, 0.05))
                        continue
                    taken.append(queue.next)
                    queue.taken += 1
                    tokens += length
                with runs.lock:
                    start = time.perf_counter_ns()
                    if taken:
                        runs.under_way.append(start)
            return start, taken

        def serve(group: int) -> None:
            while True:
                start, taken = take(queues[group])
                if not taken:
                    return
                try:
                    self._run(self.joined([request % len(self.requests) for request in taken]))
                except BaseException:
                    failed.set()
                    raise
                with runs.lock:
                    runs.under_way.remove(start)
                    runs.ended.append((start, time.perf_counter_ns(), taken))

        run_threads(serve, self._instances)

    def joined(self, indices: Sequence[int]) -> Batch:
        """The batch of these requests, by their places in the workload."""
        if len(indices) == 1:
            return self.requests[indices[0]]
        parts = [self.requests[index] for index in indices]
        types = [part.token_type_ids for part in parts if part.token_type_ids is not None]
        return Batch(
            np.concatenate([part.token_ids for part in parts]),
            np.cumsum([0, *(part.tokens for part in parts)], dtype=np.int32),
            np.concatenate(types) if len(types) == len(parts) else None,
        )


def run_threads(work: Callable[[int], None], arguments: Iterable[int]) -> None:
    """``work`` of each argument in a thread of its own; raises the first error when all have ended."""
    errors: list[BaseException] = []

    def guarded(argument: int) -> None:
        try:
            work(argument)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(argument,), daemon=True) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _saturated(runs: Sequence[tuple[int, int, int]], begin: int, end: int, window: int) -> Saturated:
    """Of (end, nanoseconds, texts) of runs the rate from the end of the first window, in which short texts may run
    ahead of long ones, to ``end``.

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
