"""What a load test found: figures, warnings, and what they rest on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from encast.loadtest.plan import ClosedLoop, Plan
from encast.loadtest.records import ANSWERED, REJECTED, WRONG, Columns
from encast.measure.statistics import PERCENTS, Array, percent_name, percentile, percentiles, samples_needed

__all__ = ["Result", "Step", "judge", "latency_ms", "second_line"]

SERVED = 0.95
"""The share of a step's requests that must be answered in time."""

_FULL = 0.9
"""Of a core: a client that uses more measures itself."""


@dataclass(frozen=True)
class Step:
    """A step of a ramp. Rates are requests a second. ``p99_ms``: the largest latency where there are too few answers to
    know a p99, None without any."""

    rate: float
    answered_rate: float
    rejected: int
    failed: int
    p50_ms: float | None
    p99_ms: float | None
    served: bool

    def line(self) -> str:
        known = "" if self.p99_ms is None else f", p99 {self.p99_ms:,.1f} ms"
        word = "served" if self.served else "not served"
        return f"{self.rate:,.1f} a second: answered {self.answered_rate:,.1f}{known}: {word}"


def judge(found: Columns, rate: float, seconds: float, offset: int, limit_ms: float | None) -> Step:
    """Of the requests of one step, which began ``offset`` nanoseconds after the test.

    In time is an answer that comes before the step's end, or later by no more than the median latency of its first ten
    requests, which found hardly a queue: only what a queue delays is late.
    """
    answered = found.of(ANSWERED)
    latency = answered.responses.latency
    early = latency[np.argsort(answered.due, kind="stable")][:10]
    end = offset + seconds * 1e9 + (float(np.median(early)) if early.size else 0.0)
    in_time = int((answered.ended <= end).sum())
    known = percentile(latency, 99.0)
    p99 = (known if known is not None else float(latency.max())) / 1e6 if latency.size else None
    served = in_time >= SERVED * len(found) and p99 is not None and (limit_ms is None or p99 <= limit_ms)
    return Step(
        rate=rate,
        answered_rate=in_time / seconds,
        rejected=len(found.of(REJECTED)),
        failed=int((found.outcome >= WRONG).sum()),
        p50_ms=float(np.median(latency)) / 1e6 if latency.size else None,
        p99_ms=p99,
        served=served,
    )


def second_line(second: int, new: Columns, in_flight: int) -> str:
    """What ended within a second; texts are those that were answered with success."""
    answered = new.of(ANSWERED)
    parts = [f"{second:4d} s", f"{int(answered.texts.sum()):,} texts", f"{in_flight:,} in flight"]
    if len(answered):
        ms = answered.responses.latency / 1e6
        parts.append(f"p50 {np.median(ms):,.1f} ms, most {ms.max():,.1f} ms")
    rejected, failed = int((new.outcome == REJECTED).sum()), int((new.outcome >= WRONG).sum())
    parts += [f"{rejected:,} rejected"] * bool(rejected) + [f"{failed:,} failed"] * bool(failed)
    return ", ".join(parts)


def latency_ms(found: Columns) -> dict[str, float | None]:
    """``percentiles`` and ``max`` in milliseconds; None where there are too few requests to know one."""
    ms: Array = found.responses.latency / 1e6
    return {**percentiles(ms), "max": float(ms.max()) if ms.size else None}


