"""Metrics against those of scikit-learn and SciPy, where these are installed: ties, single classes, constants."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from encast import metrics

CLASSES = st.integers(1, 4).flatmap(
    lambda most: st.lists(st.tuples(st.integers(0, most), st.integers(0, most)), min_size=1, max_size=40)
)
VALUES = st.one_of(
    st.integers(-3, 3).map(float), st.sampled_from([0.1, 0.3, 1e-9]), st.floats(-1e6, 1e6, allow_subnormal=False)
)


@pytest.fixture(scope="module")
def scikit_learn() -> Any:
    return pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")


@pytest.fixture(scope="module")
def scipy_stats() -> Any:
    return pytest.importorskip("scipy.stats", reason="SciPy is not installed")


@settings(max_examples=300, deadline=None)
@given(CLASSES)
@example([(0, 0)])
@example([(1, 1), (1, 1)])
@example([(1, 0), (1, 0)])
@example([(0, 1), (1, 1)])
@example([(2, 0), (3, 1)])
def test_classification_is_that_of_scikit_learn(scikit_learn: Any, pairs: list[tuple[int, int]]) -> None:
    predicted, gold = np.array(pairs).T
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of single classes, to which it gives 0 as is wanted here
        expected = {
            "accuracy": scikit_learn.accuracy_score(gold, predicted),
            "f1_macro": scikit_learn.f1_score(gold, predicted, average="macro", zero_division=0),
            "matthews": scikit_learn.matthews_corrcoef(gold, predicted),
            "f1_binary": scikit_learn.f1_score(gold, predicted, labels=[1], average="macro", zero_division=0),
        }
    found = {name: getattr(metrics, name)(predicted, gold) for name in expected}
    assert found == pytest.approx(expected, abs=1e-12)


def _quietly(correlation: Callable[..., Any], x: Any, y: Any) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of constants, to which it gives nan as is wanted here
        return float(correlation(x, y).statistic)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(VALUES, VALUES), min_size=2, max_size=30))
@example([(0.1, 1.0), (0.1, 2.0), (0.1, 4.0)])  # their mean is not 0.1
@example([(1.0, 2.0), (2.0, 4.0)])
@example([(1.0, 0.0), (1.0, 0.0)])
def test_spearman_is_that_of_scipy(scipy_stats: Any, pairs: list[tuple[float, float]]) -> None:
    x, y = np.array(pairs).T
    expected = _quietly(scipy_stats.spearmanr, x, y)
    assert metrics.spearman(x, y) == pytest.approx(expected, abs=1e-9, nan_ok=True)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=2, max_size=30), st.sampled_from([1, 0.1, 0.3])
)
@example([(1, 1), (1, 2), (1, 4)], 0.1)
@example([(1, 1), (2, 2)], 0.1)
def test_pearson_is_that_of_scipy(scipy_stats: Any, pairs: list[tuple[int, int]], unit: float) -> None:
    x, y = np.array(pairs).T * unit
    found, expected = metrics.pearson(x, y), _quietly(scipy_stats.pearsonr, x, y)
    assert found == pytest.approx(expected, abs=1e-9, nan_ok=True)
    assert math.isnan(found) or -1 <= found <= 1


@pytest.mark.parametrize("scale", [1e-200, 1e-30, 1e30, 1e200])
def test_pearson_does_not_depend_on_the_unit(scipy_stats: Any, scale: float) -> None:
    x, y = np.random.RandomState(1).standard_normal((2, 50))
    expected = pytest.approx(_quietly(scipy_stats.pearsonr, x, y), abs=1e-12)
    assert metrics.pearson(x * scale, y * scale) == expected
    assert metrics.pearson(x * scale, y) == expected


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(2, 5), st.integers(0, 1000))
def test_kl_divergence_is_that_of_scipy(scipy_stats: Any, rows: int, classes: int, seed: int) -> None:
    p, q = np.random.RandomState(seed).dirichlet(np.ones(classes), (2, rows))
    expected = float(np.mean(scipy_stats.entropy(p, q, axis=1)))
    assert metrics.kl_divergence(p, q) == pytest.approx(expected, abs=1e-12)
