"""How fast artifacts are, side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

import encast.engine as engines
from encast.budget.sample import Sample
from encast.engine import Engine

__all__ = ["ROUNDS", "ROUND_SECONDS", "race", "ratio"]

ROUNDS = 7
ROUND_SECONDS = 0.05
"""Of each artifact in a round, one run at least: small models run in less than a millisecond."""


def race(artifacts: Sequence[Path], sample: Sample, threads: int | None = None) -> list[list[float]]:
    """Seconds of each artifact in every round, with so many threads (default: the usable cores).

    A round times each once, in the reverse of the last round's order. Raises ``EncastError``.
    """
    seconds: list[list[float]] = [[] for _ in artifacts]
    with ExitStack() as opened:
        loaded = [opened.enter_context(engines.load(path, threads=threads)) for path in artifacts]
        systems = list(enumerate(loaded))
        for _, engine in systems:
            sample.run(engine.runnable)
        for _ in range(ROUNDS):
            for number, engine in systems:
                seconds[number].append(_seconds(engine, sample))
            systems.reverse()
    return seconds


def ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """The median over rounds of a / b: whatever slows the machine during a round slows both, and cancels."""
    return float(np.median(np.divide(a, b)))


def _seconds(engine: Engine, sample: Sample) -> float:
    """The median of the runs of one round."""
    times: list[float] = []
    end = time.perf_counter() + ROUND_SECONDS
    while not times or time.perf_counter() < end:
        begin = time.perf_counter()
        sample.run(engine.runnable)
        times.append(time.perf_counter() - begin)
    return float(np.median(times))
