"""Latency limits as they are written on the command line and in files."""

from __future__ import annotations

from typing import Any

import pytest

from encast.errors import InputError
from encast.tune.slo import Slo


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("p99=10ms", Slo(99, 10)),
        (" P95 = 0.2s ", Slo(95, 200)),
        ("p99.9=800us", Slo(99.9, 0.8)),
        ("p99_9=1ms", Slo(99.9, 1)),
        ("none", None),
    ],
)
def test_parse(text: str, expected: Slo | None) -> None:
    found = Slo.parse(text)
    assert found == expected or (
        found is not None and expected is not None and found.limit_ms == pytest.approx(expected.limit_ms)
    )


@pytest.mark.parametrize(
    "text",
    ["", "10ms", "p99", "p99=10", "p99=-1ms", "p100=1ms", "p0=1ms", "p99=0ms", "p99=99999s", "p99=nanms", "p9999=1s"],
)
def test_what_is_no_limit(text: str) -> None:
    with pytest.raises(InputError, match=r"--slo"):
        Slo.parse(text)


def test_json() -> None:
    for slo in (Slo(99, 10), Slo(99.9, 0.5), Slo(50, 3)):
        assert Slo.from_json(slo.to_json(), "here") == slo
    assert Slo(99.9, 10).to_json() == {"p99_9_ms": 10}
    assert Slo.from_json(None, "here") is None


@pytest.mark.parametrize(
    "document",
    [5, [], {}, {"p99": 10}, {"p99_ms": "10"}, {"p99_ms": True}, {"p99_ms": 1, "p95_ms": 1}, {"p99_ms": float("nan")}],
)
def test_json_that_is_none(document: Any) -> None:
    with pytest.raises(InputError, match="here"):
        Slo.from_json(document, "here")
