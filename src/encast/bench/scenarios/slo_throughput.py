"""The production scenario: how many sequences a second under a latency limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from encast.bench.scenarios.base import Point
from encast.bench.scenarios.closed_loop import BURST_SECONDS, MOST_SECONDS
from encast.bench.scenarios.max_throughput import MaxThroughput
from encast.errors import InputError
from encast.measure.fields import positive
from encast.measure.statistics import FEWEST_ROUNDS, percent_name, percentile, samples_needed

__all__ = ["SloThroughput"]


class SloThroughput(MaxThroughput):
    """Only points whose latency keeps a limit count.

    A point's throughput counts when the percentile of its latency keeps the limit; the best of those that do is a
    system's answer for the length (``max_throughput.best_rows``). The percentile is an estimate, interpolated between
    the calls of all rounds, for p99 of 299 or more: a point whose true percentile lies at the limit passes about half
    of the time, and the best of several flatters a little. More ``timing.seconds`` make it more certain.

    "Fast DistilBERT on CPUs" (arXiv 2211.07715) has 10 ms and lengths 16, 32, ..., 128 (``workload=production``).
    Requests are sent as fast as they are answered, which says what the machine can do; how long they wait when they
    come by chance says the scenario ``open_loop``.
    """

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
        super().__init__(batch, instances, seconds)
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
