"""How long one call takes, asked again as soon as it is answered."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from encast.bench.scenarios.base import LATENCY, Point
from encast.bench.scenarios.closed_loop import ClosedLoop

if TYPE_CHECKING:
    from encast.bench.launcher import Launcher
    from encast.machine import Machine
    from encast.measure.workloads import Workload

__all__ = ["Latency"]


class Latency(ClosedLoop):
    """Latencies of every call of all instances, for each shape of the workload.

    Contenders are compared by the median call of a round, which a few interrupted calls do not move.
    """

    compared_by = LATENCY

    def points(self, workload: Workload, launcher: Launcher, machine: Machine) -> Sequence[Point]:
        places = launcher.place(machine)
        place = {"instances": len(places), "threads": places[0].threads}
        return [
            Point(part.draw(), len(places), places[0].threads, {**part.label, **place}) for part in workload.parts()
        ]

    def figure(self, sample: Mapping[str, Any]) -> float:
        return 1e9 / float(np.median(list(itertools.chain.from_iterable(sample["ns"]))))
