"""A simulated machine of two sockets with 24 cores each, and what every set-up of its full grid is worth on it.

    python tests/tune/surface48.py            # writes data/surface48.json.gz; some minutes

Nothing here is the cost model's: times come from rows a thread, cache misses, turbo clocks and a memory that all share,
and rates under a promise from an event-by-event simulation of the queues. ``RecordedMachine`` plays the record back
with the noise of a real machine.
"""

from __future__ import annotations

import functools
import gzip
import heapq
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from encast.backends.groups import Setup, read_setup, setup_to_json
from encast.tune.evaluate import crossing
from encast.tune.measurement import Measurement
from encast.tune.slo import Slo
from encast.tune.space import Space, make_space

__all__ = ["CORES", "SLO", "RecordedMachine", "lengths", "record", "saturated", "service", "space", "sustained"]

CORES = 48
SLO = Slo(99, 10.0)
DATA = Path(__file__).parent / "data" / "surface48.json.gz"

_SOCKET = 24
_LAYERS = 12
_FLOPS_A_TOKEN = 4.3e7
_WEIGHT_BYTES = 2.1e7
_OPS_A_CORE = 4.2e11
_BYTES_A_CORE, _BYTES_A_SOCKET = 1.1e10, 9.5e10
_CACHE_A_SOCKET = 3.4e7


def lengths() -> list[int]:
    """Texts of a search service: four queries for every passage."""
    rng = np.random.default_rng(48)
    queries = np.clip(rng.gamma(6.0, 2.2, 1600).round() + 3, 4, 40)
    passages = np.clip(rng.lognormal(4.75, 0.45, 400).round(), 25, 320)
    return [int(length) for length in rng.permutation(np.concatenate([queries, passages]))]


def space() -> Space:
    return make_space(CORES, lengths())


@functools.lru_cache(maxsize=1 << 20)
def service(tokens: float, threads: int, busy: float) -> float:
    """Seconds of a run of that many tokens on ``threads`` cores; ``busy`` are at work in all, its own included."""
    rows = math.ceil(tokens / threads / 6) * 6 if tokens >= 64 * threads else tokens / threads + 3
    clock = 1 - 0.22 * min(busy, CORES) / CORES
    arithmetic = rows * _FLOPS_A_TOKEN / (_OPS_A_CORE * clock) * (1 + 4 / (rows + 2))
    sockets = 1 if threads <= _SOCKET else 2
    # Several instances of a socket read the same weights, of which the cache keeps a part for all of them.
    wanted = _WEIGHT_BYTES + 3000 * min(tokens, 1024) * busy / threads
    missing = max(0.15, 1 - 0.5 * sockets * _CACHE_A_SOCKET / wanted)
    share = min(_BYTES_A_CORE, 2 * _BYTES_A_SOCKET / max(busy, 1)) * threads
    weights = _WEIGHT_BYTES * missing / share * max(1.0, tokens / 1024)
    meet = _LAYERS * 6 * (0.3e-6 * math.log2(threads) + (1.5e-6 if sockets > 1 else 0)) if threads > 1 else 0.0
    return 22e-6 + meet * max(1.0, tokens / 1024) + max(arithmetic, weights) + 0.3 * min(arithmetic, weights)


def _work(setup: Setup, texts: Sequence[int]) -> list[list[int]]:
    """The texts of each group."""
    bounds = [0, *(group.longest or 10**9 for group in setup.groups)]
    return [[length for length in texts if low < length <= high] for low, high in itertools.pairwise(bounds)]


def saturated(setup: Setup, texts: Sequence[int]) -> float:
    """Texts a second with endless texts waiting."""
    times = []
    for group, own in zip(setup.groups, _work(setup, texts), strict=True):
        # Runs as an instance cuts them: whole texts up to the bound.
        total, tokens = 0.0, 0
        for length in own:
            if tokens and tokens + length > setup.batch_tokens:
                total, tokens = total + service(tokens, group.threads, setup.cores), 0
            tokens += length
        total += service(tokens, group.threads, setup.cores) if tokens else 0.0
        times.append((total / group.instances, total * group.threads))
    if setup.shared_cores:
        # Both groups at once: their work on all cores, and what they take from each other.
        return len(texts) / max(1.12 * sum(work for _, work in times) / CORES, *(alone for alone, _ in times))
    return len(texts) / max(alone for alone, _ in times)


