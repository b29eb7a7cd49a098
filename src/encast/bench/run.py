"""A run: one system at one point, readied, checked, taken round by round, and looked at from outside."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from encast.bench.agreement import Agreement, Reference
from encast.bench.fairness import Fairness, first_calls, judge, least_time
from encast.bench.peers.base import BackendSpec
from encast.bench.scenarios.base import Point, Scenario
from encast.bench.system import ColdStart, System
from encast.bench.timing import Timing, warm_up
from encast.bench.worker import WorkerError
from encast.errors import EncastError, InputError, ResourceError

__all__ = ["Run"]

_WATCH_SECONDS = 0.1
_WATCH_SHARE = 0.25
_TYPICAL_SECONDS = 0.1


@dataclass
class Run:
    """What is known of a system at a point. ``failure`` is a status of ``rows.STATUSES`` and its reason.

    The steps ``ready``, ``round`` and ``finish`` return whether it may go on; one that failed is closed. They raise
    ``ResourceError`` for what is no failure of the backend.
    """

    spec: BackendSpec
    system: System | None = None
    cold: ColdStart | None = None
    """Of its process; without a first call where that was of another point's batches."""
    failure: tuple[str, str] | None = None
    warm: Mapping[str, Any] | None = None
    agreement: Agreement | None = None
    fairness: Fairness | None = None
    memory: Mapping[str, Any] | None = None
    samples: dict[int, Any] = field(default_factory=dict)
    """Of every round that it was in, by number."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    _watched: list[int] = field(default_factory=list)
    _before: tuple[int, int] = 0, 0
    """Usages, and those when idle, of earlier points and of the warm-up."""

    @property
    def measured(self) -> bool:
        """Whether it has figures: also where it was unfair, so that a reader sees how."""
        return bool(self.samples) and (self.failure is None or self.failure[0] == "unfair")

    def ready(self, point: Point, timing: Timing, reference: Reference) -> bool:
        """Opens the system when it is not, binds the batches, warms up, and compares every output."""

        def step(system: System) -> None:
            system.checked = reference.sequences
            if system.cold is None or not system.is_open:
                self.cold = system.open(point.batches)
            else:
                self.cold = replace(system.cold, first_call_s=None)
                system.forget_peak()
            system.bind(point.batches, split=point.split)
            self.warm = warm_up(system, timing.warm_up_seconds)
            system.verify()
            self._compare(system, reference)
            if self.failure is None:
                system.limit_growth()
            self._before = len(system.usages), len(system.idle)

        return self._attempt(step)

    def round(self, number: int, point: Point, scenario: Scenario) -> bool:
        """One round; now and then its running threads are counted afterwards, in a burst like any other."""

        def step(system: System) -> None:
            system.round_number = number
            self.samples[number] = scenario.round(system, point)
            figure = scenario.figure(self.samples[number])
            if not math.isfinite(figure):
                raise InputError(
                    f"scenario {type(scenario).__name__}: `figure` returned {figure} for round {number} of "
                    f"{self.spec.name}; correct it to return a finite number"
                )
            if number == 0 or random.random() < _WATCH_SHARE:
                self._watched += system.watch(_WATCH_SECONDS)

        return self._attempt(step)

    def finish(self, point: Point, reference: Reference, least_ns: Callable[[System, bool], float | None]) -> bool:
        """Compares outputs of the timed calls, and judges what was seen of one that agrees.

        ``least_ns(system, again)``: see ``least_time``.
        """

        def step(system: System) -> None:
            self._compare(system, reference)
            if self.failure is not None:
                return  # wrong answers are not judged
            usages, idle = system.usages[self._before[0] :], system.idle[self._before[1] :]
            system.bind(point.batches, split=point.split)  # a scenario may have bound others
            times = system.burst(seconds=_TYPICAL_SECONDS)
            typical = float(np.median(list(itertools.chain.from_iterable(times))))
            known, fresh = first_calls(system, system.parts[0])
            self.fairness = judge(
                threads=system.threads,
                watched=self._watched,
                usages=usages,
                idle=idle,
                foreign_cpus=sorted(system.foreign_cpus()),
                known_ns=known,
                fresh_ns=fresh,
                typical_ns=typical,
                least_ns=least_time(typical, lambda again: least_ns(system, again)),
            )
            self.memory = system.memory()
            if not self.fairness.ok:
                self.failure = "unfair", f"{self.spec.name}: {'; '.join(self.fairness.notes)}"

        return self._attempt(step)

    def _compare(self, system: System, reference: Reference) -> None:
        """Keeps the worst agreement that was found; a scenario's own batches have no reference, and do not count."""
        self.facts = system.facts()  # also of one that disagrees
        found = reference.compare(system.outputs(), self.spec.dtype)
        if self.agreement is None:
            self.agreement = found
        elif found.tokens:
            self.agreement = self.agreement.worst(found)
        if not self.agreement.ok:
            self.failure = (
                "disagrees",
                f"{self.spec.name}: the output of its timed calls {self.agreement.reason} for {self.spec.dtype}",
            )

    def _attempt(self, step: Callable[[System], None]) -> bool:
        assert self.system is not None
        try:
            step(self.system)
        except WorkerError as error:
            self.failure = error.status, str(error)
        except ResourceError:
            raise  # the machine's, so the row would be wrong
        except EncastError as error:
            self.failure = "failed", str(error)
        if self.failure is not None and self.failure[0] not in ("disagrees", "unfair"):
            # Answers of other instances may still be on their way.
            self.system.close()
        return self.failure is None
