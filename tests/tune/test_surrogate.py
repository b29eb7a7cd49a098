"""The Gaussian process: it interpolates, knows how far to trust itself, and says when nothing better is likely."""

from __future__ import annotations

import math

import numpy as np
import pytest

from encast.tune.surrogate import believe

RNG = np.random.default_rng(0)
FEATURES = RNG.uniform(0, 6, (300, 4))
PRIOR = np.zeros(300)
TRUTH = 0.3 * np.sin(FEATURES[:, 0]) + 0.2 * np.cos(0.7 * FEATURES[:, 1]) - 0.4
"""The other two features do not matter."""


def test_with_nothing_measured_the_prior_stands() -> None:
    belief = believe(FEATURES, TRUTH, [], np.empty(0))
    assert belief.mean == pytest.approx(TRUTH)
    assert (belief.deviation > 0.3).all()


def test_errors_that_all_share_need_one_measurement() -> None:
    belief = believe(FEATURES, PRIOR, [7], np.array([-0.5]))
    assert (belief.mean < -0.25).all()


def test_neighbours_learn_from_each_other() -> None:
    index = list(range(60))
    belief = believe(FEATURES, PRIOR, index, TRUTH[:60] + RNG.normal(0, 0.02, 60))
    error = belief.mean[60:] - TRUTH[60:]
    assert float(np.sqrt(np.mean(error**2))) < 0.08 < 0.3 * float(TRUTH.std()) + 0.05
    # Errors are as large as it says: few beyond two deviations.
    assert np.mean(np.abs(error) > 2 * belief.deviation[60:]) < 0.12
    reaches = belief.hyperparameters.reaches
    assert max(reaches[2:]) < min(reaches[:2])


def test_repeated_trials_narrow_the_noise() -> None:
    once = believe(FEATURES, PRIOR, [0, 1, 2, 3], np.zeros(4), fit=False)
    often = believe(FEATURES, PRIOR, [0, 0, 0, 0, 1, 2, 3], np.zeros(7), fit=False)
    assert often.deviation[0] < 0.8 * once.deviation[0]


def test_a_failure_does_not_drag_everything_down() -> None:
    values = np.array([0.0, 0.05, -30.0])
    belief = believe(FEATURES, PRIOR, [0, 1, 2], values)
    assert belief.mean[2] > -3
    assert belief.mean[0] > -0.6


def test_improvement_is_expected_where_mean_and_doubt_are_great() -> None:
    index = list(range(40))
    belief = believe(FEATURES, PRIOR, index, TRUTH[:40])
    best = int(np.argmax(belief.mean[:40]))
    gains = belief.expected_improvement(best)
    assert gains[best] == 0
    assert (gains >= 0).all()
    chosen = int(gains.argmax())
    assert TRUTH[chosen] > np.quantile(TRUTH, 0.8)


def test_chance_of_better_falls_to_nothing_once_all_is_known() -> None:
    few, all_of_them = list(range(10)), list(range(300))
    belief = believe(FEATURES, PRIOR, few, TRUTH[:10])
    best = int(np.argmax(belief.mean[:10]))
    assert belief.chance_of_better(best, 0.03) > 0.3
    belief = believe(FEATURES, PRIOR, all_of_them, TRUTH)
    best = int(np.argmax(belief.mean))
    assert belief.chance_of_better(best, 0.03) < 0.05
    worst = int(np.argmin(belief.mean))
    assert belief.chance_of_better(worst, 0.03) > 0.99


def test_the_only_set_up_has_nothing_better() -> None:
    belief = believe(np.zeros((1, 4)), np.zeros(1), [0], np.zeros(1))
    assert belief.chance_of_better(0, 0.03) == 0
    assert math.isfinite(belief.deviation[0])
