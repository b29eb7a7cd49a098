"""What a set-up is worth, estimated from a few measured points: the order in which a search begins, no more.

**Service time.** A run of ``n`` tokens on ``t`` threads takes

    s(n, t) = a + b/t + c n/t + d n + e (t - 1) + f n log2(min(n, N))/t,        a, b, c, d, e, f >= 0

seconds: ``a`` the call, ``b/t`` the weights, which threads read in parts, ``c n/t`` the arithmetic, ``d n`` what one
thread does alone (Amdahl), ``e`` the meeting after every step, ``f`` what a token costs more in a large run, whose
activations leave one cache after the other (5 % from 256 to 2048 tokens of a small model; ``N`` is the largest run that
was measured). The coefficients are fitted to measured points by non-negative least squares of relative errors. While
the cores that it leaves over are busy as well, a run takes ``1 + k u`` times as long, where ``u`` is their share and
``k`` is measured with an instance on each: shared caches, memory and clock frequency.

**Rate within a latency limit.** A text waits until the first of its group's ``m`` instances ends its run, about
``s / m``, and then for its own run. The largest run with which both fit into the limit, for a text of the group's 99th
percentile of length, gives the group's rate. Queues would take more of it; measuring a set-up takes a few seconds.

**Cards.** Each counts as a core, with an instance of one thread, and ``k`` is what cards of one host cost each other. A
card's times are a staircase: a batch is padded to the next size of CUDA graphs, from 256 tokens on by an eighth at
most. The model takes no notice: the batches that set-ups allow are such sizes themselves, and all are measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from encast.backends.groups import Setup
from encast.errors import InputError
from encast.tune.slo import Slo

__all__ = ["CostModel", "Probe", "card_probe_plan", "probe_plan"]

_CARD_PROBE_TOKENS = 8192
"""What a server's batch on a card has by default."""

Array = np.ndarray[Any, np.dtype[np.float64]]

_SHARED = 1.15
"""How many times as much of the cores' time groups take that share them: a thread that the other group keeps off its
core is waited for at every barrier. On two cores of a Zen 4 1.05 to 1.38, the more the smaller the runs."""

_UTILISATION = 0.9
"""The share of its throughput at which a group is taken to keep a latency limit."""

_NO_RATE = 1e-3
"""What a set-up that cannot keep the limit at any rate is worth, as a share of its throughput: low, but in order."""


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


def card_probe_plan(cards: int, lengths: Sequence[int], largest: int) -> list[tuple[int, int, int]]:
    """As ``probe_plan``, for batches of up to ``largest`` tokens on cards. Sizes that a card's memory may not hold are
    left to their trials.
    """
    short = max(1, int(np.median(np.asarray(lengths))))
    most = max(short, min(largest, _CARD_PROBE_TOKENS))
    plan = [(tokens, 1, 1) for tokens in sorted({short, round((short * most) ** 0.5), most})]
    return [*plan, (most, 1, cards)] if cards > 1 else plan


