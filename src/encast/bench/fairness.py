"""Whether a contender kept to the rules: its threads, its processors, all the work in every call.

What a backend says of itself counts for nothing: all of this is seen from outside of its processes, with inputs that it
cannot know, at moments that it cannot know.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from encast.batch import Batch
from encast.bench.contender import Usage

__all__ = ["Evidence", "Fairness", "first_calls", "fresh_batches", "judge", "keeps_answers"]

THREADS_SLACK = 0.5
"""Of the mean of running threads: a pool hands over while another thread still winds down."""
CPU_SLACK = 1.1
IDLE_SLACK = 0.1
"""Processors that a backend may use while others are timed."""
EXPLAINED = 0.8
"""The share of a burst, on the parent's clock, that its calls must explain, messages and gaps allowed for. What is left
are kept outputs, and an instance that begins late, by a twentieth of a call at most: 0.98 to 1 in the median burst of
0.3 s of honest backends; 0.88 in bursts of 0.1 s on processors that others kept busy as well."""
CACHED = 3.0
CACHED_NS = 100_000
"""A new text may cost so many times, and so much more than, one that was asked before."""
_PAIRS = 5
_PAUSES = (0.0, 0.3, 1.0, 3.0)
"""Seconds before each look at first calls, or at a peak; none but the first is taken where nothing speaks against the
backend. A busy machine may slow five calls in a row, but seldom all of twenty in four seconds, nor halve a peak for so
long."""
PEAK_SLACK = 1.25
"""The peak is measured at another moment, at another clock rate."""


@dataclass(frozen=True)
class Evidence:
    """What was seen of a contender at a point.

    ``threads``: the budget. ``watched``: running threads at random moments.
    ``usages``: of all bursts, ``rests`` of the time between them when others were asked. ``strays``: processors beyond
    the placement. ``known_ns`` and ``fresh_ns``: first calls of batches bound anew, with ids that it had been asked
    before and with ids that it had not. ``typical_ns``: the median timed call. ``least_ns``: what a call must take at
    the machine's instruction peak, None when unknown.
    """

    threads: int
    watched: Sequence[int]
    usages: Sequence[Usage]
    rests: Sequence[Usage]
    strays: Sequence[int]
    known_ns: Sequence[int]
    fresh_ns: Sequence[int]
    typical_ns: float
    least_ns: float | None


@dataclass(frozen=True)
class Fairness:
    """The field ``fairness`` of a row. ``notes`` hold a sentence for each rule that was broken."""

    threads_budget: int
    threads_ran: float | None
    cpu_per_wall: float | None
    idle_cpu_per_wall: float | None
    ok: bool
    notes: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "notes": list(self.notes)}


def judge(evidence: Evidence) -> Fairness:
    """Applies the rules; see the constants for what each of them leaves to chance."""
    ran = float(np.mean(evidence.watched)) if len(evidence.watched) else None
    ratios = [usage.cpu_s / usage.wall_s for usage in evidence.usages if usage.wall_s > 0]
    per_wall = float(np.median(ratios)) if ratios else None
    rested = sum(rest.wall_s for rest in evidence.rests)
    idle = sum(rest.cpu_s for rest in evidence.rests) / rested if rested else None
    notes = []
    if ran is not None and ran > evidence.threads + THREADS_SLACK:
        most = round(float(np.percentile(evidence.watched, 90)))
        notes.append(f"ran {most} threads at once, {ran:.1f} on average, on a budget of {evidence.threads}")
    if per_wall is not None and per_wall > CPU_SLACK * evidence.threads:
        notes.append(f"used {per_wall:.1f} processors' time on a budget of {evidence.threads}")
    if idle is not None and idle > IDLE_SLACK:
        notes.append(f"used {idle:.1f} processors' time while others were asked")
    if evidence.strays:
        notes.append(f"gave itself processors {sorted(evidence.strays)}, which it was not given")
    explained = [usage.explained for usage in evidence.usages if usage.explained is not None]
    if explained and float(np.median(explained)) < EXPLAINED:
        notes.append(
            f"its calls explain {np.median(explained):.0%} of the time until their answer: work runs elsewhere"
        )
    if keeps_answers(evidence.known_ns, evidence.fresh_ns):
        known, fresh = float(np.median(evidence.known_ns)), min(evidence.fresh_ns)
        notes.append(f"keeps answers: {fresh / 1e6:.3g} ms for ids it had not seen, {known / 1e6:.3g} ms for others")
    if evidence.least_ns is not None and too_quick(evidence.typical_ns, evidence.least_ns):
        notes.append(
            f"answers in {evidence.typical_ns / 1e6:.3g} ms what takes {evidence.least_ns / 1e6:.3g} ms at the "
            "instruction peak of its threads: it does not compute it"
        )
    return Fairness(
        evidence.threads,
        None if ran is None else round(ran, 2),
        None if per_wall is None else round(per_wall, 3),
        None if idle is None else round(idle, 3),
        not notes,
        tuple(notes),
    )


def keeps_answers(known_ns: Sequence[int], fresh_ns: Sequence[int]) -> bool:
    """Whether texts that were asked before are answered without the work.

    Of new texts the quickest counts: others may have been interrupted, and none of a cheat's is quick.
    """
    if not known_ns or not fresh_ns:
        return False
    known, fresh = float(np.median(known_ns)), min(fresh_ns)
    return fresh > CACHED * known and fresh - known > CACHED_NS


def too_quick(typical_ns: float, least_ns: float) -> bool:
    """Whether calls take less than they can, the peak's own noise allowed for."""
    return typical_ns * PEAK_SLACK < least_ns


def least_time(
    operations: float,
    typical_ns: float,
    quickest: Callable[[bool], float],
    wait: Callable[[float], None] = time.sleep,
) -> float:
    """``least_ns`` of ``Evidence``, of a peak that is measured anew, later, while it speaks against the backend.

    ``quickest(anew)``: the most operations a second that were measured, now or before.
    """
    least = 1e9 * operations / quickest(False)
    for pause in _PAUSES:
        if not too_quick(typical_ns, least):
            break
        wait(pause)
        least = 1e9 * operations / quickest(True)
    return least


def first_calls(
    batch: Batch,
    ask: Callable[[Sequence[Batch]], Sequence[tuple[int, int]]],
    wait: Callable[[float], None] = time.sleep,
) -> tuple[list[int], list[int]]:
    """``known_ns`` and ``fresh_ns`` of ``Evidence``, looked at again, later, while they speak against the backend.

    ``ask`` is ``Contender.fresh_calls``.
    """
    known: list[int] = []
    fresh: list[int] = []
    for pause in _PAUSES:
        wait(pause)
        for one, other in ask(fresh_batches(batch, _PAIRS)):
            known.append(one)
            fresh.append(other)
        if not keeps_answers(known, fresh):
            break
    return known, fresh


def fresh_batches(batch: Batch, count: int) -> list[Batch]:
    """Batches of the same shape and of the same tokens in another order, which nobody can foresee."""
    rng = random.SystemRandom()
    found = []
    for _ in range(count):
        ids = batch.token_ids.tolist()
        rng.shuffle(ids)
        found.append(Batch(np.array(ids, np.int32), batch.cu_seqlens, batch.token_type_ids))
    return found
