"""What the machine allows: arithmetic at the measured instruction peak, weights at the measured bandwidth."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from peers.models import Model

__all__ = ["Limit", "last_level_cache_bytes", "read_bytes_per_second", "weights_bandwidth"]

MEMORY_BYTES = 256 << 20


def read_bytes_per_second(size: int, threads: int, seconds: float = 0.3) -> float:
    """The best rate at which ``threads`` threads read ``size`` bytes of their own each pass.

    NumPy's maximum of bytes is one vector load and one instruction a register, without a copy; it reaches what a
    loop of AVX-512 loads does.
    """
    parts = [np.ones(max(size // threads, 1), np.uint8) for _ in range(threads)]
    passes = max(1, int(0.01 * 50e9 / size))
    spans: list[list[tuple[float, float]]] = []
    meet = threading.Barrier(threads)
    end = time.perf_counter() + seconds

    def read(part: Any, index: int) -> None:
        more = True
        while more:
            if meet.wait() == 0:
                spans.append([])
            meet.wait()
            start = time.perf_counter()
            for _ in range(passes):
                part.max()
            spans[-1].append((start, time.perf_counter()))
            meet.wait()
            more = len(spans) < 3 or spans[-1][0][0] < end

    team = [threading.Thread(target=read, args=(part, index)) for index, part in enumerate(parts)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    total = sum(part.nbytes for part in parts) * passes
    return max(total / (max(stop for _, stop in span) - min(start for start, _ in span)) for span in spans)


def last_level_cache_bytes() -> int:
    """0 when unknown."""
    from encast.machine import this_machine

    return max((cache.bytes for cache in this_machine().caches if cache.kind != "instruction"), default=0)


def weights_bandwidth(model: Model, dtype: str, threads: int) -> tuple[float, str]:
    """Bytes a second at which the weights can be read again in every forward, and from where.

    Weights that fill at most half of the last-level cache stay there (the rest is for activations).
    """
    size = model.weight_bytes(dtype)
    cached = size <= last_level_cache_bytes() / 2
    return read_bytes_per_second(size if cached else MEMORY_BYTES, threads), "cache" if cached else "memory"


class Limit:
    """Seconds below which no forward can be, from the model's operations and the weights it must read."""

    def __init__(self, model: Model, dtype: str, lengths: Iterable[int], bytes_per_second: float = np.inf) -> None:
        self.operations = model.operations(lengths)
        self.read_seconds = model.weight_bytes(dtype) / bytes_per_second

    def seconds(self, ops_per_second: float) -> float:
        return max(self.operations / ops_per_second, self.read_seconds)

    def bound(self, ops_per_second: float) -> str:
        return "arithmetic" if self.operations / ops_per_second >= self.read_seconds else "weights"
