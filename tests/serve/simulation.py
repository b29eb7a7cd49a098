"""The queue under a simulated clock: arrivals in, latencies out, with batches that take what a line says."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from encast.backends.groups import InstanceGroup
from encast.serve.places import Places
from encast.serve.queue import Batch, Job, Queue, QueueLimits

__all__ = [
    "LATER",
    "OUTPUT",
    "OVERHEAD_S",
    "TOKEN_S",
    "Outcome",
    "first_come",
    "job",
    "mixed",
    "on",
    "percentile",
    "queue_on",
    "simulate",
    "take_all",
]

OUTPUT = "embedding"
LATER = 1e6
OVERHEAD_S, TOKEN_S = 120e-6, 25e-6
"""As measured of MiniLM in int8 on one core of the machine that README.md names."""


def job(*lengths: int, arrived: float = 0.0, before: int = 0, output: str = OUTPUT, deadline: float = LATER) -> Job:
    return Job(output, lengths, arrived, deadline, before)


def take_all(queue: Queue, now: float = 0.0) -> list[Batch]:
    batches = []
    while (batch := queue.take(now)) is not None:
        batches.append(batch)
    return batches


def on(groups: list[InstanceGroup], cpus: list[list[list[int]]], cores: int = 2, **limits: float) -> Queue:
    return Queue(Places(groups, cpus, cores), QueueLimits(**limits), longest_text=512)  # type: ignore[arg-type]


def queue_on(cores: int, limits: QueueLimits | None = None) -> Queue:
    """A queue on the default set-up of so many cores, which knows what batches take."""
    groups = [InstanceGroup(cores, 1, 512), InstanceGroup(1, min(cores, 8), None)]
    cpus = [[[cpu] for cpu in range(cores)], [list(range(min(cores, 8)))]]
    queue = Queue(Places(groups, cpus, cores), limits or QueueLimits(), longest_text=512)
    for group in range(2):
        for tokens in (8, 64, 256):
            queue.cost.observe(group, OUTPUT, tokens, _seconds(tokens, groups[group].threads))
    return queue


def _seconds(tokens: int, threads: int = 1) -> float:
    return OVERHEAD_S + TOKEN_S * tokens / threads**0.9


@dataclass
class Outcome:
    """``latency``: of every job that was answered, seconds; ``refused`` and ``expired`` ones have none."""

    latency: dict[Job, float] = field(default_factory=dict)
    refused: list[Job] = field(default_factory=list)
    expired: list[Job] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    seconds: float = 0.0

    def of(self, tokens: int) -> list[float]:
        """The latencies of jobs of one size."""
        return [seconds for job, seconds in self.latency.items() if job.tokens == tokens]


def simulate(queue: Queue, arrivals: Sequence[tuple[float, Job]]) -> Outcome:
    """Runs all of it; ties in the order of ``arrivals``."""
    outcome = Outcome()
    events: list[tuple[float, int, Any]] = [(at, number, job) for number, (at, job) in enumerate(arrivals)]
    heapq.heapify(events)
    numbers = count()
    ends: dict[Batch, float] = {}

    def end(batch: Batch, at: float) -> None:
        ends[batch] = at
        heapq.heappush(events, (at, len(arrivals) + next(numbers), batch))

    def begin(batch: Batch) -> None:
        outcome.batches.append(batch)
        seconds = _seconds(batch.tokens, batch.place.threads)
        end(batch, now + seconds)
        if batch.outer is not None:
            end(batch.outer, ends[batch.outer] + seconds)

    while events:
        now, _, what = heapq.heappop(events)
        if isinstance(what, Batch) and now < ends[what]:
            continue  # it has stopped since
        outcome.expired += queue.expire(now)
        if isinstance(what, Batch):
            outcome.latency |= {job: now - job.arrived for job in queue.finish(what, now)}
            if what.outer is not None and (batch := queue.take_between(what.outer, now)) is not None:
                begin(batch)
        elif queue.submit(what, now) is not None:
            outcome.refused.append(what)
        while (batch := queue.take(now)) is not None:
            begin(batch)
        for outer in queue.stopping(now):
            if (batch := queue.take_between(outer, now)) is not None:
                begin(batch)
        outcome.seconds = now
    return outcome


def first_come(arrivals: Sequence[tuple[float, Job]], cores: int, most: int = 1024) -> Outcome:
    """What a server does that fills each batch in the order of arrival."""
    outcome = Outcome()
    events: list[tuple[float, int, Any]] = [(at, number, job) for number, (at, job) in enumerate(arrivals)]
    heapq.heapify(events)
    number, line, free = len(events), deque[Job](), cores
    while events:
        now, _, what = heapq.heappop(events)
        if isinstance(what, list):
            free += 1
            outcome.latency |= {job: now - job.arrived for job in what}
        else:
            line.append(what)
        while free and line:
            batch = [line.popleft()]
            while line and sum(job.tokens for job in batch) + line[0].tokens <= most:
                batch.append(line.popleft())
            free -= 1
            number += 1
            heapq.heappush(events, (now + _seconds(sum(job.tokens for job in batch)), number, batch))
        outcome.seconds = now
    return outcome


def mixed(load: float, cores: int, count: int, seed: int = 1) -> list[tuple[float, Job]]:
    """Poisson arrivals, half of 12 tokens and half of 400; ``load``: their work over that of the cores."""
    source = random.Random(seed)
    rate = load * cores / ((_seconds(12) + _seconds(400)) / 2)
    at, arrivals = 0.0, []
    for _ in range(count):
        at += source.expovariate(rate)
        arrivals.append((at, Job(OUTPUT, [12 if source.random() < 0.5 else 400], at, at + 30)))
    return arrivals


def percentile(values: Sequence[float], at: float) -> float:
    return float(np.percentile(values, at))
