"""From nothing to the first answer: a new process, again and again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from encast.bench.scenarios.base import COLD_START, Point
from encast.bench.scenarios.closed_loop import division, make_points
from encast.measure.statistics import median_interval

if TYPE_CHECKING:
    from encast.bench.launcher import Launcher
    from encast.bench.system import System
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
        return make_points(workload, [division(launcher, machine)])

    def round(self, system: System, point: Point) -> dict[str, float]:
        cold = system.open(point.batches)
        system.bind(point.batches)
        system.burst(calls=1)  # what is compared with the reference
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
