"""One contender at one point: readied, checked, taken round by round, and looked at from outside."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from encast.bench.agreement import Agreement, Reference
from encast.bench.contender import ColdStart, Contender, Memory
from encast.bench.fairness import Evidence, Fairness, first_calls, judge, least_time
from encast.bench.limit import Sizes
from encast.bench.peers.base import BackendSpec
from encast.bench.scenarios.base import Point, Scenario
from encast.bench.timing import Timing, WarmUp, warm_up
from encast.bench.worker import WorkerError
from encast.errors import EncastError, ResourceError

__all__ = ["Side"]

_WATCH_SECONDS = 0.1
_WATCH_SHARE = 0.25
_TYPICAL_SECONDS = 0.1


@dataclass
class Side:
    """What is known of a contender at a point. ``failure`` is a status of ``rows.STATUSES`` and its reason.

    The steps ``ready``, ``round`` and ``finish`` return whether it may go on; one that failed is closed. They raise
    ``ResourceError`` for what is no failure of the backend.
    """

    spec: BackendSpec
    contender: Contender | None = None
    cold: ColdStart | None = None
    failure: tuple[str, str] | None = None
    warm: WarmUp | None = None
    agreement: Agreement | None = None
    fairness: Fairness | None = None
    memory: Memory | None = None
    samples: dict[int, Any] = field(default_factory=dict)
    """Of every round that it was in, by number."""
    places: dict[int, str] = field(default_factory=dict)
    """Of the rounds that count, where the processors were."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    _watched: list[int] = field(default_factory=list)
    _before: tuple[int, int] = 0, 0
    """Usages and rests of earlier points and of the warm-up."""

    def ready(self, point: Point, scenario: Scenario, timing: Timing, reference: Reference) -> bool:
        """Opens the contender when it is not, binds the batches, warms up, and compares every output."""

        def step(contender: Contender) -> None:
            contender.looked_at = reference.sequences
            if not contender.is_open:
                self.cold = contender.open(point.batches)
            else:
                contender.forget_peak()
            contender.bind(point.batches, split=point.split)
            self.warm = warm_up(contender, timing)
            contender.verify()
            self._compare(contender, reference)
            if self.failure is None:
                contender.settle_memory()
            self._before = len(contender.usages), len(contender.rests)

        return self._attempt(step)

    def round(self, number: int, point: Point, scenario: Scenario) -> bool:
        """One round; now and then its running threads are counted afterwards, in a burst like any other."""

        def step(contender: Contender) -> None:
            self.samples[number] = scenario.round(contender, point)
            if number == 0 or random.random() < _WATCH_SHARE:
                self._watched += contender.watch(_WATCH_SECONDS)

        return self._attempt(step)

    def finish(
        self, point: Point, reference: Reference, sizes: Sizes, quickest: Callable[[bool], float] | None
    ) -> bool:
        """Compares outputs of the timed calls, and judges what was seen of one that agrees.

        ``quickest``: see ``least_time``, of an instance; None where what it cannot exceed is not known.
        """

        def step(contender: Contender) -> None:
            self._compare(contender, reference)
            self.facts = contender.facts()
            if self.failure is not None:
                return  # wrong answers are not judged
            usages, rests = (
                found[begin:] for found, begin in zip((contender.usages, contender.rests), self._before, strict=True)
            )
            contender.bind(point.batches, split=point.split)  # a scenario may have bound others
            times = contender.burst(seconds=_TYPICAL_SECONDS)
            parts = contender.parts
            known, fresh = first_calls(parts[0], contender.fresh_calls)
            least = min(sizes.operations(part) for part in parts)
            typical = float(np.median(list(itertools.chain.from_iterable(times))))
            self.fairness = judge(
                Evidence(
                    threads=contender.threads,
                    watched=self._watched,
                    usages=usages,
                    rests=rests,
                    strays=sorted(contender.strays()),
                    known_ns=known,
                    fresh_ns=fresh,
                    typical_ns=typical,
                    least_ns=None if quickest is None else least_time(least, typical, quickest),
                )
            )
            self.memory = contender.memory()
            if not self.fairness.ok:
                self.failure = "unfair", f"{self.spec.name}: {'; '.join(self.fairness.notes)}"

        return self._attempt(step)

    def _compare(self, contender: Contender, reference: Reference) -> None:
        """Keeps the worst agreement that was found; a scenario's own batches have no reference, and do not count."""
        found = reference.compare(contender.outputs(), self.spec.dtype)
        if self.agreement is None:
            self.agreement = found
        elif found.tokens:
            self.agreement = self.agreement.worst(found)
        if not self.agreement.ok:
            self.failure = (
                "disagrees",
                f"{self.spec.name}: the output of its timed calls {self.agreement.reason} for {self.spec.dtype}",
            )

    def _attempt(self, step: Callable[[Contender], None]) -> bool:
        assert self.contender is not None
        try:
            step(self.contender)
        except WorkerError as error:
            self.failure = error.status, str(error)
        except ResourceError:
            raise  # the machine's, so the row would be wrong
        except EncastError as error:
            self.failure = "failed", str(error)
        if self.failure is not None and self.failure[0] not in ("disagrees", "unfair"):
            # Answers of other instances may still be on their way.
            self.contender.close()
        return self.failure is None
