"""Arrivals, traces, and latencies that count the wait."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encast.errors import InputError
from encast.measure.arrivals import Responses, poisson, read_trace, windows


def test_poisson_arrivals() -> None:
    """Gaps are exponential: their deviation is their mean; counts a second have the variance of their mean."""
    times = poisson(1000, 200, seed=1)
    gaps = np.diff(times) / 1e9
    assert len(times) == pytest.approx(200_000, rel=0.01)
    assert gaps.mean() == pytest.approx(0.001, rel=0.01)
    assert gaps.std() == pytest.approx(0.001, rel=0.02)
    assert np.mean(gaps > 0.003) == pytest.approx(math.exp(-3), rel=0.05)
    counts = np.bincount(np.asarray(times) // 1_000_000_000)
    assert counts.var() == pytest.approx(1000, rel=0.3)


def test_as_many_arrivals_as_the_rate_says() -> None:
    counts = {len(poisson(1000, 0.4, seed, exact=True)) for seed in range(8)}
    assert counts == {400}
    assert len({len(poisson(1000, 0.4, seed)) for seed in range(8)}) > 1
    assert poisson(1, 0.1, exact=True) == [100_000_000]


@given(st.floats(0.01, 500), st.floats(0.01, 3), st.integers(0, 9))
def test_arrivals_rise_within_the_time(rate: float, seconds: float, seed: int) -> None:
    times = poisson(rate, seconds, seed)
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= seconds * 1e9
    assert times == poisson(rate, seconds, seed)


@pytest.mark.parametrize(("rate", "seconds"), [(0, 1), (1, 0), (math.nan, 1), (math.inf, 1), (1e9, 1e9)])
def test_no_such_rate(rate: float, seconds: float) -> None:
    with pytest.raises(InputError):
        poisson(rate, seconds)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.txt", "1700000000.5\n1700000000.75\n\n1700000002.5\n"),
        ("t.log", "0\n0.25\n2\n"),
        ("t.csv", "seconds,path\n3,/a\n3.25,/b\n5,/c\n"),
        ("t.jsonl", '{"seconds": 3}\n{"seconds": 3.25}\n{"seconds": "5"}\n'),
    ],
)
def test_traces(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert read_trace(str(tmp_path / name)) == [0, 250_000_000, 2_000_000_000]


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("t.txt", "1\n2\nnoon\n", r"t\.txt:3: 'noon' is no time"),
        ("t.txt", "1\n3\n2\n", r"t\.txt:3: 2\.0 comes after 3\.0"),
        ("t.txt", "1\nnan\n", r"t\.txt:2: 'nan' is no time"),
        ("t.txt", "1\n1e999\n", r"t\.txt:2: "),
        ("t.jsonl", '{"seconds": 1}\n{"seconds": true}\n', r"t\.jsonl:2: 'True' is no time"),
        ("t.jsonl", '{"seconds": 1}\n{"secs": 2}\n', r"t\.jsonl:2: no field"),
        ("t.txt", "1\n", "1 arrivals; a trace needs at least 2"),
        ("t.csv", "at\n1\n2\n", "no column 'seconds'"),
    ],
)
def test_broken_traces_name_file_and_line(tmp_path: Path, name: str, text: str, reason: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=reason):
        read_trace(str(tmp_path / name))


def test_stretches_of_a_trace() -> None:
    second = 1_000_000_000
    trace = [0, second // 2, 2 * second, 2 * second + 5]
    assert windows(trace, 1.0) == [(0, [0, second // 2]), (2 * second, [0, 5])], "the empty second is passed over"


@pytest.mark.parametrize("count", [1, 2, 5, 9, 64, 1000, 3600])
def test_any_number_of_stretches_lies_evenly_over_a_trace(count: int) -> None:
    second = 1_000_000_000
    taken = [begin // second for begin, _ in windows([number * second for number in range(count)], 1.0)]
    assert sorted(taken) == list(range(count)), "each once"
    for some in range(1, count + 1):
        ends = [*sorted(taken[:some]), count]
        assert max(np.diff(ends)) <= max(1, 4 * count / some)


def test_the_begin_of_a_stream_is_left_out() -> None:
    responses = Responses.of([(0, 0, 5), (10, 10, 20), (30, 31, 40)])
    assert responses.after(10).latency.tolist() == [10, 10]
    assert responses.after(99).latency.tolist() == [5, 10, 10]
    with pytest.raises(InputError, match="no request"):
        Responses.of([])