def sustained(
    setup: Setup, texts: Sequence[int], slo: Slo, requests: int = 20_000, steps: int = 6
) -> tuple[float, float]:
    """The highest rate at which the promise is kept, 0 for none; and the percentile over the limit at the lowest."""
    most = saturated(setup, texts)
    limit = slo.limit_ms / 1e3
    rng = np.random.default_rng(7)
    gaps = np.cumsum(rng.exponential(1.0, requests))
    length = np.asarray(texts)[rng.integers(0, len(texts), requests)]
    home = np.searchsorted([group.longest or 10**9 for group in setup.groups], length)
    orders = [np.flatnonzero(home == index).tolist() for index in range(len(setup.groups))]
    low, high, seen = 0.0, 1.0, []
    for step in range(steps):
        share = 0.02 if step == 0 else (low + high) / 2
        worst = _percentile(setup, (gaps / (most * share)).tolist(), length.tolist(), orders, slo)
        seen.append((most * share, worst))
        if worst <= limit:
            low = share
        elif step == 0:
            return 0.0, worst / limit
        else:
            high = share
    return crossing(seen, limit), 1.0


def _percentile(
    setup: Setup, due: Sequence[float], length: Sequence[int], orders: Sequence[Sequence[int]], slo: Slo
) -> float:
    """Seconds from arrival to answer that ``slo.percent`` of the requests keep to; of those so far when hopeless."""
    hopeless = 4 * (1 - slo.percent / 100) * len(due)
    free = [[0.0] * group.instances for group in setup.groups]
    head = [0] * len(orders)
    running: list[tuple[float, int]] = []  # end of a run, its threads
    latencies: list[float] = []
    busy = late = 0
    while late <= hopeless:
        # The group whose next run begins first.
        now, which = math.inf, -1
        for group, order in enumerate(orders):
            if head[group] < len(order):
                begin = max(free[group][0], due[order[head[group]]])
                if begin < now:
                    now, which = begin, group
        if which < 0:
            break
        order, at, tokens = orders[which], head[which], 0
        first = at
        while at < len(order) and due[order[at]] <= now:
            if tokens and tokens + length[order[at]] > setup.batch_tokens:
                break
            tokens += length[order[at]]
            at += 1
        head[which] = at
        while running and running[0][0] <= now:
            busy -= heapq.heappop(running)[1]
        threads = setup.groups[which].threads
        busy += threads
        seconds = service(tokens, threads, busy)
        if busy > CORES:
            seconds *= 1.12 * busy / CORES
        heapq.heapreplace(free[which], now + seconds)
        heapq.heappush(running, (now + seconds, threads))
        for index in order[first:at]:
            latencies.append(now + seconds - due[index])
            late += latencies[-1] > slo.limit_ms / 1e3
    return float(np.percentile(latencies, slo.percent))


def record() -> dict[str, Any]:
    """Every set-up of the grid: its ``chosen``, rate under the promise, excess, throughput."""
    texts = lengths()
    rows = []
    for setup in space().setups:
        rate, excess = sustained(setup, texts, SLO)
        rows.append(
            [setup_to_json(setup), round(rate, 1), round(min(excess, 1e6), 3), round(saturated(setup, texts), 1)]
        )
    return {"cores": CORES, "slo": SLO.to_json(), "rows": rows}


class RecordedMachine:
    """Plays the record back: 2 to 3.5 % noise a measurement, a slow drift of the clock, now and then a neighbour."""

    def __init__(self, seed: int, slo: Slo | None) -> None:
        with gzip.open(DATA, "rt", encoding="utf-8") as file:
            document = json.load(file)
        self.slo = slo
        self.rates: dict[Setup, tuple[float, float, float]] = {
            read_setup(setup, "row", batch_tokens=1): (rate, excess, most)
            for setup, rate, excess, most in document["rows"]
        }
        self.measured: list[Setup] = []
        # A rate under a promise rests on the slowest hundredth of the requests.
        self._noise = 0.02 if slo is None else 0.035
        self._rng = np.random.default_rng((seed, 1))
        self._phase = self._rng.uniform(0, 2 * math.pi)

    def true_rate(self, setup: Setup) -> float:
        rate, _, most = self.rates[setup]
        return most if self.slo is None else rate

    @property
    def best(self) -> float:
        return max(map(self.true_rate, self.rates))

    def probe(self, tokens: int, threads: int, instances: int) -> float:
        return service(tokens, threads, threads * instances) / self._speed()

    def measure(self, setups: Sequence[Setup]) -> list[Measurement]:
        drift = 1 + 0.02 * math.sin(self._phase + len(self.measured) / 15)
        measured = []
        for setup in setups:
            self.measured.append(setup)
            rate, excess, most = self.rates[setup]
            speed = drift * self._speed()
            kept = most if self.slo is None else rate
            measured.append(Measurement(kept * speed, most * speed, {"p99": 10.0}, excess if kept == 0 else 1.0, 10**9))
        return measured

    def _speed(self) -> float:
        neighbour = 0.8 if self._rng.random() < 0.03 else 1.0
        return float(neighbour * math.exp(self._rng.normal(0, self._noise)))


if __name__ == "__main__":
    recorded = json.dumps(record(), separators=(",", ":")).encode()
    DATA.parent.mkdir(exist_ok=True)
    # No time of day in it, so that the same record is the same file.
    with DATA.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as file:
        file.write(recorded)
