"""The production scenario: how many sequences a second under a latency limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from encast.bench.scenarios.base import Point
from encast.bench.scenarios.closed_loop import BURST_SECONDS, MOST_SECONDS, ClosedLoop, core_count, fits, make_points
from encast.bench.scenarios.scaling import OWN_DIVISION, divisors
from encast.errors import InputError
from encast.measure.fields import positive, whole_numbers
from encast.measure.statistics import FEWEST_ROUNDS, percent_name, percentile, samples_needed

if TYPE_CHECKING:
    from encast.bench.launcher import Launcher
    from encast.machine import Machine
    from encast.measure.workloads import Workload

__all__ = ["SloThroughput", "best_rows"]


class SloThroughput(ClosedLoop):
    """For each length, every division of the cores into instances with every batch size is a point.

    A point's throughput counts when the percentile of its latency keeps the limit; the best of those that do is a
    system's answer for the length (``best_rows``). The percentile is an estimate, interpolated between the calls of
    all rounds, for p99 of 299 or more: a point whose true percentile lies at the limit passes about half of the time,
    and the best of several flatters a little. More ``timing.seconds`` make it more certain.

    "Fast DistilBERT on CPUs" (arXiv 2211.07715) has 10 ms and lengths 16, 32, ..., 128 (``workload=production``).
    Requests are sent as fast as they are answered, which says what the machine can do; how long they wait when they
    come by chance says the scenario ``open_loop``.
    """

    instead: ClassVar[Mapping[str, str]] = {**OWN_DIVISION, "workload.batch": "scenario.batch=N"}

    def __init__(
        self,
        limit_ms: float = 10.0,
        percent: float = 99.0,
        batch: Any = (1, 2, 4, 8, 16),
        instances: Any = None,
        seconds: float = BURST_SECONDS,
    ) -> None:
        """``limit_ms`` of the percentile ``percent``. ``instances``: by default all numbers that divide the cores.
        ``seconds`` of a burst, at the least: 5 bursts hold enough calls within the limit to know the percentile."""
        super().__init__(seconds)
        self.limit_ms = positive("scenario.limit_ms", limit_ms, most=10_000)
        self.percent = positive("scenario.percent", percent, most=99.99)
        # Whoever keeps the limit answers so often in a few rounds that the percentile is known.
        calls = samples_needed(self.percent)
        self.seconds = max(self.seconds, calls * self.limit_ms / 1e3 / FEWEST_ROUNDS)
        if self.seconds > MOST_SECONDS:
            raise InputError(
                f"scenario.limit_ms={self.limit_ms:g} with scenario.percent={self.percent:g}: the percentile needs "
                f"{calls:,} calls, which may take {self.seconds:,.0f} s of each of {FEWEST_ROUNDS} rounds, and a round "
                f"has at most {MOST_SECONDS} s; give a lower percent (299 calls tell p99) or limit"
            )
        self.batch = whole_numbers("scenario.batch", batch)
        self.instances = None if instances is None else whole_numbers("scenario.instances", instances)

    def points(self, workload: Workload, launcher: Launcher, machine: Machine) -> Sequence[Point]:
        cores = core_count(launcher, machine)
        splits = [(count, cores // count) for count in self.instances or divisors(cores) if cores // count]
        splits = [split for split in splits if fits(launcher, machine, *split)]
        if not splits:
            raise InputError(f"none of scenario.instances={self.instances} fits the {cores} cores")
        return make_points(workload, splits, sorted(self.batch))

    def summarise(self, point: Point, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        calls = [time / 1e6 for sample in samples for times in sample["ns"] for time in times]
        latency = percentile(calls, self.percent)
        met: bool | None = None if latency is None else latency <= self.limit_ms
        if met is None and sorted(calls)[len(calls) // 2] > self.limit_ms:
            met = False  # even the median is above the limit; the percentile itself stays unknown
        metrics = super().summarise(point, samples)
        name = percent_name(self.percent)
        return {
            **metrics,
            "slo": {"limit_ms": self.limit_ms, "percentile": name, "latency_ms": latency, "met": met},
            "sequences_per_s_within_slo": metrics["sequences_per_s"] if met else None,
        }


def best_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of the rows of this scenario, for each model, backend, length and limit the one with the most sequences a second
    within the limit; where none keeps it, the one with the least latency, whose ``sequences_per_s_within_slo`` is null.

    What else a row's point holds, but for the set-up, divides the rows likewise.
    """

    def rank(row: Mapping[str, Any]) -> tuple[float, float]:
        within = row["metrics"].get("sequences_per_s_within_slo")
        return (within or 0.0, -float(row["metrics"]["latency_ms"]["mean"]))

    best: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for row in rows:
        if row.get("status") != "ok" or row.get("scenario") != "slo_throughput":
            continue
        shape = {key: value for key, value in row["point"].items() if key not in ("batch", "instances", "threads")}
        slo = row["metrics"].get("slo") or {}
        limit = (slo.get("limit_ms"), slo.get("percentile"))
        key = (row["model"]["name"], row["backend"]["name"], *limit, *sorted(shape.items()))
        if key not in best or rank(row) > rank(best[key]):
            best[key] = row
    return list(best.values())
