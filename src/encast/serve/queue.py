"""What runs next, where, and what is refused: pure bookkeeping, without threads, sockets or a clock of its own."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from encast.serve.cost import CostModel
from encast.serve.places import Held, Place, Places

__all__ = ["Batch", "Counters", "Job", "Part", "Queue", "QueueLimits", "Refused"]

_CLASSES = (64, 256)
"""Bounds of the length classes, in tokens, besides those of the groups of instances. Rows of two classes never share a
batch, so that a short text does not wait for a long one beside it."""


@dataclass(frozen=True)
class QueueLimits:
    """``batch_tokens`` bounds a batch; one longer row runs alone. New runs are refused beyond ``max_tokens`` that wait,
    and beyond ``max_wait_s`` of expected wait. ``slowdown``: for how many times its own cost a row lets later, smaller
    ones pass, though not for more than ``max_wait_s`` and its cost; 0 for first come, first served. ``max_delay_s``: a
    batch waits so long for companions.
    """

    batch_tokens: int = 1024
    max_tokens: int = 1 << 18
    max_wait_s: float = 2.0
    slowdown: float = 100.0
    max_delay_s: float = 0.0


_OVERHEAD = 0.02
"""Of a batch's time at most, for which batches need no more tokens."""

_OWN_S = 1e-4
"""What a batch costs besides its run: to be taken, joined and answered."""


class Job:
    """A run that waits: ``lengths`` of its rows in tokens; the rest as in ``wire.Submit``. ``owner`` is the caller's.

    ``came``, ``begun``: when it was submitted and when the last of its rows so far was begun; ``longest``: of its
    batches so far that which took longest, as (seconds, tokens).
    """

    __slots__ = (
        "arrived", "before", "begun", "came", "deadline", "lengths", "longest", "output", "over", "owner", "strands",
        "tokens", "unfinished",
    )  # fmt: skip

    def __init__(
        self, output: str, lengths: Sequence[int], arrived: float, deadline: float, before: int = 0, owner: Any = None
    ) -> None:
        self.output, self.lengths, self.arrived, self.deadline = output, lengths, arrived, deadline
        self.before, self.owner = before, owner
        self.tokens = sum(lengths)
        self.unfinished = len(lengths)
        self.came = self.begun = 0.0
        self.longest = (0.0, 0)
        self.over = False
        self.strands: list[_Strand] = []


@dataclass(frozen=True)
class Refused:
    """``wait_s``: the expected wait; ``retry_after``: seconds after which there may be room. ``late``: the answer would
    come after the run's own deadline.
    """

    wait_s: float
    retry_after: float
    late: bool


@dataclass
class Part:
    """Rows of one job in a batch, rising."""

    job: Job
    rows: list[int]


@dataclass
class Batch:
    """Rows that run together on ``place``; ``expected`` seconds from ``begun`` on."""

    place: Place
    output: str
    parts: list[Part]
    tokens: int
    begun: float
    expected: float


@dataclass
class Counters:
    """Since the start."""

    runs: int = 0
    rows: int = 0
    tokens: int = 0
    batches: int = 0
    refused: int = 0
    expired: int = 0
    cancelled: int = 0
    batch_tokens: list[int] = field(default_factory=list)
    """Of every batch since they were last taken away."""
    busy_s: list[float] = field(default_factory=list)
    """Of the instances of every group, summed."""


class _Strand:
    """The rows of one job that belong to one class: their keys rise, so that only the next one stands in the heap."""

    __slots__ = ("at", "job", "keys", "rows", "tokens")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rows: list[int] = []
        self.keys: list[float] = []
        self.at = 0
        self.tokens = 0


class _Line:
    """What waits for one output and length class: a heap of strands by their next row's key."""

    def __init__(self, output: str, longest: int, covering: list[int]) -> None:
        self.output, self.longest, self.covering = output, longest, covering
        self.heap: list[tuple[float, int, _Strand]] = []
        self.tokens = self.rows = self.dead = 0

    def head(self) -> tuple[float, int, _Strand] | None:
        heap = self.heap
        while heap and heap[0][2].job.over:
            heapq.heappop(heap)
            self.dead -= 1
        return heap[0] if heap else None

    def drop(self, strand: _Strand) -> None:
        """The strand's job is over; its rows leave now, its place in the heap with the next clearing."""
        if strand.at == len(strand.rows):
            return
        self.tokens -= strand.tokens
        self.rows -= len(strand.rows) - strand.at
        self.dead += 1
        if self.dead > 16 and 2 * self.dead > len(self.heap):
            self.heap = [entry for entry in self.heap if not entry[2].job.over]
            heapq.heapify(self.heap)
            self.dead = 0

    def pop_row(self) -> tuple[Job, int]:
        """The row with the smallest key; there must be one."""
        _, number, strand = self.heap[0]
        row = strand.rows[strand.at]
        length = strand.job.lengths[row]
        strand.at += 1
        strand.tokens -= length
        self.tokens -= length
        self.rows -= 1
        if strand.at < len(strand.rows):
            heapq.heapreplace(self.heap, (strand.keys[strand.at], number, strand))
        else:
            heapq.heappop(self.heap)
        return strand.job, row


