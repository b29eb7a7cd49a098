"""From nothing to the first answer: a new process, again and again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from encast.bench.scenarios.base import COLD_START, Point
from encast.measure.statistics import median_interval

if TYPE_CHECKING:
    from encast.bench.contender import Contender
    from encast.bench.launcher import Launcher
    from encast.machine import Machine
    from encast.measure.workloads import Workload

__all__ = ["ColdStartScenario"]

PARTS = ("import_s", "load_s", "first_call_s")


class ColdStartScenario:
    """Seconds to import the runtime, to load and compile, and to bind and call a shape; each of the slowest instance.

    Files come from the page cache, as when an instance is added to a machine that serves already. Conversions were made
    before: they are ``export_s`` of the row's ``cold``.
    """

    compared_by = COLD_START

    def points(self, workload: Workload, launcher: Launcher, machine: Machine) -> Sequence[Point]:
        places = launcher.place(machine)
        place = {"instances": len(places), "threads": places[0].threads}
        return [
            Point(part.draw(), len(places), places[0].threads, {**part.label, **place}) for part in workload.parts()
        ]

    def round(self, contender: Contender, point: Point) -> dict[str, float]:
        cold = contender.open(point.batches)
        contender.bind(point.batches)
        contender.burst(calls=1)  # what is compared with the reference
        return {part: float(seconds) for part, seconds in dataclasses.asdict(cold).items() if part in PARTS}

    def figure(self, sample: Mapping[str, float]) -> float:
        return 1 / sum(sample.values())

    def summarise(self, point: Point, samples: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        totals = [sum(sample.values()) for sample in samples]
        parts = {part.removesuffix("_s"): float(np.median([sample[part] for sample in samples])) for part in PARTS}
        return {
            "cold_start_s": {**parts, "total": float(np.median(totals))},
            "cold_start_s_interval": median_interval(totals),
            "starts": len(samples),
        }
