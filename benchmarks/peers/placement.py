"""Whether the processors share a last-level cache at this moment.

A virtual machine's processors are moved between cores by its host. On parts with several cache complexes two of them
share a last-level cache for some seconds and then do not; each barrier and each activation that changes hands then
costs three times as much, at the same instruction peak. So every round says where it ran.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np

__all__ = ["placement"]

BYTES = 2 << 20
PASSES = 16
NEAR = 0.45
"""Reading what another core has just written is 0.6 to 0.9 times as fast as reading what one has written oneself
where both share the cache (Zen 5), and 0.3 times where they do not."""


def placement() -> str:
    """``near``, ``far``, or ``unknown`` where threads cannot be bound to processors."""
    if not hasattr(os, "sched_setaffinity"):
        return "unknown"
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        return "unknown"
    own, other = _read_rate(cpus[0], cpus[0]), _read_rate(cpus[0], cpus[1])
    return "near" if other > NEAR * own else "far"


def _read_rate(writer: int, reader: int) -> float:
    """The median rate at which processor ``reader`` reads what ``writer`` has just written, in bytes a second."""
    buffer: Any = np.ones(BYTES, np.uint8)
    meet = threading.Barrier(2)
    rates: list[float] = []

    def write() -> None:
        os.sched_setaffinity(0, {writer})  # of this thread alone
        for value in range(PASSES):
            buffer.fill(value)
            meet.wait()
            meet.wait()

    def read() -> None:
        os.sched_setaffinity(0, {reader})
        for _ in range(PASSES):
            meet.wait()
            start = time.perf_counter()
            buffer.max()
            rates.append(BYTES / (time.perf_counter() - start))
            meet.wait()

    team = [threading.Thread(target=work) for work in (write, read)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    return float(np.median(rates))