@dataclass(frozen=True)
class Result:
    """``columns``: every request that has an end. ``kinds``: names of their outcomes. ``seconds``: until the last one
    ended. ``cpu_seconds``: of this process. ``distinct``: different requests that were sent in turn."""

    plan: Plan
    model: str
    columns: Columns
    kinds: Sequence[str]
    seconds: float
    cpu_seconds: float
    unfinished: int
    distinct: int
    retry_after: Sequence[int]
    examples: Mapping[str, str]
    first_wrong: str
    steps: Sequence[Step]
    interrupted: str

    @property
    def answered(self) -> Columns:
        """With success, and not wrong."""
        return self.columns.of(ANSWERED)

    @property
    def errors(self) -> dict[str, int]:
        """Requests by kind of error, wrong answers included, rejections not."""
        counts = np.bincount(self.columns.outcome, minlength=len(self.kinds))
        return {kind: int(count) for kind, count in list(zip(self.kinds, counts, strict=True))[WRONG:] if count}

    @property
    def failed(self) -> bool:
        """Whether a request failed or was answered wrongly, or none was answered at all. Rejections are no failure."""
        return bool(self.errors) or not len(self.answered)

    @property
    def served_rate(self) -> float | None:
        """The highest rate of a ramp that was served; None without a ramp, or where none was."""
        return max((step.rate for step in self.steps if step.served), default=None)

    @property
    def core_share(self) -> float:
        """Of one core, which the client used: it cannot use more."""
        return self.cpu_seconds / self.seconds if self.seconds else 0.0

    @property
    def closed(self) -> bool:
        return isinstance(self.plan.load, ClosedLoop)

    @property
    def warnings(self) -> list[str]:
        found = []
        if self.core_share > _FULL:
            found.append(
                f"the client itself was the bottleneck: it used {self.core_share:.0%} of a core; the server can do more"
            )
        if self.closed:
            found.append(
                "a closed loop hides stalls: while the server stalls, its clients send nothing; an open loop (--rate) "
                "shows what users would feel"
            )
        elif self.unsent_ms["max"] is not None and len(self.answered):
            late, most = self.unsent_ms["p50"], latency_ms(self.answered)["p50"]
            if late is not None and most is not None and late > most / 4:
                found.append(
                    f"requests left {late:,.1f} ms late at the median: the client had no free connection "
                    f"({self.plan.connections:,}) or too little of a processor; latencies count that time"
                )
        if self.interrupted:
            found.append(f"ended early by {self.interrupted}; {self.unfinished:,} requests had no answer yet")
        return found

    @property
    def unsent_ms(self) -> dict[str, float | None]:
        """From the time at which a request was due until it was sent."""
        ms: Array = self.columns.responses.wait / 1e6
        return {**percentiles(ms), "max": float(ms.max()) if ms.size else None}

    def rates(self) -> dict[str, float | None]:
        """Answered requests, texts and tokens a second; tokens are None where the server does not say."""
        answered = self.answered
        span = self.seconds or float("inf")
        tokens = answered.tokens
        known = bool(len(tokens)) and bool((tokens >= 0).all())
        return {
            "requests_per_s": len(answered) / span,
            "texts_per_s": float(answered.texts.sum()) / span,
            "tokens_per_s": float(tokens.sum()) / span if known else None,
        }

    def by_second(self) -> dict[str, list[float]]:
        """Of every second: requests that were due, texts answered, rejected and failed requests, and the largest
        latency in ms of those that were answered (0 without any)."""
        columns, answered = self.columns, self.answered
        count = int(columns.ended.max() // 1_000_000_000) + 1 if len(columns) else 0

        def per(times: Any, weights: Any = None) -> list[float]:
            return [float(one) for one in np.bincount(times // 1_000_000_000, weights, minlength=count)]

        most = np.zeros(count)
        np.maximum.at(most, answered.ended // 1_000_000_000, answered.responses.latency / 1e6)
        return {
            "due": per(columns.due),
            "texts": per(answered.ended, answered.texts),
            "rejected": per(columns.of(REJECTED).ended),
            "failed": per(columns.where(columns.outcome >= WRONG).ended),
            "latency_ms_max": [float(one) for one in most],
        }

    def by_source(self) -> dict[str, dict[str, Any]]:
        answered = self.answered
        found = {}
        for number, source in enumerate(self.plan.sources):
            own = answered.where(answered.source == number)
            found[source.name] = {
                "answered": len(own),
                "texts": int(own.texts.sum()),
                "latency_ms": latency_ms(own),
            }
        return found

    def to_json(self) -> dict[str, Any]:
        """One document: everything of it, in milliseconds, seconds and counts."""
        plan, columns, answered, rejected = self.plan, self.columns, self.answered, self.columns.of(REJECTED)
        return {
            "url": plan.url,
            "protocol": plan.protocol,
            "model": self.model or None,
            "load": plan.load.describe(),
            "batch": plan.batch,
            "sources": [{"name": source.name, "rows": len(source.rows)} for source in plan.sources],
            "distinct_requests": self.distinct,
            "latency_from": "send" if self.closed else "due",
            "seconds": self.seconds,
            "requests": {
                "sent": len(columns) + self.unfinished,
                "answered": len(answered),
                "rejected": len(rejected),
                "failed": sum(self.errors.values()),
                "unfinished": self.unfinished,
            },
            "texts": int(answered.texts.sum()),
            **self.rates(),
            "latency_ms": latency_ms(answered),
            "latency_samples_needed": {
                percent_name(percent): samples_needed(percent)
                for percent in PERCENTS
                if len(answered) < samples_needed(percent)
            },
            "by_source": self.by_source(),
            "rejected": {
                "latency_ms": latency_ms(rejected),
                "retry_after_s": [min(self.retry_after), max(self.retry_after)] if self.retry_after else None,
            },
            "errors": self.errors,
            "error_examples": dict(self.examples),
            "first_wrong": self.first_wrong or None,
            "unsent_ms": None if self.closed else self.unsent_ms,
            "client": {"cpu_seconds": self.cpu_seconds, "core_share": self.core_share},
            "by_second": self.by_second(),
            "steps": [vars(step) for step in self.steps],
            "served_rate": self.served_rate,
            "interrupted": self.interrupted or None,
            "warnings": self.warnings,
        }
