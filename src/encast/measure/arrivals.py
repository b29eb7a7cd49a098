"""Requests that come when they come: arrival times, and latencies that count the wait.

A closed loop sends the next request when the last is answered, so a stall delays the requests that would have shown it
and is counted once: its percentiles leave out what users feel ("coordinated omission", Tene, "How NOT to Measure
Latency", 2013; Schroeder, Wierman and Harchol-Balter, "Open Versus Closed: A Cautionary Tale", NSDI 2006). Here
arrivals are drawn or recorded before anything runs, and latency is from the time at which a request was *due*, whether
or not anybody was free to take it then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from encast.data.readers import format_of, open_rows
from encast.data.rows import BadRow, Row
from encast.errors import InputError
from encast.measure.statistics import Array

__all__ = ["Responses", "poisson", "read_trace", "windows"]

TRACE_COLUMN = "seconds"

_MOST_ARRIVALS = 1 << 22


def poisson(rate: float, seconds: float, seed: Any = 0, *, exact: bool = False) -> list[int]:
    """Due times in nanoseconds of a Poisson process of ``rate`` arrivals a second, over that long.

    The number of arrivals is drawn too, so rounds differ as hours of real traffic do; ``exact``: as many come as the
    rate says, for who compares rates. ``seed``: as of NumPy's ``default_rng``. Never empty: a stretch without an
    arrival has one at its end.
    """
    if not (rate > 0 and seconds > 0 and math.isfinite(rate) and math.isfinite(seconds)):
        raise InputError(f"rate {rate} a second for {seconds} seconds: give numbers above 0")
    if rate * seconds > _MOST_ARRIVALS:
        raise InputError(f"{rate} a second for {seconds} seconds are more than {_MOST_ARRIVALS} arrivals; give less")
    rng = np.random.default_rng(seed)
    # Given their number, the arrivals of a Poisson process are uniform and independent.
    count = round(rate * seconds) if exact else rng.poisson(rate * seconds)
    times = np.sort(rng.uniform(0, seconds * 1e9, count))
    return [int(time) for time in times] or [int(seconds * 1e9)]


def read_trace(path: str) -> list[int]:
    """Due times in nanoseconds since the first of a recorded trace.

    Lines of text hold seconds each (any origin, such as a log's time stamps); CSV, JSONL and Parquet have them in the
    column ``seconds``. Raises ``InputError`` with file and line for what is no number, or earlier than the line before.
    """
    times: list[float] = []
    for row in _rows(path):
        if isinstance(row, BadRow):
            raise InputError(f"{path}:{row.number}: {row.reason}; mend or remove the row")
        value = row.values[TRACE_COLUMN]
        if isinstance(value, str) and not value.strip():
            continue
        try:
            seconds = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else math.nan
        except (ValueError, OverflowError):
            seconds = math.nan
        if not math.isfinite(seconds):
            raise InputError(f"{path}:{row.number}: {str(value)[:40]!r} is no time; give seconds, such as 12.75")
        if times and seconds < times[-1]:
            raise InputError(f"{path}:{row.number}: {seconds} comes after {times[-1]}; sort the arrivals by time")
        times.append(seconds)
        if len(times) > _MOST_ARRIVALS:
            raise InputError(f"{path}: more than {_MOST_ARRIVALS} arrivals; cut the trace")
    if len(times) < 2:
        raise InputError(f"{path}: {len(times)} arrivals; a trace needs at least 2")
    return [round((time - times[0]) * 1e9) for time in times]


def _rows(path: str) -> Iterator[Row | BadRow]:
    format = "auto" if format_of(path) in ("jsonl", "csv", "parquet") else "text"
    with open_rows(path, [TRACE_COLUMN], format) as reader:
        yield from reader


def windows(trace: Sequence[int], seconds: float) -> list[tuple[int, list[int]]]:
    """All stretches of a trace that have an arrival: when each begins, and its arrivals counted from then; nanoseconds.

    In the order of their numbers read backwards in binary (van der Corput's sequence): however few are taken from the
    front, they lie evenly over the trace.
    """
    span = max(1, round(seconds * 1e9))
    found = [
        (number * span, [time - number * span for time in times])
        for number, times in groupby(trace, key=lambda time: time // span)
    ]
    bits = len(found).bit_length()
    order = sorted(range(len(found)), key=lambda index: f"{index:0{bits}b}"[::-1])
    return [found[index] for index in order]


@dataclass(frozen=True)
class Responses:
    """What became of a stream: nanoseconds since it began, ``f64[n]`` each, in the order of arrival."""

    due: Array
    begun: Array
    ended: Array

    @staticmethod
    def of(stream: Sequence[tuple[int, int, int]]) -> Responses:
        """Of ``System.stream``'s (due, begun, ended); raises ``InputError`` when there is none."""
        if not stream:
            raise InputError("the stream held no request; give more seconds or a higher rate")
        due, begun, ended = np.array(stream, np.float64).T
        return Responses(due, begun, ended)

    def after(self, nanoseconds: float) -> Responses:
        """Those due from then on, all where there is none: streams begin with empty queues, as service seldom does."""
        keep = self.due >= nanoseconds
        return Responses(self.due[keep], self.begun[keep], self.ended[keep]) if keep.any() else self

    @property
    def latency(self) -> Array:
        """Nanoseconds from the time at which each was due to its answer."""
        return self.ended - self.due

    @property
    def wait(self) -> Array:
        """Nanoseconds that each waited before anybody began it."""
        return self.begun - self.due

    @property
    def service(self) -> Array:
        """Nanoseconds that answering each took: the latency of a closed loop."""
        return self.ended - self.begun

    def utilisation(self, instances: int) -> float:
        """The share of the instances' time that the offered requests need; at 1 and above the queue grows for ever."""
        span = float(self.due[-1] - self.due[0])
        return float(self.service.sum()) / (instances * span) if span else math.inf
