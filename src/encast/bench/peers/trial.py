"""Which of some ways of computing the same is the fastest, here and now."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from encast.bench.peers.transformer import States

__all__ = ["fastest"]

_SECONDS = 1.5
"""Of each candidate's calls; their turns alternate. Two precisions of OpenVINO, 1.8 % apart at 33 ms a call on a shared
machine: 9 calls of each chose the faster one in 86 % of trials by their median and in 93 % by their lower quartile, 20
calls in 90 to 100 %. Runs that choose otherwise compare with another peer."""

_LEAST = 3


def fastest(candidates: Mapping[str, States]) -> str:
    """The name of the call of the smallest lower quartile, the first of equals; times nothing if there is one alone.

    A quartile, since a neighbour on the machine only ever slows.
    """
    if len(candidates) == 1:
        return next(iter(candidates))
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for call in candidates.values():
        call()
    end = time.perf_counter() + _SECONDS * len(candidates)
    while time.perf_counter() < end or min(map(len, times.values())) < _LEAST:
        for name, call in candidates.items():
            call()  # the other's threads go to sleep meanwhile
            begun = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begun)
    return min(times, key=lambda name: float(np.percentile(times[name], 25)))
