"""What a set-up is worth, estimated from a few measured points: where a search begins, not what it decides by.

**Service time.** A run of ``n`` tokens on ``t`` threads takes

    s(n, t) = a + b/t + c n/t + d n + e (t - 1) + f n log2(min(n, N))/t,        a, b, c, d, e, f >= 0

seconds: ``a`` the call, ``b/t`` the weights, which threads read in parts, ``c n/t`` the arithmetic, ``d n`` what one
thread does alone (Amdahl), ``e`` the meeting after every step, ``f`` what a token costs more in a large run, whose
activations leave one cache after the other (5 % from 256 to 2048 tokens of a small model; ``N`` is the largest run that
was measured). The coefficients are fitted to measured points with relative errors as weights. While the cores that it
leaves over are busy as well, a run takes ``1 + k u`` times as long, where ``u`` is their share and ``k`` is measured
with an instance on each: shared caches, memory and clock frequency.

**Queueing.** An idle instance takes what waits for its group, up to ``batch_tokens``. At rate ``r`` a group of ``m``
instances settles at runs of ``b`` texts, where ``b = r s(b) / m``: as many as arrive while one runs, at least one. A
text waits with Erlang's probability C of finding all instances busy,

- for the first of their runs to end, of which uniform rests are left, ``P(W > w) = C (1 - w / s(b))^m``, while runs
  have room for all that wait,
- and where they are full, for whole runs before it: an exponential wait of the mean that Allen and Cunneen give for
  general service times (Probability, Statistics and Queueing Theory, 1990, section 5.3.7);

in between, weighted by the cube of how full runs are: that many come seldom together. Then it waits for its own run.

The rate under a promise is the largest whose share of late answers, summed over groups, the percentile allows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from encast.backends.groups import Setup
from encast.errors import InputError
from encast.tune.slo import Slo

__all__ = ["CostModel", "Probe", "probe_plan"]

Array = np.ndarray[Any, np.dtype[np.float64]]

_EDGES = np.concatenate([np.linspace(0, 0.9, 10), np.linspace(0.9, 0.98, 5)[1:], np.linspace(0.98, 1, 9)[1:]])
_QUANTILES, _WEIGHTS = (_EDGES[1:] + _EDGES[:-1]) / 2, np.diff(_EDGES)
"""Representatives of a group's lengths, and the texts that each stands for: more of the long ones, which are late."""

_NODES = np.array([-2.857, -1.356, 0.0, 1.356, 2.857])
_NODE_WEIGHTS = np.array([0.01126, 0.22208, 0.53333, 0.22208, 0.01126])
"""Gauss and Hermite's rule of five points for a normally distributed number of standard deviations."""

_RATES = np.linspace(0.02, 1.0, 50)
"""Shares of the saturated throughput at which the promise is checked."""

_SHARED = 1.15
"""How many times as much of the cores' time groups take that share them: a thread that the other group keeps off its
core is waited for at every barrier. On two cores of a Zen 4 1.05 to 1.38, the more the smaller the runs."""

_NO_RATE = 1e-3
"""What a set-up that cannot keep the promise at any rate is worth, as a share of its throughput: low, but in order."""


@dataclass(frozen=True)
class Probe:
    """``seconds`` of a run of ``tokens`` tokens, by each of ``instances`` of ``threads`` threads at once."""

    tokens: int
    threads: int
    instances: int
    seconds: float


