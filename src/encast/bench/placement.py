"""Where two processors are at this moment: on one core, or on two, which share a last-level cache or do not.

A virtual machine's processors are moved between cores by its host. For some seconds two of them may be hardware threads
of one core, and do together what one of them does alone. On parts with several cache complexes they share a last-level
cache and then do not; each barrier and each activation that changes hands then costs three times as much, at the same
instruction peak. So every round says where it ran.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from encast.bench.limit import peak

__all__ = ["ONE_CORE", "PLACES", "placement"]

ONE_CORE = "one core"
PLACES = ("near", "far", ONE_CORE)
"""What ``placement`` may say where it knows, the better first."""

_BYTES = 2 << 20
_PASSES = 16
_NEAR = 0.45
"""Reading what another core has just written is 0.6 to 0.9 times as fast as reading what one has written oneself
where both share the cache (Zen 5), and 0.3 times where they do not."""

_PROBE_SECONDS = 0.003
_HEAD_START = 0.001
_APART = 0.75
"""Of what a processor does alone, it does as much while another core is busy, and half while its own is."""


def placement(cpus: Sequence[int]) -> str:
    """One of ``PLACES``, for the first two of ``cpus``; ``unknown`` with fewer, or where threads cannot be bound."""
    if len(cpus) < 2 or not hasattr(os, "sched_setaffinity"):
        return "unknown"
    try:
        if _undisturbed(cpus[0], cpus[1]) < _APART:
            return ONE_CORE
        own, other = _read_rate(cpus[0], cpus[0]), _read_rate(cpus[0], cpus[1])
    except OSError:  # not ours
        return "unknown"
    return "near" if other > _NEAR * own else "far"


def _undisturbed(one: int, other: int) -> float:
    """The share of its own instruction peak that processor ``one`` keeps while ``other`` is busy."""
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

    _bound((one, measure), (other, burn))
    alone, beside = rates
    return beside / alone


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

    _bound((writer, write), (reader, read))
    return float(np.median(rates))


def _bound(*works: tuple[int, Callable[[], None]]) -> None:
    """Runs each function in a thread on the processor beside it; raises ``OSError`` where one is not ours."""
    ready = threading.Barrier(len(works))
    refused: list[OSError] = []

    def on(cpu: int, work: Callable[[], None]) -> None:
        try:
            os.sched_setaffinity(0, {cpu})  # of this thread alone
        except OSError as error:
            refused.append(error)
        ready.wait()
        if not refused:
            work()

    team = [threading.Thread(target=on, args=work) for work in works]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    if refused:
        raise refused[0]
