"""Scenarios in which every instance asks again as soon as it is answered, and what they share."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from encast.batch import Batch
from encast.bench.scenarios.base import LATENCY, THROUGHPUT, Point
from encast.errors import InputError
from encast.measure.fields import positive, whole_number
from encast.measure.statistics import latency_metrics, median_interval
from encast.measure.workloads import padding

if TYPE_CHECKING:
    from encast.bench.launcher import Launcher
    from encast.bench.system import System
    from encast.machine import Machine
    from encast.measure.workloads import Workload

__all__ = [
    "BURST_SECONDS",
    "LEAST_BATCHES",
    "MOST_SECONDS",
    "ClosedLoop",
    "Latency",
    "LengthReplay",
    "Throughput",
    "burst_sample",
    "core_count",
    "division",
    "fits",
    "make_points",
    "rate_metrics",
]

BURST_SECONDS = 0.3
MOST_SECONDS = 60
"""Of a burst."""
LEAST_BATCHES = 8
"""Of a round of ``LengthReplay``."""

Division = tuple[int, int]
"""Instances, and threads of each."""


def division(launcher: Launcher, machine: Machine) -> Division:
    """The launcher's own division of the machine."""
    places = launcher.place(machine)
    return len(places), places[0].threads


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


def make_points(
    workload: Workload, divisions: Iterable[Division], batches: Sequence[int | None] = (None,), *, split: bool = False
) -> list[Point]:
    """A point for each division of the cores, part of the workload and batch size (None: the part's own)."""
    points: dict[tuple[Any, ...], Point] = {}
    for (instances, threads), part, batch in itertools.product(divisions, workload.parts(), batches):
        label = {**part.label, "instances": instances, "threads": threads}
        if batch is not None:
            label["batch"] = batch
        key = tuple(label.items())  # parts that differ in their batch size alone are one where it is given
        if key not in points:
            points[key] = Point(part.draw(batch=batch), instances, threads, label, split)
    return list(points.values())


def burst_sample(system: System, point: Point, **burst: Any) -> dict[str, Any]:
    """One burst: nanoseconds of every call, a list an instance, and the sequences a second of all instances."""
    times = system.burst(**burst)
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

    def points(self, workload: Workload, launcher: Launcher, machine: Machine) -> Sequence[Point]:
        return make_points(workload, [division(launcher, machine)])

    def round(self, system: System, point: Point) -> dict[str, Any]:
        return burst_sample(system, point, seconds=self.seconds)

    def figure(self, sample: Mapping[str, Any]) -> float:
        return float(sample["sequences_per_s"])

    def summarise(self, point: Point, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        calls = [list(itertools.chain.from_iterable(sample["ns"])) for sample in samples]
        rates = [float(sample["sequences_per_s"]) for sample in samples]
        return {**latency_metrics(calls), **rate_metrics(rates, point.batches)}


class Throughput(ClosedLoop):
    """How many sequences are answered in a second when every instance is always busy, for each shape."""


class Latency(ClosedLoop):
    """How long one call takes, for each shape of the workload, on all instances.

    Systems are compared by the median call of a round, which a few interrupted calls do not move.
    """

    compared_by = LATENCY

    def figure(self, sample: Mapping[str, Any]) -> float:
        return 1e9 / float(np.median(list(itertools.chain.from_iterable(sample["ns"]))))


class LengthReplay(ClosedLoop):
    """Throughput over a workload's own distribution of lengths; latency is of a batch.

    Batches hold neighbours in length, so runtimes that pad compute little in vain: ``padding`` says how much. A sample
    of the batches is replayed, the same for all systems, and wholly in every round. It has a batch from each of as
    many equal shares of the batches, from the shortest to the longest, as the round has room for, and of
    ``LEAST_BATCHES`` shares at the least: so ``sampled_sequences`` stand for the lengths of all ``sequences``.
    """

    def __init__(self, batch_tokens: int | None = None, tokens: int = 8192) -> None:
        """``batch_tokens``: batches of as many sequences as fill so many tokens, instead of ``workload.batch``.
        ``tokens``: of a round, about; more where the fewest batches have more."""
        super().__init__()
        self.batch_tokens = None if batch_tokens is None else whole_number("scenario.batch_tokens", batch_tokens)
        self.tokens = whole_number("scenario.tokens", tokens)
        self.instead = {} if self.batch_tokens is None else {"workload.batch": "scenario.batch_tokens"}
        self._sequences: dict[tuple[Any, ...], int] = {}

    def points(self, workload: Workload, launcher: Launcher, machine: Machine) -> Sequence[Point]:
        instances, threads = division(launcher, machine)
        points = []
        for part in workload.parts():
            label = dict(part.label)
            if self.batch_tokens is not None:
                label.update(batch_tokens=self.batch_tokens)
                label.pop("batch", None)
            label.update(instances=instances, threads=threads)
            batches = part.replay(tokens=self.batch_tokens)
            self._sequences[tuple(label.items())] = sum(batch.seqs for batch in batches)
            points.append(Point(self._sample(batches), instances, threads, label))
        return points

    def _sample(self, batches: Sequence[Batch]) -> tuple[Batch, ...]:
        """The middle batch of each share, in the order in which they come, which is random."""
        each = sum(batch.tokens for batch in batches) / len(batches)
        count = min(len(batches), max(LEAST_BATCHES, int(self.tokens / each)))
        by_length = sorted(range(len(batches)), key=lambda index: batches[index].tokens / batches[index].seqs)
        chosen = {by_length[int((share + 0.5) * len(batches) / count)] for share in range(count)}
        return tuple(batch for index, batch in enumerate(batches) if index in chosen)

    def round(self, system: System, point: Point) -> dict[str, Any]:
        return burst_sample(system, point, calls=len(point.batches))

    def summarise(self, point: Point, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            **super().summarise(point, samples),
            "padding": padding(point.batches),
            "sampled_sequences": sum(batch.seqs for batch in point.batches),
            "sequences": self._sequences[tuple(point.label.items())],
        }
