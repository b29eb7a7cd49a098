"""What several noisy trials of one set-up are worth, and which of the finalists may still win."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from encast.backends.groups import Setup
from encast.tune.measurement import Trial

__all__ = ["median", "score", "still_open", "unspoilt"]

_SURE = 2.5
"""Standard errors by which a finalist must be behind the leader to be out, and all of them behind what is better by the
margin for the finals to end."""
_ENOUGH = 5
"""Rounds that say how noisy they are."""
_MEDIAN_OF_PAIRS = 0.954
"""Of the absolute difference of two normal deviates, in standard deviations of one."""
_SPOILT = 0.12
"""Share of a set-up's usual rate by which a trial is below what noise alone does."""


def median(trials: Sequence[Trial]) -> Trial:
    return sorted(trials, key=lambda trial: trial.measurement.score)[(len(trials) - 1) // 2]


def unspoilt(trials: Sequence[Trial]) -> list[Trial]:
    """The trials without those far below the upper median of their set-up's: a neighbour only ever slows."""
    scores: dict[Setup, list[float]] = {}
    for trial in trials:
        scores.setdefault(trial.setup, []).append(trial.measurement.score)
    usual = {setup: sorted(own)[len(own) // 2] for setup, own in scores.items()}
    return [
        trial
        for trial in trials
        if trial.measurement.score >= usual[trial.setup] * (1 - _SPOILT) or usual[trial.setup] <= 0
    ]


def score(trials: Sequence[Trial]) -> float:
    """What a finalist is worth: the mean of its scores without the greatest and the least quarter of them.

    A neighbour on the machine spoils single trials altogether; what is left is nearly as sharp as the mean of all.
    """
    scores = sorted(trial.measurement.score for trial in trials)
    cut = max(len(scores) // 4, int(len(scores) > 2))
    return float(np.mean(scores[cut : len(scores) - cut]))


def still_open(rounds: Sequence[Sequence[Trial]], margin: float) -> list[Setup]:
    """The finalists that may win, of whose trials all have as many; the leader alone once none of the others is likely
    to be better than it by a share of more than ``margin``."""
    logs = np.log([[max(trial.measurement.score, 1e-9) for trial in trials] for trials in rounds])
    middle = np.log([max(score(trials), 1e-9) for trials in rounds])
    leader = int(middle.argmax())
    # Of a set-up's trials those that a neighbour spoilt are few, so of their pairs too. Weather that all share in a
    # round is in it: taking a round's median away would take the noise of the few along.
    first, second = np.triu_indices(logs.shape[1], 1)
    pairs = np.abs(logs[:, first] - logs[:, second])
    # How far few pairs happen to agree is itself luck, but not that all of them do.
    spread = float(np.median(pairs)) / _MEDIAN_OF_PAIRS if logs.shape[1] >= _ENOUGH else float(pairs.max())
    error = spread * math.sqrt(2 / logs.shape[1])
    behind = middle[leader] - middle
    hopes = _SURE * error - behind
    hopes[leader] = 0.0
    if float(hopes.max()) <= math.log1p(margin):
        return [rounds[leader][0].setup]
    return [trials[0].setup for trials, hope in zip(rounds, hopes, strict=True) if hope >= 0]
