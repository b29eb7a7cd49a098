"""What measured set-ups say about the others: a Gaussian process over how far measurements lie from the cost model.

The cost model is the mean, so that with no measurement its order stands, and with some its errors, which neighbours
share, are corrected everywhere. Values are logarithms of rates: errors of the model and noise of a machine are factors.
Kernel: Matern 5/2 with a length scale for every feature, since nobody knows which of them matter to a workload, and a
constant for an error that all set-ups share. Amplitude, length scales and noise are those of greatest posterior
probability (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, sections 4.2.1, 5.1 and 5.4.1),
found coordinate by coordinate among a few values each: with tens of measurements finer ones mean nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Belief", "Hyperparameters", "believe"]

Array = np.ndarray[Any, np.dtype[np.float64]]

_AMPLITUDES = (0.05, 0.1, 0.2, 0.3, 0.45, 0.7)
_REACHES = (0.06, 0.125, 0.25, 0.5, 1.0)
"""Inverse length scales."""
_NOISES = (0.01, 0.02, 0.03, 0.05)
_USUAL = {"amplitude": (0.3, 0.5), "reach": (0.35, 0.7), "noise": (0.02, 0.5)}
"""What to believe before any measurement: median, and deviation of the logarithm. Without it a few measurements that
happen to agree would make all the rest look certain."""
_SWEEPS = 2

_CANDIDATES, _DRAWS = 256, 1000
_COMMON = 0.2
"""Deviation of how far the median of the measured errors is from the one that all set-ups share."""

_OWN = 0.03
"""Deviation of what is a set-up's own: no neighbour shows it, only its own trials do."""

_FURTHEST = 2.0
"""Errors that lie further from the others' median than a factor of e^2 are as good as that: a set-up that fails the
promise altogether is measured as 0."""


@dataclass(frozen=True)
class Hyperparameters:
    """``reaches``: the inverse length scale of every feature; ``noise``: the deviation of one trial."""

    amplitude: float
    reaches: tuple[float, ...]
    noise: float


@dataclass(frozen=True)
class Belief:
    """``mean: f64[n]`` and ``deviation: f64[n]`` of the logarithm of every set-up's rate, and what they rest on."""

    mean: Array
    deviation: Array
    hyperparameters: Hyperparameters
    features: Array = field(repr=False)
    reach: Array = field(repr=False)
    """``f64[trials, n]``: what the trials took away from every set-up's variance, as columns of a root."""

    def expected_improvement(self, incumbent: int) -> Array:
        """By how much, as a share of the incumbent's believed rate, each set-up is expected to be better; f64[n].

        Of the set-up itself, not of a noisy trial of it, and against the incumbent's mean, not its luckiest trial
        (the plug-in criterion of Picheny, Wagner and Ginsbourger, "A benchmark of kriging-based infill criteria for
        noisy optimization", 2013).
        """
        gain = self.mean - self.mean[incumbent]
        deviation = np.maximum(self.deviation, 1e-9)
        z = gain / deviation
        density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
        improvement: Array = gain * _normal_cdf(z) + deviation * density
        improvement[incumbent] = 0.0
        return improvement

    def chance_of_better(self, incumbent: int, margin: float, seed: int = 0) -> float:
        """The probability that some set-up is better than the incumbent by a share of more than ``margin``.

        By draws from the joint distribution of the incumbent and those that are likeliest to be, since what is near to
        each other is better or worse together. What is a set-up's own is left out: nothing but measuring all would
        rule it out.
        """
        hope = (self.mean - self.mean[incumbent] - math.log1p(margin)) / np.maximum(self.deviation, 1e-9)
        hope[incumbent] = np.inf
        some = np.argsort(-hope, kind="stable")[:_CANDIDATES]
        at = self.features[some] * np.asarray(self.hyperparameters.reaches)
        reach = self.reach[:, some]
        covariance = _kernel(_squares(at, at), self.hyperparameters.amplitude) - reach.T @ reach
        # Of measured ones, more than that was taken away.
        values, vectors = np.linalg.eigh(covariance)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        draws = self.mean[some] + np.random.default_rng(seed).standard_normal((_DRAWS, len(some))) @ root.T
        return float(np.mean(draws[:, 1:].max(axis=1, initial=-np.inf) - draws[:, 0] > math.log1p(margin)))


