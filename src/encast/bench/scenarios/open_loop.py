"""Requests that come by chance, or as they were recorded, whether or not the last one is answered."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from encast.bench.scenarios.base import MEAN_LATENCY, Point
from encast.bench.scenarios.closed_loop import burst_sample, division
from encast.measure.arrivals import Responses, poisson, read_trace, windows
from encast.measure.fields import positive, positives, seed_number
from encast.measure.statistics import latency_metrics, median_interval, percentiles

if TYPE_CHECKING:
    from encast.bench.launcher import Launcher
    from encast.bench.system import System
    from encast.machine import Machine
    from encast.measure.workloads import Workload

__all__ = ["OpenLoop"]

REQUESTS = 32
"""Different requests of a stream, asked in turn."""

SETTLE = 0.1
"""The share of a stream's begin that is left out: its queues were empty."""


Shape = tuple[tuple[str, Any], ...]


def _shape(label: Mapping[str, Any]) -> Shape:
    """What a capacity is of."""
    return tuple(sorted((name, value) for name, value in label.items() if name != "load"))


class OpenLoop:
    """Latency from the time at which a request was due, at a rate that does not heed the system.

    Each request is one sequence; whichever instance is idle takes the oldest. All systems get the same arrivals in
    the same round. Rates are requests a second; where only ``load`` is given, they
    are these shares of what the system that is measured first answers when it is asked without pause
    (``capacity_per_s``), and the same for all, also for those that are measured after a resumption (``recall``).

    Of a trace each round replays a window of ``seconds``, in an order that spreads however many rounds there are evenly
    over the trace (``windows``). Of ``trace_arrivals`` a row's rounds have replayed ``replayed_arrivals``; what comes
    twice counts once.
    """

    instead: ClassVar[Mapping[str, str]] = {"workload.batch": "nothing: each request is one sequence"}
    compared_by = MEAN_LATENCY

    def __init__(
        self,
        rate: Any = None,
        load: Any = (0.5, 0.8),
        trace: str | None = None,
        speed: float = 1.0,
        seconds: float = 1.0,
        seed: int = 0,
    ) -> None:
        """``rate`` or ``load``: one number or several. ``trace``: a file of recorded arrivals instead, replayed
        ``speed`` times as fast. ``seconds``: of a round; it should hold a hundred requests and more."""
        self.rates = None if rate is None else positives("scenario.rate", rate)
        self.loads = positives("scenario.load", load)
        self.seconds = positive("scenario.seconds", seconds)
        self.speed = positive("scenario.speed", speed)
        self.trace = None if trace is None else [round(time / self.speed) for time in read_trace(str(trace))]
        self._windows = [] if self.trace is None else windows(self.trace, self.seconds)
        self.seed = seed_number("scenario.seed", seed)
        self._capacity: dict[Shape, float] = {}

    def points(self, workload: Workload, launcher: Launcher, machine: Machine) -> Sequence[Point]:
        instances, threads = division(launcher, machine)
        kinds: list[dict[str, float | str]]
        if self.trace is not None:
            kinds = [{"arrivals": "trace"}]
        elif self.rates is not None:
            kinds = [{"arrivals": "poisson", "rate": rate} for rate in self.rates]
        else:
            kinds = [{"arrivals": "poisson", "load": load} for load in self.loads]
        points: dict[tuple[Any, ...], Point] = {}
        for part in workload.parts():
            for kind in kinds:
                label = {**part.label, "batch": 1, **kind, "instances": instances, "threads": threads}
                key = tuple(label.items())  # parts that differ in their batch size alone are one here
                if key not in points:
                    points[key] = Point(part.arrivals(REQUESTS), instances, threads, label)
        return list(points.values())

    def recall(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Takes the capacities from rows of the same comparison."""
        for row in rows:
            capacity = row["metrics"].get("capacity_per_s")
            if capacity is not None:
                self._capacity.setdefault(_shape(row["point"]), float(capacity))

    def round(self, system: System, point: Point) -> dict[str, Any]:
        number = system.round_number
        arrivals = self._arrivals(system, point, number)
        responses = Responses.of(system.stream(arrivals, point.batches))
        settled = responses.after(SETTLE * self.seconds * 1e9)
        span = max(self.seconds * 1e9, float(responses.ended.max()))
        return {
            "latency_ns": settled.latency.tolist(),
            "wait_ns": settled.wait.tolist(),
            "service_ns": settled.service.tolist(),
            "offered_per_s": len(arrivals) / self.seconds,
            "answered_per_s": len(arrivals) / span * 1e9,
            "utilisation": responses.utilisation(point.instances),
            "capacity_per_s": self._capacity.get(_shape(point.label)),
            "window": number % len(self._windows) if self._windows else None,
        }

    def _arrivals(self, system: System, point: Point, number: int) -> list[int]:
        if self._windows:
            return self._windows[number % len(self._windows)][1]
        rate = point.label.get("rate")
        if rate is None:
            shape = _shape(point.label)
            if shape not in self._capacity:
                self._capacity[shape] = burst_sample(system, point, seconds=0.5)["sequences_per_s"]
            rate = float(point.label["load"]) * self._capacity[shape]
        return poisson(float(rate), self.seconds, (self.seed, number))

    def figure(self, sample: Mapping[str, Any]) -> float:
        """Of one over the mean latency: queueing counts with all its weight."""
        return 1e9 / float(np.mean(sample["latency_ns"]))

    def summarise(self, point: Point, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        def over(field: str) -> float:
            return float(np.median([sample[field] for sample in samples]))

        def together(field: str) -> dict[str, float | None]:
            every = np.concatenate([np.asarray(sample[field]) for sample in samples]) / 1e6
            return {"mean": float(every.mean()), **percentiles(every)}

        answered = [float(sample["answered_per_s"]) for sample in samples]
        utilisation = over("utilisation")
        return {
            **latency_metrics([sample["latency_ns"] for sample in samples]),
            "wait_ms": together("wait_ns"),
            "service_ms": together("service_ns"),
            "offered_per_s": over("offered_per_s"),
            "sequences_per_s": float(np.median(answered)),
            "sequences_per_s_interval": median_interval(answered),
            "utilisation": utilisation,
            "capacity_per_s": samples[0]["capacity_per_s"],
            # Offered more than it can do, a queue grows for ever, and its percentiles say only how long that went on.
            "saturated": utilisation >= 1,
            **self._replayed({sample["window"] for sample in samples}),
        }

    def _replayed(self, numbers: Collection[int]) -> dict[str, int]:
        if self.trace is None:
            return {}
        replayed = sum(len(self._windows[number][1]) for number in numbers)
        return {"replayed_arrivals": replayed, "trace_arrivals": len(self.trace)}
