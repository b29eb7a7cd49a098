"""Where two processors are at this moment: on one core, or on two, which share a last-level cache or do not.

A virtual machine's processors are moved between cores by its host. For moments, or for seconds while they are busy, two
of them may be hardware threads of one core, and do together what one of them does alone. On parts with several cache
complexes they share a last-level cache and then do not; each barrier and each activation that changes hands then costs
three times as much, at the same instruction peak. So every round says where it ran.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from encast.bench.limit import peak

__all__ = ["HALVED", "PLACES", "PlaceMeter"]

HALVED = "halved"
PLACES = ("near", "far", HALVED)
"""What ``PlaceMeter`` may say where it knows, the better first."""

_BYTES = 2 << 20
_PASSES = 16
_NEAR = 0.45
"""Reading what another core has just written is 0.6 to 0.9 times as fast as reading what one has written oneself
where both share the cache (Zen 5), and 0.3 times where they do not."""

_PROBE_SECONDS = 0.003
_HEAD_START = 0.001
_REMEMBERED = 64
_WHOLE = 0.75
"""Of its peak a processor keeps nearly all while another core is busy, half while the other thread of its own is."""


class PlaceMeter:
    """Where the first two of ``cpus`` are, which belong to different cores as far as this machine knows."""

    def __init__(self, cpus: Sequence[int]) -> None:
        self._cpus = tuple(cpus[:2])
        self._rates: deque[float] = deque(maxlen=_REMEMBERED)
        """What the first did, lately. What it does now while the other rests is no measure: threads that were timed
        just before may still spin on the other."""

    def read(self) -> str:
        """One of ``PLACES``; ``unknown`` with fewer than two, or where threads cannot be bound.

        ``halved``: one did little more than half of its peak while the other was busy, as two threads of one core do,
        and did so when it was looked at again.
        """
        if len(self._cpus) < 2 or not hasattr(os, "sched_setaffinity"):
            return "unknown"
        one, other = self._cpus
        try:
            if not self._whole() and not self._whole():
                return HALVED
            own_rate, other_rate = _read_rate(one, one), _read_rate(one, other)
        except OSError:  # not ours
            return "unknown"
        return "near" if other_rate > _NEAR * own_rate else "far"

    def _whole(self) -> bool:
        """Whether the first processor does what it can while the other is busy."""
        meet = threading.Barrier(2)
        rates: list[float] = []

        def measure() -> None:
            rates.append(peak("f32", 1, _PROBE_SECONDS))
            meet.wait()
            time.sleep(_HEAD_START)
            rates.append(peak("f32", 1, _PROBE_SECONDS))

        def burn() -> None:
            meet.wait()
            peak("f32", 1, 3 * _HEAD_START + 2 * _PROBE_SECONDS)

        _bound(meet, (self._cpus[0], measure), (self._cpus[1], burn))
        self._rates.extend(rates)
        # Not the greatest: where the host takes a processor away, the clock of its threads may miss some of their time.
        return rates[1] >= _WHOLE * float(np.percentile(self._rates, 75, method="nearest"))


def _read_rate(writer: int, reader: int) -> float:
    """The median rate at which processor ``reader`` reads what ``writer`` has just written, in bytes a second."""
    buffer: Any = np.ones(_BYTES, np.uint8)
    meet = threading.Barrier(2)
    rates: list[float] = []

    def write() -> None:
        for value in range(_PASSES):
            buffer.fill(value)
            meet.wait()
            meet.wait()

    def read() -> None:
        for _ in range(_PASSES):
            meet.wait()
            start = time.perf_counter()
            buffer.max()
            rates.append(_BYTES / (time.perf_counter() - start))
            meet.wait()

    _bound(meet, (writer, write), (reader, read))
    return float(np.median(rates))


def _bound(meet: threading.Barrier, *works: tuple[int, Callable[[], None]]) -> None:
    """Runs each function, which may wait at ``meet`` for the others, in a thread on the processor beside it.

    Raises what the first that failed raised, ``OSError`` for a processor that is not ours.
    """
    failed: list[BaseException] = []

    def on(cpu: int, work: Callable[[], None]) -> None:
        try:
            os.sched_setaffinity(0, {cpu})  # of this thread alone
            meet.wait()
            work()
        except threading.BrokenBarrierError:
            pass  # another one failed
        except BaseException as error:
            failed.append(error)
            meet.abort()

    team = [threading.Thread(target=on, args=work) for work in works]
    try:
        for thread in team:
            thread.start()
    except BaseException:
        meet.abort()
        raise
    finally:
        for thread in team:
            if thread.ident is not None:
                thread.join()
    if failed:
        raise failed[0]
