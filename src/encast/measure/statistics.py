"""What samples say: percentiles that are known, intervals by bootstrap over rounds, paired ratios.

Calls within one round follow each other in milliseconds and share whatever the machine does just then, so they are not
independent draws; rounds, taken by turns over a longer time, nearly are. Every interval here therefore resamples whole
rounds (a cluster bootstrap: Davison and Hinkley, "Bootstrap Methods and their Application", 1997, section 3.8), never
calls. Intervals are percentile intervals (Efron 1979), widened for few rounds as Hesterberg does ("What Teachers Should
Know About the Bootstrap", The American Statistician 69, 2015, section 3.2): the plain ones are too narrow by about the
factor that separates Student's t from the normal distribution.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from encast.errors import InputError

__all__ = [
    "FEWEST_ROUNDS",
    "PERCENTS",
    "Array",
    "Ratio",
    "bootstrap",
    "bootstrap_rounds",
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


def bootstrap(
    values_by_round: Sequence[Any], statistic: Callable[[Array], float | None], seed: int = 0
) -> Interval | None:
    """The 95 % interval of ``statistic`` of all values, rounds resampled with replacement.

    ``values_by_round``: of every round a number or its values. ``statistic`` takes the values of the chosen rounds one
    after the other. None with fewer than ``FEWEST_ROUNDS`` rounds, and where the statistic itself is None.
    """
    rounds = [np.atleast_1d(np.asarray(values, np.float64)) for values in values_by_round]
    if all(values.size == 1 for values in rounds):
        # One array and no concatenations: most statistics of rounds are of one number each.
        flat = np.concatenate(rounds) if rounds else np.empty(0)
        return bootstrap_rounds(flat, lambda chosen: statistic(np.asarray(chosen)), seed)

    def of(chosen: Sequence[Array]) -> float | None:
        return statistic(np.concatenate(chosen))

    return bootstrap_rounds(rounds, of, seed)


def bootstrap_rounds(
    rounds: Sequence[Any] | Array, statistic: Callable[[Any], float | None], seed: int = 0
) -> Interval | None:
    """As ``bootstrap`` for a statistic of whole rounds, which may be anything; of an array it is given arrays."""
    count = len(rounds)
    if count < FEWEST_ROUNDS or statistic(rounds) is None:
        return None
    choices = np.random.default_rng(seed).integers(0, count, (_RESAMPLES, count))
    chosen = (
        rounds[choice] if isinstance(rounds, np.ndarray) else [rounds[index] for index in choice] for choice in choices
    )
    found = [statistic(one) for one in chosen]
    return _interval(np.array([value for value in found if value is not None]), count)


def median_interval(values: Sequence[float] | Array, seed: int = 0) -> Interval | None:
    """``bootstrap`` of the median of one number a round, all resamples at once."""
    array = np.asarray(values, np.float64)
    if array.size < FEWEST_ROUNDS:
        return None
    choices = np.random.default_rng(seed).integers(0, array.size, (_RESAMPLES, array.size))
    return _interval(np.median(array[choices], axis=1), array.size)


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

    Pairs are resampled, so that what slows both in a round cancels. To say how many times as fast a contender is, give
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


def _interval(resampled: Array, rounds: int) -> Interval:
    """The percentiles of the resampled statistic between which 95 % lie, for that many rounds."""
    tail = _tail(rounds)
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return float(low), float(high)


@functools.cache
def _tail(rounds: int) -> float:
    """The share of resamples beyond each end: Hesterberg's ``Phi(-sqrt(n / (n - 1)) * t)``."""
    return NormalDist().cdf(-math.sqrt(rounds / (rounds - 1)) * _student_quantile((1 + CONFIDENCE) / 2, rounds - 1))


def _student_quantile(probability: float, freedom: int) -> float:
    """The quantile, above the median, of Student's t with a whole number of degrees of freedom; by bisection."""
    low, high = 0.0, 1e3
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, freedom) < probability else (low, middle)
    return high


def _student_cdf(t: float, freedom: int) -> float:
    """Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.7.3 and 26.7.4; for ``t >= 0``."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    total, term = 0.0, 1.0
    if freedom % 2 == 0:
        for k in range(0, freedom - 1, 2):
            total += term
            term *= cosine**2 * (k + 1) / (k + 2)
        return 0.5 + sine * total / 2
    term = cosine
    for k in range(1, freedom - 1, 2):
        total += term
        term *= cosine**2 * (k + 1) / (k + 2)
    return 0.5 + (angle + sine * total) / math.pi
