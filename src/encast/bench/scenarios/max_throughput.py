"""The most sequences a second that the machine can be brought to, by any batch and any division of its cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from encast.bench.scenarios.base import Point
from encast.bench.scenarios.closed_loop import BURST_SECONDS, ClosedLoop, core_count, fits, make_points
from encast.bench.scenarios.scaling import OWN_DIVISION, divisors
from encast.errors import InputError
from encast.measure.fields import whole_numbers

if TYPE_CHECKING:
    from encast.bench.launcher import Launcher
    from encast.machine import Machine
    from encast.measure.workloads import Workload

__all__ = ["BEST_OF_SET_UPS", "MaxThroughput", "best_rows"]

BEST_OF_SET_UPS = ("max_throughput", "slo_throughput")
"""Scenarios whose points are set-ups to choose from, by the names of their YAML."""


class MaxThroughput(ClosedLoop):
    """For each length, every division of the cores into instances with every batch size is a point.

    The best of them is a system's answer for the length (``best_rows``). How long a call takes does not count.
    """

    instead: ClassVar[Mapping[str, str]] = {**OWN_DIVISION, "workload.batch": "scenario.batch=N"}

    def __init__(self, batch: Any = (1, 8, 32), instances: Any = None, seconds: float = BURST_SECONDS) -> None:
        """``batch``: sequences of a call; ``instances``: by default all numbers that divide the cores; one number or
        several. ``seconds`` of a burst."""
        super().__init__(seconds)
        self.batch = whole_numbers("scenario.batch", batch)
        self.instances = None if instances is None else whole_numbers("scenario.instances", instances)

    def points(self, workload: Workload, launcher: Launcher, machine: Machine) -> Sequence[Point]:
        cores = core_count(launcher, machine)
        splits = [(count, cores // count) for count in self.instances or divisors(cores) if cores // count]
        splits = [split for split in splits if fits(launcher, machine, *split)]
        if not splits:
            raise InputError(f"none of scenario.instances={self.instances} fits the {cores} cores")
        return make_points(workload, splits, sorted(self.batch))


def best_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of the rows of ``BEST_OF_SET_UPS``, for each scenario, model, backend, length and limit the best set-up's.

    That is the one with the most sequences a second, under a limit of those that keep it. Where none keeps it, it is
    the one with the least latency, whose ``sequences_per_s_within_slo`` is null. What else a row's point holds, but for
    the set-up, divides the rows likewise.
    """

    def rank(row: Mapping[str, Any]) -> tuple[float, float]:
        limited = row["scenario"] == "slo_throughput"
        rate = row["metrics"].get("sequences_per_s_within_slo" if limited else "sequences_per_s")
        return (rate or 0.0, -float(row["metrics"]["latency_ms"]["mean"]))

    best: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for row in rows:
        if row.get("status") != "ok" or row.get("scenario") not in BEST_OF_SET_UPS:
            continue
        shape = {key: value for key, value in row["point"].items() if key not in ("batch", "instances", "threads")}
        slo = row["metrics"].get("slo") or {}
        limit = (slo.get("limit_ms"), slo.get("percentile"))
        key = (row["scenario"], row["model"]["name"], row["backend"]["name"], *limit, *sorted(shape.items()))
        if key not in best or rank(row) > rank(best[key]):
            best[key] = row
    return list(best.values())
