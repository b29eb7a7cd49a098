"""Multi-instance scaling: more and more instances, each on cores of its own and with work of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from encast.bench.scenarios.base import Point
from encast.bench.scenarios.closed_loop import BURST_SECONDS, OWN_DIVISION, ClosedLoop, core_count, doubling, fits
from encast.errors import InputError
from encast.measure.fields import whole_number, whole_numbers

if TYPE_CHECKING:
    from encast.bench.launcher import Launcher
    from encast.machine import Machine
    from encast.measure.workloads import Workload

__all__ = ["InstanceScaling"]


class InstanceScaling(ClosedLoop):
    """Throughput by ``instances``; ideal is that n instances give n times what one gives (``scaling.ideal``)."""

    instead: ClassVar[Mapping[str, str]] = {**OWN_DIVISION, "launcher.cores_per_instance": "scenario.threads=N"}

    def __init__(self, threads: int = 1, instances: Any = None, seconds: float = BURST_SECONDS) -> None:
        """``threads``: cores of each instance. ``instances``: how many; by default 1, 2, 4, ... and as many as fit."""
        super().__init__(seconds)
        self.threads = whole_number("scenario.threads", threads)
        self.instances = None if instances is None else whole_numbers("scenario.instances", instances)

    def points(self, workload: Workload, launcher: Launcher, machine: Machine) -> Sequence[Point]:
        if self.instances is not None:
            for instances in self.instances:
                launcher.place(machine, instances=instances, threads=self.threads)  # raises where they do not fit
        most = core_count(launcher, machine) // self.threads
        counts = self.instances or [count for count in doubling(most) if fits(launcher, machine, count, self.threads)]
        if not counts:
            if launcher.smt:
                launcher.place(machine, instances=1, threads=self.threads)  # says which numbers whole cores have
            raise InputError(f"no instance of {self.threads} cores fits this machine; give a smaller scenario.threads")
        return [
            Point(part.draw(), instances, self.threads, {**part.label, "instances": instances, "threads": self.threads})
            for instances in sorted(counts)
            for part in workload.parts()
        ]