def probe_plan(cores: int, lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """(tokens, threads, instances) to measure: a short text, a batch and a large batch on one, some and all cores.

    The last one keeps every core busy with an instance of its own.
    """
    short = max(1, int(np.median(np.asarray(lengths))))
    sizes = sorted({short, max(4 * short, 256), max(16 * short, 2048)})
    widths = sorted({1, max(1, round(cores**0.5)), cores})
    plan = [(tokens, threads, 1) for threads in widths for tokens in sizes]
    return [*plan, (sizes[-1], 1, cores)] if cores > 1 else plan


class CostModel:
    """Estimates of set-ups for texts of ``lengths`` on ``cores`` cores, from probes."""

    def __init__(self, probes: Sequence[Probe], cores: int, lengths: Sequence[int]) -> None:
        """Raises ``InputError`` when the probes lack a run alone or have a time that is not above 0."""
        alone = [probe for probe in probes if probe.instances == 1]
        if not alone or not all(np.isfinite(probe.seconds) and probe.seconds > 0 for probe in probes):
            raise InputError("the cost model needs measured times above 0, some of them of one instance alone")
        self.cores = cores
        self.lengths = np.sort(np.asarray(lengths, np.float64))
        self._spans: dict[tuple[int, int], tuple[float, Array]] = {}
        self._largest = max(probe.tokens for probe in alone)
        self._coefficients = _non_negative(
            _terms([probe.tokens for probe in alone], [probe.threads for probe in alone], self._largest),
            np.array([probe.seconds for probe in alone]),
        )
        crowds = [probe for probe in probes if probe.instances > 1 and probe.instances * probe.threads >= cores]
        slower = [probe.seconds / float(self.service(probe.tokens, probe.threads)) - 1 for probe in crowds]
        self.slowdown = max(0.0, float(np.median(slower))) if slower else 0.0
        """By how much a run of one thread takes longer while all other cores are busy: ``k``."""

    def service(self, tokens: Any, threads: int) -> Array:
        """Seconds of a run of that many tokens, while no other instance runs."""
        n = np.asarray(tokens, np.float64)
        call, each = self._line(n, threads)
        return np.asarray(np.maximum(call + each * n, 1e-9), np.float64)

    def _line(self, tokens: Any, threads: int) -> tuple[float, Any]:
        """Seconds of a call and of every token of it, in a run of that many tokens on that many threads."""
        call, weights, arithmetic, alone, meeting, caches = map(float, self._coefficients)
        arithmetic = arithmetic + caches * _doublings(tokens, self._largest)
        return call + weights / threads + meeting * (threads - 1), arithmetic / threads + alone

    def throughput(self, setup: Setup) -> float:
        """Texts a second with endless texts waiting."""
        parts = self._parts(setup)
        each = [float(self._seconds(part, part.full)) / part.full * part.share for part in parts]
        slowest = min(part.instances / seconds for part, seconds in zip(parts, each, strict=True))
        work = sum(part.threads * seconds for part, seconds in zip(parts, each, strict=True))
        # Groups that share cores divide the cores' time between them; one that gets no text takes none.
        return min(slowest, self.cores / (_SHARED * work)) if setup.shared_cores and len(parts) > 1 else slowest

    def rate(self, setup: Setup, slo: Slo | None) -> float:
        """Texts a second that the set-up answers in time; without a promise, ``throughput``."""
        most = self.throughput(setup)
        if slo is None:
            return most
        rates = most * _RATES
        late = np.zeros_like(rates)
        for part in self._parts(setup):
            late += part.share * self._late(part, setup, rates, slo.limit_ms / 1e3)
        allowed = 1 - slo.percent / 100
        kept = int(np.argmax(late > allowed)) if bool(np.any(late > allowed)) else len(rates)
        if kept == 0:
            longest = float(self.service(self.lengths[-1], setup.groups[-1].threads))
            return most * _NO_RATE * min(1.0, slo.limit_ms / 1e3 / longest)
        if kept == len(rates):
            return most
        # Between the last rate that keeps it and the first that does not.
        low, high = float(late[kept - 1]), float(late[kept])
        return float(rates[kept - 1] + (rates[kept] - rates[kept - 1]) * (allowed - low) / max(high - low, 1e-12))

    def longest_run(self, setup: Setup) -> float:
        """Seconds of a run of ``batch_tokens``, by the group that takes longest for it, while all cores are busy."""
        return max(float(self._seconds(part, part.full)) for part in self._parts(setup))

    def _parts(self, setup: Setup) -> list[_Part]:
        """What each group has to do; groups that get no text are left out."""
        parts = []
        begin = 0
        for index, group in enumerate(setup.groups):
            bound = np.inf if group.longest is None else group.longest
            end = int(np.searchsorted(self.lengths, bound, "right"))
            if end <= begin:
                continue
            if (begin, end) not in self._spans:
                # Thousands of set-ups part the texts in three or four ways.
                own = self.lengths[begin:end]
                self._spans[begin, end] = float(own.mean()), np.quantile(own, _QUANTILES)
            mean, quantiles = self._spans[begin, end]
            parts.append(
                _Part(
                    index, group.instances, group.threads, (end - begin) / len(self.lengths), mean, quantiles,
                    max(1.0, setup.batch_tokens / mean),
                )
            )  # fmt: skip
            begin = end
        return parts

    def _seconds(self, part: _Part, texts: Any) -> Any:
        """Seconds of a run of that many of the part's texts, while all cores are busy."""
        return self.service(np.asarray(texts) * part.mean, part.threads) * self._crowded(part.threads)

    def _crowded(self, threads: int) -> float:
        """How many times as long a run takes when the cores that it leaves over are busy too."""
        return 1 + self.slowdown * (self.cores - threads) / max(self.cores - 1, 1)

    def _late(self, part: _Part, setup: Setup, rates: Array, limit: float) -> Array:
        """The share of the part's texts that are answered later than ``limit`` seconds, for each rate of all texts."""
        crowd = self._crowd(part, setup, rates)
        arriving = rates * part.share / part.instances
        texts = self._settled(part, arriving * crowd)
        run, largest = self._seconds(part, texts) * crowd, self._seconds(part, part.full) * crowd
        load, most = arriving * run / texts, np.minimum(arriving * largest / part.full, 0.999)
        # What is left of the limit after the own run: f64[rates, lengths, nodes], as what follows from it.
        own = self._own_run(part, setup, texts) * crowd[:, None, None]
        slack = np.maximum(limit - own, 0.0)
        # A run that one finds under way is a long one more likely than a short one.
        square = float(_WEIGHTS @ part.quantiles**2)
        found = np.minimum(run * (1 + np.where(texts > 1, square / (texts * part.mean**2), 0.0)), largest)
        rest = np.maximum(1 - slack / found[:, None, None], 0.0) ** part.instances
        service = self.service(part.quantiles, part.threads)
        spread = float(_WEIGHTS @ service**2) / float(_WEIGHTS @ service) ** 2 - 1
        decay = 2 * part.instances * (1 - most) / (largest * (1 + spread))
        waits, queues = _erlang_c(part.instances, np.stack([np.minimum(load, 0.999), most]))
        full = ((texts / part.full) ** 3)[:, None, None]
        late = (1 - full) * waits[:, None, None] * rest
        late = late + full * queues[:, None, None] * np.exp(-slack * decay[:, None, None])
        shares = np.where(own > limit, 1.0, late) @ _NODE_WEIGHTS @ _WEIGHTS
        return np.asarray(np.where(load > 1.001, 1.0, shares), np.float64)

    def _settled(self, part: _Part, arriving: Array) -> Array:
        """The texts of a run when as many arrive while one runs: ``b = r s(b)``, with every token's time of full runs,
        so that it is linear in ``b``."""
        line = self._line(part.full * part.mean, part.threads)
        call, each = (seconds * self._crowded(part.threads) for seconds in line)
        # Where a text costs more time than it takes to arrive, runs grow until they are full.
        left = np.maximum(1 - arriving * each * part.mean, 1e-12)
        return np.asarray(np.clip(arriving * call / left, 1.0, part.full), np.float64)

    def _crowd(self, part: _Part, setup: Setup, rates: Array) -> Array:
        """How many times as long runs take because another group's are on the same cores for a share of the time."""
        theirs = np.zeros_like(rates)
        for one in self._parts(setup) if setup.shared_cores else []:
            if one.index != part.index:
                theirs += _SHARED * rates * one.share * one.threads * self._seconds(one, 1.0) / self.cores
        return np.asarray(1 + np.minimum(theirs, 1.0), np.float64)

    def _own_run(self, part: _Part, setup: Setup, texts: Array) -> Array:
        """Seconds of the run that a text is in: itself, of each length, among as many others as happen to come.

        ``f64[rates, lengths, nodes]`` for the mean number of texts of a run at each rate.
        """
        spread = np.sqrt((texts - 1) * float(_WEIGHTS @ part.quantiles**2))
        others = np.maximum(((texts - 1) * part.mean)[:, None] + spread[:, None] * _NODES, 0.0)
        tokens = others[:, None, :] + part.quantiles[None, :, None]
        tokens = np.minimum(tokens, np.maximum(setup.batch_tokens, part.quantiles)[None, :, None])
        return self.service(tokens, part.threads) * self._crowded(part.threads)


@dataclass(frozen=True)
class _Part:
    index: int
    instances: int
    threads: int
    share: float
    """Of all texts."""
    mean: float
    """Tokens of its texts."""
    quantiles: Array
    full: float
    """Texts of the largest run."""


def _terms(tokens: Any, threads: Any, largest: int) -> Array:
    n, t = np.asarray(tokens, np.float64), np.asarray(threads, np.float64)
    return np.stack([np.ones_like(n), 1 / t, n / t, n, t - 1, n * _doublings(n, largest) / t], axis=1)


def _doublings(tokens: Any, largest: int) -> Any:
    return np.log2(np.clip(tokens, 1, largest))


def _non_negative(terms: Array, seconds: Array) -> Array:
    """Least squares of relative errors with coefficients that are not negative: the best of all subsets of terms.

    With six terms the 63 subsets are quicker tried than an iteration explained.
    """
    scaled = terms / seconds[:, None]
    best, least = np.zeros(terms.shape[1]), np.inf
    for size in range(1, min(terms.shape) + 1):
        for chosen in itertools.combinations(range(terms.shape[1]), size):
            columns = list(chosen)
            found = np.linalg.lstsq(scaled[:, columns], np.ones(len(seconds)), rcond=None)[0]
            error = float(np.sum((scaled[:, columns] @ found - 1) ** 2))
            # A term more must explain something: ties are the noise's.
            if (found >= 0).all() and error < least * 0.98 - 1e-12:
                best, least = np.zeros(terms.shape[1]), error
                best[columns] = found
    return best


def _erlang_c(servers: int, load: Array) -> Array:
    """The probability that an arrival waits, for a load below 1 on each of the servers.

    By Erlang B's recursion over the servers, which is stable for any number of them.
    """
    offered = load * servers
    blocked = np.ones_like(offered)
    for server in range(1, servers + 1):
        blocked = offered * blocked / (server + offered * blocked)
    waits: Array = blocked / (1 - load * (1 - blocked))
    return waits
