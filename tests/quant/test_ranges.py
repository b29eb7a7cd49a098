"""Histograms, and the ranges that are chosen from them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from encast.errors import InputError
from encast.quant import Calibration, QuantSpec
from encast.quant.calibration import Observed
from encast.quant.ranges import BINS, Histogram, fixed_point, least_divergence, range_of


def histogram_of(values: np.ndarray) -> Histogram:
    histogram = Histogram()
    histogram.add(values)
    return histogram


class TestHistogram:
    def test_the_order_and_the_parts_do_not_matter(self) -> None:
        random = np.random.default_rng(0)
        parts = [random.standard_normal(1000) * size for size in (0.01, 30.0, 1.0, 5.0)]
        whole = histogram_of(np.concatenate(parts))
        for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2)):
            histogram = Histogram()
            for index in order:
                histogram.add(parts[index])
            assert histogram.reach == whole.reach
            np.testing.assert_array_equal(histogram.counts, whole.counts)

    def test_counts_are_those_of_numpy(self) -> None:
        values = np.random.default_rng(1).standard_normal((50, 40)) * 3
        histogram = histogram_of(values)
        wanted, _ = np.histogram(values, histogram.edges())
        np.testing.assert_array_equal(histogram.counts, wanted)
        assert np.log2(histogram.reach) == np.rint(np.log2(histogram.reach))
        assert histogram.reach / 2 < np.abs(values).max() <= histogram.reach

    def test_zeros_and_the_last_bin(self) -> None:
        histogram = histogram_of(np.zeros(5))
        histogram.add(np.array([2.0, -2.0]))
        assert histogram.reach == 2.0
        assert histogram.counts.sum() == 7
        assert histogram.counts[[0, BINS // 2, -1]].tolist() == [1, 5, 1]


class TestRanges:
    def test_minmax_is_the_extremes(self) -> None:
        assert range_of(histogram_of(np.array([-1.0, 3.0])), -1.0, 3.0, "minmax", 99.99) == (-1.0, 3.0)

    @pytest.mark.parametrize("percentile", [99.0, 99.9, 90.0])
    def test_a_percentile_keeps_that_share(self, percentile: float) -> None:
        values = np.random.default_rng(2).standard_normal(200_000)
        low, high = range_of(histogram_of(values), values.min(), values.max(), "percentile", percentile)
        inside = 100 * ((values >= low) & (values <= high)).mean()
        assert percentile <= inside < percentile + 0.2
        wanted = np.percentile(values, [(100 - percentile) / 2, 50 + percentile / 2])
        np.testing.assert_allclose([low, high], wanted, atol=0.02)

    def test_a_percentile_lies_within_the_extremes(self) -> None:
        values = np.concatenate([np.linspace(-0.17, 5.0, 10_000), [40.0]])
        low, high = range_of(histogram_of(values), -0.17, 40.0, "percentile", 99.9)
        assert low == pytest.approx(-0.17, abs=0.02)
        assert 4.9 < high < 5.1
        assert range_of(histogram_of(values), -0.17, 40.0, "percentile", 100.0) == (-0.17, 40.0)

    def test_entropy_cuts_a_long_thin_tail_and_keeps_what_is_even(self) -> None:
        random = np.random.default_rng(3)
        bulk = random.standard_normal(100_000)
        low, high = range_of(histogram_of(np.append(bulk, [100.0, -90.0])), -90.0, 100.0, "entropy", 0.0)
        assert 3.0 < high < 20.0
        assert low == -high
        even = random.uniform(-1.0, 1.0, 100_000)
        assert least_divergence(histogram_of(even)) == pytest.approx(1.0, abs=0.01)

    def test_entropy_stays_within_the_extremes(self) -> None:
        values = np.abs(np.random.default_rng(4).standard_normal(50_000))
        low, high = range_of(histogram_of(values), float(values.min()), float(values.max()), "entropy", 0.0)
        assert low == values.min()
        assert high <= values.max()


class TestFixedPoint:
    @pytest.mark.parametrize("zero_point", [True, False])
    @pytest.mark.parametrize(("low", "high"), [(-1.0, 3.0), (0.5, 2.0), (-4.0, -1.0), (-0.17, 9.0), (-1e-3, 1e-3)])
    def test_the_range_and_zero_have_bytes(self, low: float, high: float, zero_point: bool) -> None:
        scale, zero = fixed_point(low, high, zero_point)
        assert np.float32(scale) == scale
        codes = np.rint(np.array([low, 0.0, high]) / scale) + zero
        assert codes[1] == zero
        assert (codes >= -1).all()  # both ends may round away from zero
        assert (codes <= 256).all()
        if not zero_point:
            assert zero == 128
        elif low < 0 < high:
            assert codes[2] - codes[0] in (254, 255, 256)

    def test_a_range_of_zeros(self) -> None:
        assert fixed_point(0.0, 0.0, True) == (1.0, 0)
        assert fixed_point(1e-44, 0.0, False) == (1.0, 128)


def calibration() -> Calibration:
    seen = Observed.of(4)
    random = np.random.default_rng(5)
    for _ in range(3):
        seen.add(random.standard_normal((20, 4)) * [1.0, 2.0, 3.0, 4.0])
    return Calibration({"x": seen}, 60, 0.5, {"x": seen.largest()})


class TestCalibration:
    def test_channels_have_their_extremes(self) -> None:
        seen = Observed.of(2)
        seen.add(np.array([[1.0, -5.0], [-2.0, 3.0]]))
        seen.add(np.array([[0.5, 4.0]]))
        assert seen.low.tolist() == [-2.0, -5.0]
        assert seen.high.tolist() == [1.0, 4.0]
        assert seen.largest().tolist() == [2.0, 5.0]
        assert seen.histogram.counts.sum() == 6

    def test_through_json_and_back(self) -> None:
        before = calibration()
        after = Calibration.from_json(json.loads(json.dumps(before.to_json())))
        assert after.to_json() == before.to_json()
        for ranges in ("minmax", "percentile", "entropy"):
            spec = QuantSpec(activations="static", ranges=ranges)
            assert after.fixed("x", spec, True) == before.fixed("x", spec, True)

    def test_a_value_that_was_not_seen(self) -> None:
        with pytest.raises(InputError, match="has not seen 'y'"):
            calibration().fixed("y", QuantSpec(activations="static"), True)

    @pytest.mark.parametrize(
        "change",
        [
            {"values": None},
            {"values": {"x": {}}},
            {"values": {"x": {"low": [0.0], "high": [1.0], "reach": 1.0, "counts": [1]}}},
            {"values": {"x": {"low": [0.0], "high": [1.0], "reach": 0.0, "counts": [1] * BINS}}},
            {"values": {"x": {"low": [float("nan")], "high": [1.0], "reach": 1.0, "counts": [1] * BINS}}},
            {"largest": {"x": "far"}},
            {"move_outliers": "half"},
            {"tokens": None},
        ],
    )
    def test_malformed_data_is_refused(self, change: dict[str, object]) -> None:
        with pytest.raises(InputError, match="calibration is malformed"):
            Calibration.from_json({**calibration().to_json(), **change})
        with pytest.raises(InputError, match="calibration is malformed"):
            Calibration.from_json([])
