"""Figures of known records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from encast.loadtest import ClosedLoop, OpenLoop, Plan, Ramp, Result, Source
from encast.loadtest.records import ANSWERED, REJECTED, Records
from encast.loadtest.result import judge, second_line
from encast.loadtest.summary import summary_lines

MS = 1_000_000
SECOND = 1000 * MS


def streamed(rate: int, service_ms: float, seconds: float = 2.0, offset: int = 0) -> Records:
    """Regular arrivals at a server that takes one after the other."""
    records = Records()
    free = 0.0
    for number in range(round(rate * seconds)):
        due = offset + number * SECOND / rate
        free = max(free, due) + service_ms * MS
        records.add((round(due), round(due), round(free)), 0, 1, 7, ANSWERED)
    return records


@pytest.mark.parametrize(("rate", "served"), [(100, True), (200, True), (215, False), (400, False)])
@pytest.mark.parametrize("offset", [0, 7 * SECOND])
def test_a_rate_is_served_when_the_server_keeps_up(rate: int, served: bool, offset: int) -> None:
    """5 ms each: 200 a second and no more."""
    step = judge(streamed(rate, 5.0, offset=offset).since(0), rate, 2.0, offset, None)
    assert step.served is served
    assert step.answered_rate == pytest.approx(min(rate, 200), rel=0.02)


def test_a_slow_server_that_keeps_up_is_served() -> None:
    """Half a second each, all at once: that many answers come after the end of the step."""
    records = Records()
    for number in range(400):
        records.add((number * 5 * MS, number * 5 * MS, (number * 5 + 500) * MS), 0, 1, None, ANSWERED)
    step = judge(records.since(0), 200, 2.0, 0, None)
    assert step.served
    assert step.p99_ms == pytest.approx(500)
    assert not judge(records.since(0), 200, 2.0, 0, limit_ms=499).served
    assert judge(records.since(0), 200, 2.0, 0, limit_ms=501).served


def test_with_few_answers_the_largest_latency_counts() -> None:
    step = judge(streamed(10, 5.0).since(0), 10, 2.0, 0, 4.9)
    assert step.p99_ms == pytest.approx(5.0)
    assert not step.served
    assert not judge(Records().since(0), 10, 2.0, 0, None).served


def result(records: Records, **options: object) -> Result:
    made = Result(
        plan=Plan("http://x", [Source("t", ["a"])], OpenLoop([0], {"trace": "t", "seconds": 1.0})),
        model="m",
        columns=records.since(0),
        kinds=tuple(records.kinds),
        seconds=2.0,
        cpu_seconds=1.0,
        unfinished=0,
        distinct=1,
        retry_after=(),
        examples={},
        first_wrong="",
        steps=(),
        interrupted="",
    )
    return replace(made, **options)  # type: ignore[arg-type]


def mixed() -> Records:
    records = Records()
    for number in range(8):
        records.add((number * 250 * MS, number * 250 * MS, (number * 250 + 10) * MS), 0, 3, 30, ANSWERED)
    records.add((0, 0, 500 * MS), 0, 3, None, REJECTED)
    records.add((0, 0, 1500 * MS), 0, 3, None, records.error("HTTP 500"))
    records.add((0, 0, 1500 * MS), 0, 3, None, records.error("timeout"))
    records.add((0, 0, 1600 * MS), 0, 3, None, records.error("timeout"))
    return records


def test_only_what_was_answered_with_success_counts() -> None:
    found = result(mixed(), unfinished=2).to_json()
    assert found["requests"] == {"sent": 14, "answered": 8, "rejected": 1, "failed": 3, "unfinished": 2}
    assert found["texts"] == 24
    assert found["texts_per_s"] == 12
    assert found["requests_per_s"] == 4
    assert found["tokens_per_s"] == 120
    assert found["latency_ms"] == {"p50": 10.0, "p90": None, "p95": None, "p99": None, "p99_9": None, "max": 10.0}
    assert found["latency_samples_needed"] == {"p90": 29, "p95": 59, "p99": 299, "p99_9": 2995}
    assert found["rejected"]["latency_ms"]["max"] == 500.0
    assert found["errors"] == {"HTTP 500": 1, "timeout": 2}
    assert found["by_second"] == {
        "due": [8.0, 4.0],
        "texts": [12.0, 12.0],
        "rejected": [1.0, 0.0],
        "failed": [0.0, 3.0],
        "latency_ms_max": [10.0, 10.0],
    }


def test_nothing_at_all() -> None:
    found = result(Records())
    assert found.failed
    assert found.to_json()["texts_per_s"] == 0
    assert "0 requests, 0 texts answered" in next(summary_lines(found))
    assert second_line(3, Records().since(0), 4) == "   3 s, 0 texts, 4 in flight"


def test_a_line_says_only_real_inferences() -> None:
    assert second_line(12, mixed().since(0), 4) == (
        "  12 s, 24 texts, 4 in flight, p50 10.0 ms, most 10.0 ms, 1 rejected, 3 failed"
    )


def test_a_client_that_measures_itself_says_so() -> None:
    busy = result(mixed(), cpu_seconds=1.9)
    assert any("bottleneck: it used 95% of a core" in warning for warning in busy.warnings)
    assert result(mixed(), cpu_seconds=1.7).warnings == []


def test_loads_in_words() -> None:
    assert str(ClosedLoop(96, 128)) == "96 clients, 128 requests each"
    assert str(ClosedLoop(1, None, 2.5)) == "1 clients, 2.5 s"
    assert str(OpenLoop.poisson(20, 3)) == "20 a second, 3 s"
    assert str(Ramp(5, 50, 20)) == "5 to 50 a second, 10 steps of 2 s"
    assert Ramp(5, 50, 20).rates[::9] == [5, 50]
