"""Strong scaling: the same work on more and more cores, by one instance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from encast.bench.scenarios.base import Point
from encast.bench.scenarios.closed_loop import BURST_SECONDS, OWN_DIVISION, ClosedLoop, core_count, doubling, fits
from encast.errors import InputError
from encast.measure.fields import whole_numbers

if TYPE_CHECKING:
    from encast.bench.launcher import Launcher
    from encast.machine import Machine
    from encast.measure.workloads import Workload

__all__ = ["CoreScaling"]


class CoreScaling(ClosedLoop):
    """Latency by ``threads``; ideal is that twice the cores take half the time (``scaling.ideal``).

    As the section on core count scaling of "Scaling up BERT-like model inference on modern CPU", part 1, which has
    batch 1 and lengths 32, 128 and 512.
    """

    instead: ClassVar[Mapping[str, str]] = dict.fromkeys(
        OWN_DIVISION, "scenario.threads=N, of one instance, as far as launcher.core_list and launcher.nodes have cores"
    )

    def __init__(self, threads: Any = None, seconds: float = BURST_SECONDS) -> None:
        """``threads``: numbers of cores; by default 1, 2, 4, ... and all that the launcher has, as far as they fit."""
        super().__init__(seconds)
        self.threads = None if threads is None else whole_numbers("scenario.threads", threads)

    def points(self, workload: Workload, launcher: Launcher, machine: Machine) -> Sequence[Point]:
        most = core_count(launcher, machine)
        if self.threads is not None:
            for threads in self.threads:
                launcher.place(machine, instances=1, threads=threads)  # raises where it does not fit
        counts = self.threads or [count for count in doubling(most) if fits(launcher, machine, 1, count)]
        if not counts:
            raise InputError("no number of cores fits this machine; name some with scenario.threads=[1,2]")
        return [
            Point(part.draw(), 1, threads, {**part.label, "instances": 1, "threads": threads})
            for threads in sorted(counts)
            for part in workload.parts()
        ]
