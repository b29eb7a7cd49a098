"""Where the time of a traced run went: every nanosecond of every thread is a step's, waiting, or between chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = [
    "BEGIN",
    "CHUNK",
    "DENSE",
    "END",
    "FIRST_ROW",
    "HEADS",
    "ROWS",
    "STEP",
    "THREAD",
    "Account",
    "account_of",
    "mean_account",
]

_Int64 = np.ndarray[Any, np.dtype[np.int64]]
_Float64 = np.ndarray[Any, np.dtype[np.float64]]

THREAD, STEP, CHUNK, FIRST_ROW, ROWS, BEGIN, END, HEADS, DENSE = range(9)
"""Columns of events, as ``CpuRunnable.trace`` gives them."""


@dataclass(frozen=True)
class Account:
    """Nanoseconds of one run, summed over the threads and divided by their number, so that all adds up to ``wall``.

    ``busy[step]``: at work. ``waiting[step]``: from the end of the step's work to the beginning of the thread's next
    (the barrier, and the threads that were slower), and before the first step of a chunk (waking up). ``idle``: threads
    without any work in a chunk. ``between``: before, between and after chunks, where one thread prepares and the others
    wait for it.
    """

    busy: _Float64
    waiting: _Float64
    idle: float
    between: float
    wall: float
    events: int


def account_of(events: _Int64, wall: int, threads: int, steps: int) -> Account:
    """Sums up ``i64[events, 9]`` as ``CpuRunnable.trace`` gives them: of each thread in the order of time."""
    busy = np.zeros(steps)
    waiting = np.zeros(steps)
    if len(events) == 0:
        return Account(busy, waiting, 0.0, float(wall), float(wall), 0)
    chunks = events[:, CHUNK]
    count = int(chunks.max()) + 1
    starts = np.full(count, np.iinfo(np.int64).max)
    ends = np.zeros(count, np.int64)
    np.minimum.at(starts, chunks, events[:, BEGIN])
    np.maximum.at(ends, chunks, events[:, END])
    ran = ends > 0  # a chunk may have nothing to do
    span = float(np.sum(ends[ran] - starts[ran]))
    np.add.at(busy, events[:, STEP], events[:, END] - events[:, BEGIN])
    # Of every thread in every chunk: from each event to the next, from the last one to the chunk's end, and from the
    # chunk's beginning to the first.
    group = events[:, THREAD] * count + chunks
    first = np.r_[True, group[1:] != group[:-1]]
    last = np.r_[first[1:], True]
    until = np.where(last, ends[chunks], np.r_[events[1:, BEGIN], 0])
    np.add.at(waiting, events[:, STEP], until - events[:, END])
    np.add.at(waiting, events[first, STEP], events[first, BEGIN] - starts[chunks[first]])
    absent = threads - np.bincount(chunks[first], minlength=count)
    return Account(
        busy / threads,
        waiting / threads,
        float(np.sum((absent * (ends - starts))[ran])) / threads,
        wall - span,
        float(wall),
        len(events),
    )


def mean_account(accounts: Sequence[Account]) -> Account:
    """The mean, which adds up as each of them does."""
    return Account(
        np.mean([account.busy for account in accounts], axis=0),
        np.mean([account.waiting for account in accounts], axis=0),
        float(np.mean([account.idle for account in accounts])),
        float(np.mean([account.between for account in accounts])),
        float(np.mean([account.wall for account in accounts])),
        round(float(np.mean([account.events for account in accounts]))),
    )
