"""Simulated machines, and what every set-up of their full grids is worth on them.

    python tests/tune/surfaces.py            # writes data/*.json.gz; some minutes

Nothing here is the cost model's: times come from rows a thread, cache misses, turbo clocks and a memory that all share,
and rates within a latency limit from an event-by-event simulation of the queues. ``RecordedMachine`` plays a record
back with the noise of a real machine.
"""

from __future__ import annotations

import functools
import gzip
import heapq
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from encast.backends.groups import Setup, read_setup, setup_to_json
from encast.tune.evaluate import crossing
from encast.tune.measurement import Measurement
from encast.tune.slo import Slo
from encast.tune.space import Space, make_space

__all__ = ["DESKTOP", "SERVER", "RecordedMachine", "Surface"]

_DATA = Path(__file__).parent / "data"


def _search_service() -> tuple[int, ...]:
    """Four queries for every passage."""
    rng = np.random.default_rng(48)
    queries = np.clip(rng.gamma(6.0, 2.2, 1600).round() + 3, 4, 40)
    passages = np.clip(rng.lognormal(4.75, 0.45, 400).round(), 25, 320)
    return tuple(int(length) for length in rng.permutation(np.concatenate([queries, passages])))


def _reranking() -> tuple[int, ...]:
    """Pairs of a question and a passage: all of them long."""
    rng = np.random.default_rng(8)
    return tuple(int(length) for length in np.clip(rng.lognormal(4.9, 0.5, 1000).round(), 40, 500))


@dataclass(frozen=True, eq=False)
class Surface:
    """A machine of equal sockets, a model and a workload on it, and the latency limit to keep."""

    name: str
    lengths: tuple[int, ...]
    slo: Slo
    sockets: int
    cores_a_socket: int
    layers: int
    flops_a_token: float
    weight_bytes: float
    ops_a_core: float
    bytes_a_core: float
    bytes_a_socket: float
    cache_a_socket: float
    turbo: float
    """By how much of its clock a core is slower while all others work."""
    crowding: float
    """How many times as long instances take on cores that others are on too."""

    @property
    def cores(self) -> int:
        return self.sockets * self.cores_a_socket

    @functools.cached_property
    def space(self) -> Space:
        return make_space(self.cores, self.lengths)

    @property
    def data(self) -> Path:
        return _DATA / f"{self.name}.json.gz"

    @functools.lru_cache(maxsize=1 << 20)  # noqa: B019 - surfaces live as long as the module
    def service(self, tokens: float, threads: int, busy: float) -> float:
        """Seconds of a run of that many tokens on ``threads`` cores; ``busy`` are at work in all, its own included."""
        rows = math.ceil(tokens / threads / 6) * 6 if tokens >= 64 * threads else tokens / threads + 3
        clock = 1 - self.turbo * min(busy, self.cores) / self.cores
        arithmetic = rows * self.flops_a_token / (self.ops_a_core * clock) * (1 + 4 / (rows + 2))
        sockets = 1 if threads <= self.cores_a_socket else self.sockets
        # Several instances of a socket read the same weights, of which the cache keeps a part for all of them.
        wanted = self.weight_bytes + 3000 * min(tokens, 1024) * busy / threads
        missing = max(0.15, 1 - sockets / self.sockets * self.cache_a_socket / wanted)
        share = min(self.bytes_a_core, self.sockets * self.bytes_a_socket / max(busy, 1)) * threads
        weights = self.weight_bytes * missing / share * max(1.0, tokens / 1024)
        step = 0.3e-6 * math.log2(threads) + (1.5e-6 if sockets > 1 else 0)
        meet = self.layers * 6 * step if threads > 1 else 0.0
        return 22e-6 + meet * max(1.0, tokens / 1024) + max(arithmetic, weights) + 0.3 * min(arithmetic, weights)

    def saturated(self, setup: Setup) -> float:
        """Texts a second with endless texts waiting."""
        times = []
        for group, own in zip(setup.groups, self._work(setup), strict=True):
            # Runs as an instance cuts them: whole texts up to the bound.
            total, tokens = 0.0, 0
            for length in own:
                if tokens and tokens + length > setup.batch_tokens:
                    total, tokens = total + self.service(tokens, group.threads, setup.cores), 0
                tokens += length
            total += self.service(tokens, group.threads, setup.cores) if tokens else 0.0
            times.append((total / group.instances, total * group.threads))
        count = len(self.lengths)
        if setup.shared_cores:
            # Both groups at once: their work on all cores, and what they take from each other.
            work = sum(work for _, work in times)
            return count / max(self.crowding * work / self.cores, *(alone for alone, _ in times))
        return count / max(alone for alone, _ in times)

    def _work(self, setup: Setup) -> list[list[int]]:
        """The texts of each group."""
        bounds = [0, *(group.longest or 10**9 for group in setup.groups)]
        return [[length for length in self.lengths if low < length <= high] for low, high in itertools.pairwise(bounds)]

    def sustained(self, setup: Setup, requests: int = 20_000, steps: int = 6) -> tuple[float, float]:
        """The highest rate that keeps the limit, 0 for none; and the percentile over the limit at the lowest."""
        most = self.saturated(setup)
        limit = self.slo.limit_ms / 1e3
        rng = np.random.default_rng(7)
        gaps = np.cumsum(rng.exponential(1.0, requests))
        length = np.asarray(self.lengths)[rng.integers(0, len(self.lengths), requests)]
        home = np.searchsorted([group.longest or 10**9 for group in setup.groups], length)
        orders = [np.flatnonzero(home == index).tolist() for index in range(len(setup.groups))]
        low, high, seen = 0.0, 1.0, []
        for step in range(steps):
            share = 0.02 if step == 0 else (low + high) / 2
            worst = self._percentile(setup, (gaps / (most * share)).tolist(), length.tolist(), orders)
            seen.append((most * share, worst))
            if worst <= limit:
                low = share
            elif step == 0:
                return 0.0, worst / limit
            else:
                high = share
        return crossing(seen, limit), 1.0

    def _percentile(
        self, setup: Setup, due: Sequence[float], length: Sequence[int], orders: Sequence[Sequence[int]]
    ) -> float:
        """Seconds from arrival to answer that the percentile keeps to; of those so far when hopeless."""
        slo = self.slo
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
            seconds = self.service(tokens, threads, busy)
            if busy > self.cores:
                seconds *= self.crowding * busy / self.cores
            heapq.heapreplace(free[which], now + seconds)
            heapq.heappush(running, (now + seconds, threads))
            for index in order[first:at]:
                latencies.append(now + seconds - due[index])
                late += latencies[-1] > slo.limit_ms / 1e3
        return float(np.percentile(latencies, slo.percent))

    def record(self) -> dict[str, Any]:
        """Every set-up of the grid: its ``chosen``, rate within the limit, excess, throughput."""
        rows = []
        for setup in self.space.setups:
            rate, excess = self.sustained(setup)
            rows.append(
                [setup_to_json(setup), round(rate, 1), round(min(excess, 1e6), 3), round(self.saturated(setup), 1)]
            )
        return {"cores": self.cores, "slo": self.slo.to_json(), "rows": rows}


