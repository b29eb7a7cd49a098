"""What samples say: percentiles that are known, intervals by bootstrap over rounds, paired ratios.

Calls within one round follow each other in milliseconds and share whatever the machine does just then, so they are not
independent draws; rounds, interleaved over a longer time, nearly are. Every interval here therefore resamples whole
rounds (a cluster bootstrap: Davison and Hinkley, "Bootstrap Methods and their Application", 1997, section 3.8), never
calls. Intervals are percentile intervals (Efron 1979), widened for few rounds as Hesterberg does ("What Teachers Should
Know About the Bootstrap", The American Statistician 69, 2015, section 3.2): the plain ones are too narrow by about the
factor that separates Student's t from the normal distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from encast.errors import InputError, need_modules

__all__ = [
    "FEWEST_ROUNDS",
    "PERCENTS",
    "Array",
    "Ratio",
    "bootstrap",
    "latency_metrics",
    "median_interval",
    "percent_name",
    "percentile",
    "percentiles",
    "ratio_interval",
    "samples_needed",
]

Array = np.ndarray[Any, np.dtype[np.float64]]
Interval = tuple[float, float]

PERCENTS = (50.0, 90.0, 95.0, 99.0, 99.9)
CONFIDENCE = 0.95
FEWEST_ROUNDS = 5
"""Fewer have no interval: not even from the least to the greatest do 3 or 4 hold a median with 95 % (75 and 88 %)."""

_RESAMPLES = 2000
_MOST_RESAMPLED = 20_000


def samples_needed(percent: float, confidence: float = CONFIDENCE) -> int:
    """The fewest samples whose largest lies above the true percentile with that confidence.

    With fewer, the estimate rests on nothing that was seen beyond it. All of n independent samples lie below the
    percentile with probability ``(percent / 100) ** n`` (Wilks, "Determination of Sample Sizes for Setting Tolerance
    Limits", Annals of Mathematical Statistics 12, 1941): p50 needs 5, p90 29, p95 59, p99 299 and p99.9 2,995.
    """
    if not 0 < percent < 100 or not 0 < confidence < 1:
        raise InputError(f"percent {percent} and confidence {confidence}: give 0 to 100 and 0 to 1, ends excluded")
    # The logarithm's last bit must not ask for a sample more where the quotient is whole.
    return max(1, math.ceil(math.log(1 - confidence) / math.log(percent / 100) - 1e-9))


def percentile(values: Sequence[float] | Array, percent: float) -> float | None:
    """The percentile by linear interpolation between order statistics; None with fewer than ``samples_needed``.

    Definition 7 of Hyndman and Fan, "Sample Quantiles in Statistical Packages", The American Statistician 50, 1996,
    which NumPy and R use by default.
    """
    if len(values) < samples_needed(percent):
        return None
    return float(np.percentile(np.asarray(values, np.float64), percent))


def percentiles(values: Sequence[float] | Array, percents: Sequence[float] = PERCENTS) -> dict[str, float | None]:
    """``percentile`` of each, by its name (``p50``, ``p99_9``), in the unit of the values."""
    return {percent_name(percent): percentile(values, percent) for percent in percents}


def percent_name(percent: float) -> str:
    """``p50``, ``p99_9``: a percentile as a field of results is named."""
    return "p" + f"{percent:g}".replace(".", "_")


def bootstrap(values_by_round: Sequence[Any], statistic: Callable[[Array], float], seed: int = 0) -> Interval | None:
    """The 95 % interval of ``statistic`` of all values, rounds resampled with replacement.

    ``values_by_round``: of every round a number or its values. ``statistic`` takes the values of the chosen rounds one
    after the other. None with fewer than ``FEWEST_ROUNDS`` rounds.
    """
    rounds = [np.atleast_1d(np.asarray(values, np.float64)) for values in values_by_round]

    def of(numbers: Array) -> float:
        return statistic(np.concatenate([rounds[int(number)] for number in numbers]))

    return _interval(np.arange(len(rounds)), of, vectorized=False, seed=seed)


def median_interval(values: Sequence[float] | Array, seed: int = 0) -> Interval | None:
    """``bootstrap`` of the median of one number a round, all resamples at once."""
    return _interval(np.asarray(values, np.float64), np.median, vectorized=True, seed=seed)


@dataclass(frozen=True)
class Ratio:
    """A ratio and its 95 % interval, None where there were too few rounds for one."""

    ratio: float
    low: float | None
    high: float | None

    def record(self) -> dict[str, float | None]:
        return {"ratio": self.ratio, "low": self.low, "high": self.high}


def ratio_interval(a_rounds: Sequence[float], b_rounds: Sequence[float], seed: int = 0) -> Ratio:
    """The median over rounds of a / b, with its interval; round i of both was measured in one neighbourhood of time.

    Pairs are resampled, so that what slows both in a round cancels. To say how many times as fast a system is, give
    its throughputs first, or its times last. Raises ``InputError`` for unequal numbers of rounds and for values that
    are not above 0.
    """
    a, b = np.asarray(a_rounds, np.float64), np.asarray(b_rounds, np.float64)
    if a.shape != b.shape or a.ndim != 1 or not a.size:
        raise InputError(f"{a.size} rounds against {b.size}: a ratio is paired by round, give the same of both")
    if not (np.isfinite(a).all() and np.isfinite(b).all() and a.min() > 0 and b.min() > 0):
        raise InputError("a round's value is not above 0 and finite; only measured times and rates have a ratio")
    ratios = a / b
    low, high = median_interval(ratios, seed) or (None, None)
    return Ratio(float(np.median(ratios)), low, high)


def latency_metrics(
    rounds_ns: Sequence[Sequence[float] | Array], percents: Sequence[float] = PERCENTS, seed: int = 0
) -> dict[str, Any]:
    """The fields of a row about latency, from nanoseconds of every call by round.

    ``latency_ms``: the mean and ``percentiles`` of all calls; ``latency_ms_interval``: of p50, over rounds;
    ``latency_samples``: how many calls; ``latency_samples_needed``: by name, of every percentile that is null.
    Raises ``InputError`` when there is no call.
    """
    rounds = [np.asarray(values, np.float64) / 1e6 for values in rounds_ns]
    calls = np.concatenate(rounds) if rounds else np.empty(0)
    if not calls.size:
        raise InputError("no call was timed, so there is no latency; give the scenario more seconds or more rounds")
    known: Mapping[str, float | None] = percentiles(calls, percents)
    return {
        "latency_ms": {"mean": float(calls.mean()), **known},
        "latency_ms_interval": bootstrap(_thinned(rounds), lambda values: float(np.median(values)), seed),
        "latency_samples": int(calls.size),
        "latency_samples_needed": {
            percent_name(percent): samples_needed(percent)
            for percent in percents
            if known[percent_name(percent)] is None
        },
    }


def _thinned(rounds: Sequence[Array]) -> list[Array]:
    """Every n-th order statistic of each round, the same n for all: medians stay, and resampling is quick.

    Rounds keep their weights to each other, and at least one value.
    """
    stride = max(1, sum(values.size for values in rounds) // _MOST_RESAMPLED)
    return [np.sort(values)[min(stride // 2, values.size // 2) :: stride] for values in rounds if values.size]


def _interval(rounds: Any, statistic: Callable[..., Any], *, vectorized: bool, seed: int) -> Interval | None:
    """SciPy's bootstrap of a statistic of rounds, or of their numbers, at Hesterberg's level for so few of them."""
    need_modules("bench", "scipy")
    from scipy import stats  # type: ignore[import-untyped]  # here: it takes long, and most who import this need none

    count = len(rounds)
    if count < FEWEST_ROUNDS:
        return None
    tail = stats.norm.cdf(-math.sqrt(count / (count - 1)) * stats.t.ppf((1 + CONFIDENCE) / 2, count - 1))
    found = stats.bootstrap(
        (rounds,),
        statistic,
        n_resamples=_RESAMPLES,
        vectorized=vectorized,
        confidence_level=1 - 2 * tail,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)
