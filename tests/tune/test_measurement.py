"""Measurements and trials survive JSON; the front holds what nothing beats."""

from __future__ import annotations

import json
from typing import Any

import pytest

from encast.backends.groups import InstanceGroup, Setup
from encast.errors import InputError
from encast.tune.measurement import Measurement, Trial, pareto_front


def trial(instances: int, rate: float, latency: float | None, memory: int | None = 100, **other: Any) -> Trial:
    return Trial(
        Setup((InstanceGroup(instances, 1),), 512),
        Measurement(rate, rate, {"p99": latency}, memory_bytes=memory, **other),
        "test",
    )


def test_json_and_back() -> None:
    one = trial(3, 120.5, None, None, noise="a neighbour", failed=None, requests=7, excess=1.5, seconds=0.25)
    assert Trial.from_json(json.loads(json.dumps(one.to_json(1.25)))) == one
    assert one.to_json(1.25)["usd_per_million"] == 1.25
    assert one.to_json()["cores"] == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [("sequences_per_s", "x"), ("sequences_per_s", float("nan")), ("latency_ms", 3), ("requests", None), ("setup", {})],
)
def test_damaged_trials_are_refused(field: str, value: Any) -> None:
    document = {**trial(1, 1.0, 2.0).to_json(), field: value}
    with pytest.raises(InputError):
        Trial.from_json(document)
    with pytest.raises(InputError):
        Trial.from_json({})


def test_the_nearer_to_the_limit_the_greater_the_score() -> None:
    scores = [Measurement(0, 5, excess=3).score, Measurement(0, 5, excess=1.2).score, Measurement(1, 5).score]
    assert scores == sorted(scores)


def test_front() -> None:
    fast, lean, quick = trial(8, 1000, 9.0, 900), trial(1, 200, 5.0, 100), trial(4, 800, 3.0, 500)
    beaten = trial(3, 700, 4.0, 600)
    failed, late = trial(2, 5000, 1.0, failed="crashed"), trial(5, 0.0, 50.0)
    assert pareto_front([beaten, lean, failed, fast, late, quick], "p99") == [fast, quick, lean]
    assert pareto_front([], "p99") == []
    # Equals stay, unknown latency counts as the worst, and of several trials of a set-up the median one stands for all.
    assert len(pareto_front([trial(1, 10, 1.0), trial(2, 10, 1.0)], "p99")) == 2
    assert pareto_front([trial(1, 10, None), trial(2, 10, 1.0)], "p99") == [trial(2, 10, 1.0)]
    assert pareto_front([trial(1, rate, 1.0) for rate in (30.0, 10.0, 20.0)], "p99") == [trial(1, 20.0, 1.0)]