SERVER = Surface(
    "surface48", _search_service(), Slo(99, 10.0), sockets=2, cores_a_socket=24, layers=12, flops_a_token=4.3e7,
    weight_bytes=2.1e7, ops_a_core=4.2e11, bytes_a_core=1.1e10, bytes_a_socket=9.5e10, cache_a_socket=3.4e7, turbo=0.22,
    crowding=1.12,
)  # fmt: skip
"""Short texts and a small model on 48 cores: within the limit 3 of its 3,430 set-ups are within 3 % of the best."""

DESKTOP = Surface(
    "surface8", _reranking(), Slo(99, 90.0), sockets=1, cores_a_socket=8, layers=12, flops_a_token=1.7e8,
    weight_bytes=8.6e7, ops_a_core=2.6e11, bytes_a_core=1.6e10, bytes_a_socket=3.6e10, cache_a_socket=1.6e7, turbo=0.1,
    crowding=1.2,
)  # fmt: skip
"""Long texts and a model that no cache holds on 8 cores."""


class RecordedMachine:
    """Plays a record back: 2 to 3.5 % noise a measurement, a slow drift of the clock, now and then a neighbour."""

    def __init__(self, surface: Surface, seed: int, slo: Slo | None) -> None:
        """``slo``: the surface's, or None for throughput."""
        self.surface, self.slo = surface, slo
        self.rates = _recorded(surface)
        self.measured: list[Setup] = []
        # A rate within a limit rests on the slowest hundredth of the requests.
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
        return self.surface.service(tokens, threads, threads * instances) / self._speed()

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


@functools.cache
def _recorded(surface: Surface) -> dict[Setup, tuple[float, float, float]]:
    """Rate, excess and throughput of every set-up of the grid."""
    with gzip.open(surface.data, "rt", encoding="utf-8") as file:
        document = json.load(file)
    return {read_setup(setup, "row", batch_tokens=1): tuple(values) for setup, *values in document["rows"]}


def main() -> None:
    for surface in (SERVER, DESKTOP):
        recorded = json.dumps(surface.record(), separators=(",", ":")).encode()
        surface.data.parent.mkdir(exist_ok=True)
        # No time of day in it, so that the same record is the same file.
        with surface.data.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as file:
            file.write(recorded)


if __name__ == "__main__":
    main()
