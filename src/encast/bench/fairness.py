"""Whether a system kept to the rules: its threads, its processors, all the work in every call.

What a backend says of itself counts for nothing: all of this is seen from outside of its processes, with inputs that it
cannot know, at moments that it cannot know.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from encast.batch import Batch
from encast.bench.system import System, Usage

__all__ = ["Fairness", "first_calls", "fresh_batch", "judge", "least_time"]

THREADS_SLACK = 0.5
"""Of the mean of running threads: a pool hands over while another thread still winds down."""
CPU_SLACK = 1.1
IDLE_SLACK = 0.1
"""Processors that a backend may use while others are timed."""
EXPLAINED = 0.8
"""The share of a burst, on the parent's clock, that its calls must explain, messages and gaps allowed for. What is left
are kept outputs, and an instance that begins late, by 1 ms and a twentieth of a call at most: a burst in which one
begins later is not judged. 0.98 to 1 in the median burst of 0.3 s of honest backends; 0.88 in bursts of 0.1 s on
processors that others kept busy as well."""
CACHED = 3.0
CACHED_NS = 100_000
"""A new text may cost so many times, and so much more than, one that was asked before."""
_LEAST_PAIRS, _MOST_PAIRS, _PAUSE = 5, 20, 0.2
"""A busy machine may slow five calls in a row, but seldom all of twenty in four seconds."""
PEAK_SLACK = 1.25
"""The peak is measured at another moment, at another clock rate."""
_MOST_PEAKS = 3
"""Further times that it is measured before a backend is accused: a host may take the processors for a second."""


@dataclass(frozen=True)
class Fairness:
    """The field ``fairness`` of a row. ``notes`` hold a sentence for each rule that was broken."""

    threads_budget: int
    threads_ran: float | None
    cpu_per_wall: float | None
    idle_cpu_per_wall: float | None
    ok: bool
    notes: tuple[str, ...]


def judge(
    *,
    threads: int,
    watched: Sequence[int],
    usages: Sequence[Usage],
    idle: Sequence[Usage],
    foreign_cpus: Sequence[int],
    known_ns: Sequence[int],
    fresh_ns: Sequence[int],
    typical_ns: float,
    least_ns: float | None,
) -> Fairness:
    """Applies the rules to what was seen of a system at a point; see the constants for what each leaves to chance.

    ``threads``: the budget. ``watched``: running threads at random moments. ``usages``: of all bursts, ``idle`` of the
    time between them when others were asked. ``foreign_cpus``: beyond the placement. ``known_ns`` and ``fresh_ns``:
    first calls of batches bound anew, with ids that it had been asked before and with ids that it had not.
    ``typical_ns``: the median timed call. ``least_ns``: what a call must take at the machine's instruction peak, None
    when unknown.
    """
    ran = float(np.mean(watched)) if len(watched) else None
    ratios = [usage.cpu_s / usage.wall_s for usage in usages if usage.wall_s > 0]
    per_wall = float(np.median(ratios)) if ratios else None
    idle_s = sum(usage.wall_s for usage in idle)
    idle_ratio = sum(usage.cpu_s for usage in idle) / idle_s if idle_s else None
    notes = []
    if ran is not None and ran > threads + THREADS_SLACK:
        most = round(float(np.percentile(watched, 90)))
        notes.append(f"ran {most} threads at once, {ran:.1f} on average, on a budget of {threads}")
    if per_wall is not None and per_wall > CPU_SLACK * threads:
        notes.append(f"used {per_wall:.1f} processors' time on a budget of {threads}")
    if idle_ratio is not None and idle_ratio > IDLE_SLACK:
        notes.append(f"used {idle_ratio:.1f} processors' time while others were asked")
    if foreign_cpus:
        notes.append(f"gave itself processors {sorted(foreign_cpus)}, which it was not given")
    explained = [usage.explained for usage in usages if usage.explained is not None]
    if explained and float(np.median(explained)) < EXPLAINED:
        notes.append(
            f"its calls explain {np.median(explained):.0%} of the time until their answer: work runs elsewhere"
        )
    if keeps_answers(known_ns, fresh_ns):
        known, fresh = float(np.median(known_ns)), min(fresh_ns)
        notes.append(f"keeps answers: {fresh / 1e6:.3g} ms for ids it had not seen, {known / 1e6:.3g} ms for others")
    if least_ns is not None and too_quick(typical_ns, least_ns):
        notes.append(
            f"answers in {typical_ns / 1e6:.3g} ms what takes {least_ns / 1e6:.3g} ms at the "
            "instruction peak of its threads: it does not compute it"
        )
    return Fairness(
        threads,
        None if ran is None else round(ran, 2),
        None if per_wall is None else round(per_wall, 3),
        None if idle_ratio is None else round(idle_ratio, 3),
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
    return typical_ns * PEAK_SLACK < least_ns


def least_time(typical_ns: float, least_ns: Callable[[bool], float | None]) -> float | None:
    """``least_ns`` of ``judge``; the peak is measured again while it speaks against the backend.

    ``least_ns(again)``: by the best peak so far, or also by one that is measured now.
    """
    least = least_ns(False)
    for _ in range(_MOST_PEAKS):
        if least is None or not too_quick(typical_ns, least):
            break
        least = least_ns(True)
    return least


def first_calls(system: System, batch: Batch) -> tuple[list[int], list[int]]:
    """``known_ns`` and ``fresh_ns`` of ``judge``; more of them while they speak against the backend."""
    known: list[int] = []
    fresh: list[int] = []
    while len(known) < _LEAST_PAIRS or (len(known) < _MOST_PAIRS and keeps_answers(known, fresh)):
        time.sleep(_PAUSE if len(known) >= _LEAST_PAIRS else 0)
        one, other = system.fresh_calls(fresh_batch(batch), known_first=len(known) % 2 == 0)
        known.append(one)
        fresh.append(other)
    return known, fresh


def fresh_batch(batch: Batch) -> Batch:
    """A batch of the same shape and of the same tokens in another order, which nobody can foresee."""
    ids = batch.token_ids.tolist()
    random.SystemRandom().shuffle(ids)
    return Batch(np.array(ids, np.int32), batch.cu_seqlens, batch.token_type_ids)