class Queue:
    """The runs that wait and the batches under way on ``places``. Every method takes ``now``, seconds of one clock."""

    def __init__(self, places: Places, limits: QueueLimits, *, longest_text: int) -> None:
        self.places, self.limits = places, limits
        self.cost = CostModel()
        self.counters = Counters(busy_s=[0.0] * len(places.groups))
        self.due = math.inf
        """When to take again although nothing has come or ended: a batch's wait for companions ends."""
        own = {group.longest for group in places.groups if group.longest is not None}
        # First come, first served has no classes but those that the groups need: short texts would pass long ones.
        classes = {*_CLASSES, *own} if limits.slowdown else own
        self._bounds = sorted(bound for bound in classes if bound < longest_text)
        self._bounds.append(max(longest_text, *own) if own else longest_text)
        self._lines: dict[tuple[str, int], _Line] = {}
        self._jobs: dict[Job, None] = {}
        self._batches: list[Batch] = []
        self.soonest = math.inf
        """No deadline of a job is before it."""
        self._numbers = count()

    # What comes and goes

    @property
    def tokens(self) -> int:
        """That wait."""
        return sum(line.tokens for line in self._lines.values())

    @property
    def rows(self) -> int:
        """That wait."""
        return sum(line.rows for line in self._lines.values())

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self._jobs and not self._batches

    def backlog_s(self, now: float) -> float:
        """The expected wait: the work that waits and that is under way, over the cores."""
        work = 0.0
        for line in self._lines.values():
            if line.tokens:
                group = line.covering[0]
                overhead, token = self.cost.line(group, line.output)
                batches = math.ceil(line.tokens / self.limits.batch_tokens)
                work += (token * line.tokens + overhead * batches) * self.places.groups[group].threads
        for batch in self._batches:
            work += max(0.0, batch.begun + batch.expected - now) * batch.place.threads
        return work / self.places.cores

    def submit(self, job: Job, now: float) -> Refused | None:
        """Takes the job in, or says why not. A job with ``before`` > 0 belongs to an accepted request and is taken."""
        limits = self.limits
        if not job.before:
            wait = self.backlog_s(now)
            late = now + wait > job.deadline
            waiting = self.tokens
            full = waiting > 0 and waiting + job.tokens > limits.max_tokens
            if late or full or wait > limits.max_wait_s:
                self.counters.refused += 1
                return Refused(wait, max(0.05, wait - 0.9 * limits.max_wait_s), late)
        job.came = now
        overhead, token = self.cost.line(0, job.output)
        tokens = job.before
        strands: dict[int, _Strand] = {}
        for row, length in enumerate(job.lengths):
            tokens += length
            bound = next((bound for bound in self._bounds if length <= bound), self._bounds[-1])
            strand = strands.get(bound)
            if strand is None:
                strand = strands[bound] = _Strand(job)
            strand.rows.append(row)
            cost = overhead + token * tokens
            strand.keys.append(job.arrived + min(limits.slowdown * cost, limits.max_wait_s + cost))
            strand.tokens += length
        for bound, strand in strands.items():
            line = self._line(job.output, bound)
            line.tokens += strand.tokens
            line.rows += len(strand.rows)
            heapq.heappush(line.heap, (strand.keys[0], next(self._numbers), strand))
            job.strands.append(strand)
        self._jobs[job] = None
        self.soonest = min(self.soonest, job.deadline)
        self.counters.runs += 1
        self.counters.rows += len(job.lengths)
        self.counters.tokens += job.tokens
        return None

    def cancel(self, job: Job) -> None:
        """Nobody wants the job any more. Its rows that run already are computed for nobody."""
        if not job.over:
            self.counters.cancelled += 1
            self._leave(job)

    def fail(self, job: Job) -> bool:
        """A batch of the job failed; returns whether it was still wanted."""
        if job.over:
            return False
        self._leave(job)
        return True

    def expire(self, now: float) -> list[Job]:
        """The jobs whose deadline has passed, which leave."""
        if now < self.soonest:
            return []
        gone = [job for job in self._jobs if job.deadline <= now]
        for job in gone:
            self._leave(job)
        self.counters.expired += len(gone)
        self.soonest = min((job.deadline for job in self._jobs), default=math.inf)
        return gone

    def _leave(self, job: Job) -> None:
        job.over = True
        self._jobs.pop(job, None)
        for strand in job.strands:
            bound = self._bound(job.lengths[strand.rows[0]])
            self._line(job.output, bound).drop(strand)
        job.strands = []

    def _bound(self, length: int) -> int:
        return next((bound for bound in self._bounds if length <= bound), self._bounds[-1])

    def _line(self, output: str, bound: int) -> _Line:
        line = self._lines.get((output, bound))
        if line is None:
            line = self._lines[output, bound] = _Line(output, bound, self.places.covering(bound))
        return line

    # Batches

    def take(self, now: float) -> Batch | None:
        """The next batch that may start, which is then under way; None when nothing can start now."""
        self.due = math.inf
        heads = []
        for line in self._lines.values():
            head = line.head()
            if head is not None:
                heads.append((head[0], head[1], line))
        if not heads:
            return None
        heads.sort(key=lambda head: head[:2])
        held = Held(set())
        lone = not self._batches and len(heads) == 1 and heads[0][2].rows == 1
        for _, _, line in heads:
            if self.limits.max_delay_s and not self._ripe(line, now):
                continue
            place, abreast = self.places.choose(line.covering, widest=lone, held=held)
            if place is not None:
                return self._fill(line, place, abreast, now)
            self.places.hold(line.covering, held)
        return None

    def _ripe(self, line: _Line, now: float) -> bool:
        if line.tokens >= self.limits.batch_tokens:
            return True
        oldest = min(strand.job.came for _, _, strand in line.heap if not strand.job.over)
        ripe = oldest + self.limits.max_delay_s
        if ripe <= now:
            return True
        self.due = min(self.due, ripe)
        return False

    def _fill(self, line: _Line, place: Place, abreast: int, now: float) -> Batch:
        # While several instances are free, they share what waits.
        most = min(self._enough(place, line.output), math.ceil(line.tokens / abreast))
        parts: dict[Job, Part] = {}
        tokens = 0
        while (head := line.head()) is not None:
            strand = head[2]
            length = strand.job.lengths[strand.rows[strand.at]]
            if tokens and tokens + length > most:
                break
            job, row = line.pop_row()
            tokens += length
            part = parts.get(job)
            if part is None:
                part = parts[job] = Part(job, [])
                job.begun = now
            part.rows.append(row)
        self.places.start(place)
        expected = self.cost.seconds(place.group, line.output, tokens)
        batch = Batch(place, line.output, list(parts.values()), tokens, now, expected)
        self._batches.append(batch)
        return batch

    def _enough(self, place: Place, output: str) -> int:
        """Tokens from which on a batch is no quicker by the token, so that a longer one only makes others wait."""
        overhead, token = self.cost.line(place.group, output)
        enough = max(overhead, _OWN_S) / token * (1 / _OVERHEAD - 1)
        return max(1, int(min(self.limits.batch_tokens, enough)))

    def finish(self, batch: Batch, now: float, *, failed: bool = False, disturbed: bool = False) -> list[Job]:
        """The batch has ended; returns the jobs that are whole with it. ``failed``: it gave no rows. ``disturbed``: its
        time is not that of one run of all its rows.
        """
        self._batches.remove(batch)
        self.places.end(batch.place)
        seconds = now - batch.begun
        counters = self.counters
        counters.batches += 1
        counters.batch_tokens.append(batch.tokens)
        counters.busy_s[batch.place.group] += seconds
        if failed:
            return []
        if not disturbed:
            self.cost.observe(batch.place.group, batch.output, batch.tokens, seconds)
        whole = []
        for part in batch.parts:
            job = part.job
            job.unfinished -= len(part.rows)
            job.longest = max(job.longest, (seconds, batch.tokens))
            if not job.over and not job.unfinished:
                job.over = True
                self._jobs.pop(job)
                job.strands = []  # they hold the job, and so its arrays
                whole.append(job)
        return whole
