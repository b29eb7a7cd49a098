"""Whether the processors share a last-level cache at this moment.

A virtual machine's processors are moved between cores by its host. On parts with several cache complexes two of them
share a last-level cache for some seconds and then do not; each barrier and each activation that changes hands then
costs three times as much, at the same instruction peak. So every round says where it ran.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["placement"]

_BYTES = 2 << 20
_PASSES = 16
_NEAR = 0.45
"""Reading what another core has just written is 0.6 to 0.9 times as fast as reading what one has written oneself
where both share the cache (Zen 5), and 0.3 times where they do not."""


def placement(cpus: Sequence[int]) -> str:
    """``near`` or ``far``, for the first two of ``cpus``; ``unknown`` with fewer, or where threads cannot be bound."""
    if len(cpus) < 2 or not hasattr(os, "sched_setaffinity"):
        return "unknown"
    try:
        own, other = _read_rate(cpus[0], cpus[0]), _read_rate(cpus[0], cpus[1])
    except OSError:  # not ours
        return "unknown"
    return "near" if other > _NEAR * own else "far"


def _read_rate(writer: int, reader: int) -> float:
    """The median rate at which processor ``reader`` reads what ``writer`` has just written, in bytes a second."""
    buffer: Any = np.ones(_BYTES, np.uint8)
    meet = threading.Barrier(2)
    rates: list[float] = []
    refused: list[OSError] = []

    def on(cpu: int) -> None:
        try:
            os.sched_setaffinity(0, {cpu})  # of this thread alone
        except OSError as error:
            refused.append(error)

    def write() -> None:
        on(writer)
        for value in range(_PASSES):
            buffer.fill(value)
            meet.wait()
            meet.wait()

    def read() -> None:
        on(reader)
        for _ in range(_PASSES):
            meet.wait()
            start = time.perf_counter()
            buffer.max()
            rates.append(_BYTES / (time.perf_counter() - start))
            meet.wait()

    team = [threading.Thread(target=work) for work in (write, read)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    if refused:
        raise refused[0]
    return float(np.median(rates))
