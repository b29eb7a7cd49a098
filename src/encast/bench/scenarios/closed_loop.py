"""What the scenarios share in which every instance asks again as soon as it is answered."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from encast.batch import Batch
from encast.bench.scenarios.base import THROUGHPUT, Point
from encast.errors import InputError
from encast.measure.fields import positive
from encast.measure.statistics import latency_metrics, median_interval

if TYPE_CHECKING:
    from encast.bench.contender import Contender
    from encast.bench.launcher import Launcher
    from encast.machine import Machine

__all__ = [
    "BURST_SECONDS",
    "MOST_SECONDS",
    "OWN_DIVISION",
    "ClosedLoop",
    "burst_sample",
    "core_count",
    "divisors",
    "doubling",
    "fits",
    "rate_metrics",
]

OWN_DIVISION = {
    f"launcher.{field}": "scenario.instances=N, as far as launcher.core_list and launcher.nodes have cores"
    for field in ("instances", "cores_per_instance")
}
"""``instead`` of scenarios that divide the cores themselves. A preset counts: it says how a quota is rounded."""
BURST_SECONDS = 0.3
MOST_SECONDS = 60
"""Of a burst."""


def core_count(launcher: Launcher, machine: Machine) -> int:
    """The cores that the launcher's instances take together, cgroup quota and affinity considered; with ``smt`` their
    hardware threads, which an instance has by whole cores."""
    return sum(place.threads for place in launcher.place(machine))


def fits(launcher: Launcher, machine: Machine, instances: int, threads: int) -> bool:
    """Whether so many instances of so many threads have a place, within memory nodes unless the launcher crosses."""
    try:
        launcher.place(machine, instances=instances, threads=threads)
    except InputError:
        return False
    return True


def doubling(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and ``most``."""
    return tuple(dict.fromkeys([*(1 << power for power in range(most.bit_length()) if 1 << power <= most), most]))


def divisors(number: int) -> tuple[int, ...]:
    return tuple(part for part in range(1, number + 1) if number % part == 0)


def burst_sample(contender: Contender, point: Point, **burst: Any) -> dict[str, Any]:
    """One burst: nanoseconds of every call, a list an instance, and the sequences a second of all instances."""
    times = contender.burst(**burst)
    rates = [_rate(calls, point.batches) for calls in times]
    shares = len(times) if point.split else 1
    return {"ns": times, "sequences_per_s": sum(rates) / shares}


def _rate(calls: Sequence[int], batches: Sequence[Batch]) -> float:
    """Sequences a second of one instance that takes the batches in turn."""
    sequences = sum(batch.seqs for batch in itertools.islice(itertools.cycle(batches), len(calls)))
    return sequences / sum(calls) * 1e9 if calls else 0.0


def rate_metrics(rates: Sequence[float], batches: Sequence[Batch]) -> dict[str, Any]:
    """``sequences_per_s`` (the median round), its interval and ``tokens_per_s``, from the rate of each round."""
    rate = float(np.median(rates))
    tokens = sum(batch.tokens for batch in batches) / sum(batch.seqs for batch in batches)
    return {
        "sequences_per_s": rate,
        "sequences_per_s_interval": median_interval(rates),
        "tokens_per_s": rate * tokens,
    }


class ClosedLoop:
    """The rounds of a scenario that only has points of its own.

    Latencies are of the calls of all instances; throughput is the sum over instances, the median over rounds.
    """

    compared_by = THROUGHPUT

    def __init__(self, seconds: float = BURST_SECONDS) -> None:
        """``seconds``: of a burst."""
        self.seconds = positive("scenario.seconds", seconds, most=MOST_SECONDS)

    def round(self, contender: Contender, point: Point) -> dict[str, Any]:
        return burst_sample(contender, point, seconds=self.seconds)

    def figure(self, sample: Mapping[str, Any]) -> float:
        return float(sample["sequences_per_s"])

    def summarise(self, point: Point, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        calls = [list(itertools.chain.from_iterable(sample["ns"])) for sample in samples]
        rates = [float(sample["sequences_per_s"]) for sample in samples]
        return {**latency_metrics(calls), **rate_metrics(rates, point.batches)}