def believe(
    features: Array,
    prior: Array,
    measured: Sequence[int],
    values: Array,
    *,
    start: Hyperparameters | None = None,
    fit: bool = True,
) -> Belief:
    """What to think of every set-up.

    ``features: f64[n, d]`` and ``prior: f64[n]``, the logarithm of the estimated rate; ``measured`` are indices of
    trials, of which one may be there several times, and ``values`` the logarithms of their rates. The fit of the
    hyperparameters begins at ``start``, and is left out when ``fit`` is false.
    """
    index = np.asarray(measured, np.int64)
    errors = values - prior[index]
    # A unit of time that the cost model gets wrong moves all errors alike.
    common = float(np.median(errors)) if len(errors) else 0.0
    errors = np.clip(errors - common, -_FURTHEST, _FURTHEST)
    at = features[index]
    chosen = start or Hyperparameters(_AMPLITUDES[3], (_REACHES[2],) * features.shape[1], _NOISES[1])
    if fit:
        chosen = _fitted(at, index, errors, chosen)
    scale = np.asarray(chosen.reaches)
    across = _kernel(_squares(at * scale, features * scale), chosen.amplitude)
    across[np.arange(len(index)), index] += _OWN**2
    # Set-ups are many and trials few: one inverse, then products only.
    root = np.linalg.inv(_cholesky(across[:, index], chosen.noise))
    reach = root @ across
    mean = prior + common + reach.T @ (root @ errors)
    variance = chosen.amplitude**2 + _COMMON**2 + _OWN**2 - np.sum(reach**2, axis=0)
    return Belief(mean, np.sqrt(np.maximum(variance, 1e-12)), chosen, features, reach)


def _fitted(at: Array, index: Any, errors: Array, start: Hyperparameters) -> Hyperparameters:
    """Coordinate ascent on the marginal likelihood."""
    own = _OWN**2 * (index[:, None] == index[None, :])
    # Of every feature: squared distances of all pairs.
    apart = [(column[:, None] - column[None, :]) ** 2 for column in at.T]
    amplitude, reaches, noise = start.amplitude, list(start.reaches), start.noise

    def posterior(amplitude: float, squares: Array, noise: float, reach: float = _USUAL["reach"][0]) -> float:
        lower = _cholesky(_kernel(squares, amplitude) + own, noise)
        white = np.linalg.solve(lower, errors)
        usual = _usual("amplitude", amplitude) + _usual("noise", noise) + _usual("reach", reach)
        return float(usual - 0.5 * white @ white - np.sum(np.log(np.diag(lower))))

    for _ in range(_SWEEPS):
        squares = np.zeros((len(errors), len(errors)))
        for reach, each in zip(reaches, apart, strict=True):
            squares += reach**2 * each
        both = itertools.product(_AMPLITUDES, _NOISES)
        amplitude, noise = max(both, key=lambda pair: posterior(pair[0], squares, pair[1]))
        for feature, each in enumerate(apart):
            others = squares - reaches[feature] ** 2 * each
            reaches[feature] = max(
                _REACHES, key=lambda reach: posterior(amplitude, others + reach**2 * each, noise, reach)
            )
            squares = others + reaches[feature] ** 2 * each
    return Hyperparameters(amplitude, tuple(reaches), noise)


def _usual(name: str, value: float) -> float:
    """The logarithm of the density of a hyperparameter before any measurement, up to a constant."""
    median, deviation = _USUAL[name]
    return -0.5 * (math.log(value / median) / deviation) ** 2


def _squares(a: Array, b: Array) -> Array:
    squares: Array = np.sum(a**2, axis=1)[:, None] + np.sum(b**2, axis=1)[None, :] - 2 * a @ b.T
    return squares


def _kernel(squares: Array, amplitude: float) -> Array:
    x = np.sqrt(5.0 * np.maximum(squares, 0.0))
    kernel: Array = amplitude**2 * (1 + x + x**2 / 3) * np.exp(-x) + _COMMON**2
    return kernel


def _cholesky(kernel: Array, noise: float) -> Array:
    return np.asarray(np.linalg.cholesky(kernel + noise**2 * np.eye(len(kernel))), np.float64)


def _normal_cdf(z: Array) -> Array:
    # NumPy has no error function; set-ups are few thousand.
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])
