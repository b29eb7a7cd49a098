"""Percentiles, intervals and ratios against distributions whose answers are known."""

from __future__ import annotations

import math
import statistics as standard

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encast.errors import InputError
from encast.measure.statistics import (
    FEWEST_ROUNDS,
    bootstrap,
    latency_metrics,
    median_interval,
    percent_name,
    percentile,
    percentiles,
    ratio_interval,
    samples_needed,
)

finite = st.floats(1e-3, 1e6)


def test_samples_that_a_percentile_needs() -> None:
    assert [samples_needed(percent) for percent in (50, 90, 95, 99, 99.9)] == [5, 29, 59, 299, 2995]


@given(st.floats(1, 99.99), st.floats(0.5, 0.999))
def test_so_many_samples_and_not_one_fewer(percent: float, confidence: float) -> None:
    """The chance that the largest of n lies above the percentile is 1 - p^n."""
    count = samples_needed(percent, confidence)
    assert 1 - (percent / 100) ** count >= confidence - 1e-6
    assert count == 1 or 1 - (percent / 100) ** (count - 1) < confidence


def test_too_few_samples_are_no_percentile() -> None:
    values = list(range(2994))
    found = percentiles(values)
    assert found["p99_9"] is None
    assert found["p99"] is not None
    assert percentiles([*values, 2994.0])["p99_9"] == pytest.approx(0.999 * 2994)


@pytest.mark.parametrize("percent", [0, 100, -1, 101])
def test_no_such_percentile(percent: float) -> None:
    with pytest.raises(InputError, match="ends excluded"):
        samples_needed(percent)


def test_percentiles_of_known_distributions() -> None:
    rng = np.random.default_rng(3)
    uniform, exponential = rng.uniform(0, 1, 200_000), rng.exponential(2.0, 200_000)
    for percent in (50.0, 90.0, 95.0, 99.0, 99.9):
        share = percent / 100
        assert percentile(uniform, percent) == pytest.approx(share, abs=0.004)
        assert percentile(exponential, percent) == pytest.approx(-2 * math.log(1 - share), rel=0.04)


@given(st.lists(finite, min_size=5, max_size=60))
def test_percentiles_are_ordered_and_within_the_samples(values: list[float]) -> None:
    found = [value for value in percentiles(values).values() if value is not None]
    assert found == sorted(found)
    assert min(values) <= found[0] <= found[-1] <= max(values)
    assert found[0] == pytest.approx(standard.median(values))


def test_names() -> None:
    assert [percent_name(percent) for percent in (50, 99.0, 99.9)] == ["p50", "p99", "p99_9"]


@pytest.mark.parametrize("rounds", [5, 8, 20])
def test_the_mean_of_normal_rounds_lies_in_19_of_20_intervals(rounds: int) -> None:
    """Hesterberg's widening is what keeps few rounds near 95 %: without it, 5 rounds come to 82 %."""
    rng = np.random.default_rng(11)
    hits = 0
    for trial in range(120):
        low, high = bootstrap(list(rng.normal(7, 2, rounds)), lambda values: float(values.mean()), trial) or (9, 9)
        hits += low <= 7 <= high
    assert 0.89 <= hits / 120 <= 0.99


def test_the_median_of_skewed_rounds_lies_in_19_of_20_intervals() -> None:
    rng = np.random.default_rng(12)
    hits = 0
    for trial in range(200):
        low, high = median_interval(rng.exponential(1, 10), trial) or (9, 9)
        hits += low <= math.log(2) <= high
    assert 0.91 <= hits / 200 <= 0.995


def test_rounds_are_resampled_and_not_calls() -> None:
    """A thousand calls in each of five rounds that differ: the interval is as wide as the rounds are apart."""
    rng = np.random.default_rng(0)
    rounds = [rng.normal(center, 0.01, 1000) for center in (1.0, 1.1, 1.2, 1.3, 1.4)]
    low, high = bootstrap(rounds, lambda values: float(np.median(values))) or (0, 0)
    assert high - low > 0.2
    calls = bootstrap(list(np.concatenate(rounds)), lambda values: float(np.median(values))) or (0, 9)
    assert calls[1] - calls[0] < 0.1


def test_intervals_are_the_same_for_the_same_seed() -> None:
    values = [1.0, 2.0, 4.0, 3.0, 2.5]
    assert median_interval(values, 4) == median_interval(values, 4)
    assert bootstrap(values, lambda values: float(values.mean()), 1) != bootstrap(
        values, lambda values: float(values.mean()), 2
    )


def test_few_rounds_have_no_interval() -> None:
    few = [1.0, 2.0, 3.0, 4.0]
    assert len(few) < FEWEST_ROUNDS
    assert median_interval(few) is None
    assert bootstrap(few, lambda values: float(values.mean())) is None
    assert median_interval([*few, 5.0]) == (1.0, 5.0)


def test_ratios_are_paired_by_round() -> None:
    """A slow spell that hits both in a round says nothing about their ratio."""
    spells = np.array([1.0, 3.0, 1.0, 5.0, 1.0, 1.0, 2.0, 4.0])
    found = ratio_interval(2.0 * spells, spells)
    assert (found.ratio, found.low, found.high) == (2.0, 2.0, 2.0)
    rng = np.random.default_rng(5)
    noisy = ratio_interval(spells * rng.normal(1.5, 0.02, 8), spells)
    assert noisy.low is not None
    assert noisy.high is not None
    assert noisy.low < 1.5 < noisy.high < noisy.low * 1.1


@given(st.lists(st.tuples(finite, finite), min_size=3, max_size=12))
def test_a_ratio_upside_down_is_its_reciprocal(pairs: list[tuple[float, float]]) -> None:
    """Exactly for an odd number of rounds, whose median is one of them."""
    pairs = pairs[: len(pairs) - 1 + len(pairs) % 2]
    a, b = zip(*pairs, strict=True)
    assert ratio_interval(a, b).ratio == pytest.approx(1 / ratio_interval(b, a).ratio)


def test_the_interval_of_very_many_calls_is_that_of_all() -> None:
    rng = np.random.default_rng(8)
    rounds = [rng.exponential(1e6 * center, 20_000) for center in (1.0, 1.2, 0.9, 1.1, 1.0, 1.3)]
    low, high = latency_metrics(rounds)["latency_ms_interval"]
    whole = bootstrap([values / 1e6 for values in rounds], lambda values: float(np.median(values)))
    assert whole is not None
    assert (low, high) == pytest.approx(whole, rel=0.01)


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        ([1.0, 2.0], [1.0], "paired by round"),
        ([], [], "paired by round"),
        ([1.0], [0.0], "not above 0"),
        ([math.nan], [1.0], "not above 0"),
    ],
)
def test_what_has_no_ratio(a: list[float], b: list[float], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        ratio_interval(a, b)


def test_latency_fields() -> None:
    found = latency_metrics([[1e6, 2e6, 3e6], [2e6, 2e6, 2e6], [1e6, 3e6, 2e6], [2e6, 3e6, 1e6], [2e6]])
    assert found["latency_ms"]["mean"] == pytest.approx(2.0)
    assert found["latency_ms"]["p50"] == 2.0
    assert found["latency_ms"]["p99"] is None
    assert found["latency_ms_interval"] == (2.0, 2.0)
    assert found["latency_samples"] == 13
    assert found["latency_samples_needed"] == {"p90": 29, "p95": 59, "p99": 299, "p99_9": 2995}
    with pytest.raises(InputError, match="no call was timed"):
        latency_metrics([[], []])