class CostModel:
    """Estimates of set-ups for texts of ``lengths`` on ``cores`` cores, from probes."""

    def __init__(self, probes: Sequence[Probe], cores: int, lengths: Sequence[int]) -> None:
        """Raises ``InputError`` when the probes lack a run alone or have a time that is not above 0."""
        from scipy.optimize import nnls  # type: ignore[import-untyped]

        alone = [probe for probe in probes if probe.instances == 1]
        if not alone or not all(np.isfinite(probe.seconds) and probe.seconds > 0 for probe in probes):
            raise InputError("the cost model needs measured times above 0, some of them of one instance alone")
        self.cores = cores
        self.lengths = np.sort(np.asarray(lengths, np.float64))
        self._parts_of: dict[tuple[int, int], tuple[float, float]] = {}
        self._largest = max(probe.tokens for probe in alone)
        terms = np.stack([self._terms(probe.tokens, probe.threads) / probe.seconds for probe in alone])
        self.coefficients: Array = nnls(terms, np.ones(len(alone)))[0]
        crowds = [probe for probe in probes if probe.instances > 1 and probe.instances * probe.threads >= cores]
        slower = [probe.seconds / float(self.service(probe.tokens, probe.threads)) - 1 for probe in crowds]
        self.slowdown = max(0.0, float(np.median(slower))) if slower else 0.0
        """By how much a run of one thread takes longer while all other cores are busy: ``k``."""

    def service(self, tokens: Any, threads: int) -> Array:
        """Seconds of a run of that many tokens, while no other instance runs."""
        return np.maximum(self._terms(tokens, threads) @ self.coefficients, 1e-9)

    def throughput(self, setup: Setup) -> float:
        """Texts a second with endless texts waiting."""
        parts = self._parts(setup)
        each = [float(self._seconds(part, part.full * part.mean)) / part.full * part.share for part in parts]
        slowest = min(part.instances / seconds for part, seconds in zip(parts, each, strict=True))
        work = sum(part.threads * seconds for part, seconds in zip(parts, each, strict=True))
        # Groups that share cores divide the cores' time between them; one that gets no text takes none.
        return min(slowest, self.cores / (_SHARED * work)) if setup.shared_cores and len(parts) > 1 else slowest

    def rate(self, setup: Setup, slo: Slo | None) -> float:
        """Texts a second that the set-up answers within the limit; without one, ``throughput``."""
        most = self.throughput(setup)
        if slo is None:
            return most
        limit, rate = slo.limit_ms / 1e3, most
        parts = self._parts(setup)
        crowd = _SHARED if setup.shared_cores and len(parts) > 1 else 1.0
        for part in parts:
            texts = np.geomspace(1.0, part.full, 50)
            run = self._seconds(part, texts * part.mean) * crowd
            tokens = np.minimum((texts - 1) * part.mean + part.long, max(setup.batch_tokens, part.long))
            own = self._seconds(part, tokens) * crowd
            within = np.flatnonzero(own + run / part.instances <= limit)
            if not within.size:
                return most * _NO_RATE * min(1.0, limit / float(own[0]))
            largest = within[-1]
            rate = min(rate, part.instances * float(texts[largest] / run[largest]) / part.share)
        return _UTILISATION * rate

    def _terms(self, tokens: Any, threads: int) -> Array:
        """What the coefficients multiply: ``f64[..., 6]``."""
        n = np.asarray(tokens, np.float64)
        one, doublings = np.ones_like(n), np.log2(np.clip(n, 1, self._largest))
        return np.stack(
            [one, one / threads, n / threads, n, one * (threads - 1), n * doublings / threads], axis=-1
        )  # fmt: skip

    def _seconds(self, part: _Part, tokens: Any) -> Array:
        """Seconds of a run of the part's group, while all cores are busy."""
        crowded = 1 + self.slowdown * (self.cores - part.threads) / max(self.cores - 1, 1)
        return self.service(tokens, part.threads) * crowded

    def _parts(self, setup: Setup) -> list[_Part]:
        """What each group has to do; groups that get no text are left out."""
        parts = []
        begin = 0
        for group in setup.groups:
            bound = np.inf if group.longest is None else group.longest
            end = int(np.searchsorted(self.lengths, bound, "right"))
            if end <= begin:
                continue
            if (begin, end) not in self._parts_of:
                # Thousands of set-ups part the texts in three or four ways.
                own = self.lengths[begin:end]
                self._parts_of[begin, end] = float(own.mean()), float(np.percentile(own, 99))
            mean, long = self._parts_of[begin, end]
            full = max(1.0, setup.batch_tokens / mean)
            parts.append(_Part(group.instances, group.threads, (end - begin) / len(self.lengths), mean, long, full))
            begin = end
        return parts


@dataclass(frozen=True)
class _Part:
    """``share`` of all texts; ``mean`` and 99th percentile (``long``) of its texts' tokens; texts of a ``full`` run."""

    instances: int
    threads: int
    share: float
    mean: float
    long: float
    full: float
