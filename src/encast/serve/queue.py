"""What runs next, where, and what is refused: pure bookkeeping, without threads, sockets or a clock of its own."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import count

from encast.serve.cost import CostModel
from encast.serve.lines import Job, Line, Strand
from encast.serve.places import Held, Place, Places

__all__ = ["Batch", "Counters", "Job", "Part", "Queue", "QueueLimits", "Refused"]

_CLASSES = (64, 256)
"""Bounds of the length classes, in tokens, besides those of the groups of instances. Rows of two classes never share a
batch, so that a short text does not wait for a long one beside it."""


@dataclass(frozen=True)
class QueueLimits:
    """``batch_tokens`` bounds a batch; one longer row runs alone. New runs are refused beyond ``max_tokens`` that wait,
    and when they would be answered later after their arrival than 0.7 ``max_wait_s`` and the time that they take alone,
    or would make an accepted one later than 0.8 of it and its own time. So what alone takes up to a fifth of
    ``max_wait_s`` is answered within it. What comes while nothing waits is taken. ``slowdown``: for how many times its
    own cost a row lets later, smaller ones pass, though not for more than half of ``max_wait_s`` and the time in which
    its run would get to it alone; 0 for first come, first served. ``max_delay_s``: so long a batch waits for
    companions.
    """

    batch_tokens: int = 1024
    max_tokens: int = 1 << 18
    max_wait_s: float = 2.0
    slowdown: float = 100.0
    max_delay_s: float = 0.0


_OVERHEAD = 0.05
"""Of a batch's time at most, for which batches need no more tokens."""

_WAIT, _RESERVE, _PASSED = 0.8, 0.1, 0.5
"""Of ``max_wait_s``: how long an accepted run may wait, its own time apart; what of that is kept for smaller runs that
come later; and for how long they may pass."""

_ROOM = 0.1
"""Of ``max_wait_s``, at least: when what was refused may try again. Room for a single request is soon taken."""

_SHORTER = 0.5
"""Of what is left of a batch's time, at most, takes a batch for which it stops."""

_STEPS = 20
"""Of ``max_wait_s``: how finely the work that waits is known by its keys."""

_LEAST_STEP_S = 1e-3

_OWN_S = 1e-4
"""What a batch costs besides its run: to be taken, joined and answered."""


@dataclass(frozen=True)
class Refused:
    """``wait_s``: the expected time to the answer; ``retry_after``: seconds after which there may be room; ``late``:
    the answer would come after the run's own deadline.
    """

    wait_s: float
    retry_after: float
    late: bool


@dataclass
class Part:
    """Rows of one job in a batch, rising."""

    job: Job
    rows: list[int]


@dataclass(eq=False)
class Batch:
    """Rows that run together on ``place``; ``expected`` seconds from ``begun`` on; ``key``: its first row's. ``outer``:
    the batch on the same cores that stops for it. ``stopped_at``: since when it stops itself, ``stopped_s``: for how
    long it has before.
    """

    place: Place
    output: str
    parts: list[Part]
    tokens: int
    begun: float
    expected: float
    key: float
    outer: Batch | None = None
    stopped_at: float | None = None
    stopped_s: float = 0.0

    def stopped(self, now: float) -> float:
        """For how many seconds it has not run for others."""
        return self.stopped_s + (0.0 if self.stopped_at is None else now - self.stopped_at)

    def left(self, now: float) -> float:
        """Seconds that it is still expected to take, others apart."""
        return max(0.0, self.begun + self.stopped(now) + self.expected - now)


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
        self._lines: dict[tuple[str, int], Line] = {}
        self._jobs: dict[Job, None] = {}
        self._batches: list[Batch] = []
        self.soonest = math.inf
        """No deadline of a job is before it."""
        self._numbers = count()
        self._step_s = max(limits.max_wait_s / _STEPS, _LEAST_STEP_S)

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
        """The expected time until all is done that waits and that is under way."""
        waiting = sum(line.tokens * self._token_s(line) for line in self._lines.values() if line.tokens)
        return self._running_s(now) + waiting

    def _running_s(self, now: float) -> float:
        work = sum(batch.left(now) * batch.place.threads for batch in self._batches)
        return work / self.places.cores

    def _token_s(self, line: Line) -> float:
        """Of a token in a batch that is full, or of one row where that is longer, on all cores."""
        group = line.covering[0]
        full = max(self._enough(group, line.output), line.shortest)
        alone = self.places.groups[group].threads / self.places.cores
        return alone * self.cost.seconds(group, line.output, full) / full

    def submit(self, job: Job, now: float) -> Refused | None:
        """Takes the job in, or says why not. A job with ``before`` > 0 belongs to an accepted request and is taken."""
        strands = self._strands(job)
        if not job.before:
            refused = self._refused(job, strands, now)
            if refused is not None:
                self.counters.refused += 1
                return refused
        job.came = now
        for line, strand in strands.items():
            line.push(strand, next(self._numbers))
        job.strands = list(strands.values())
        self._jobs[job] = None
        self.soonest = min(self.soonest, job.deadline)
        self.counters.runs += 1
        self.counters.rows += len(job.lengths)
        self.counters.tokens += job.tokens
        return None

    def _strands(self, job: Job) -> dict[Line, Strand]:
        limits = self.limits
        overhead, token = self.cost.line(0, job.output)
        alone = self.places.groups[0].threads / self.places.cores
        passed = _PASSED * limits.max_wait_s
        tokens = job.before
        strands: dict[Line, Strand] = {}
        for row, length in enumerate(job.lengths):
            tokens += length
            line = self._line(job.output, self._bound(length))
            strand = strands.get(line)
            if strand is None:
                strand = strands[line] = Strand(job)
            strand.rows.append(row)
            cost = overhead + token * tokens
            strand.keys.append(job.arrived + min(limits.slowdown * cost, passed + alone * cost))
        job.latest = job.arrived + alone * (overhead + token * tokens) + _WAIT * limits.max_wait_s
        return strands

    def _refused(self, job: Job, strands: dict[Line, Strand], now: float) -> Refused | None:
        if self.idle and now <= job.deadline:
            return None
        step_s = self._step_s
        work: dict[int, float] = defaultdict(float)
        latest: dict[int, float] = {}
        for line in self._lines.values():
            if line.tokens:
                token_s = self._token_s(line)
                for step, tokens in line.by_step.items():
                    work[step] += token_s * tokens
                for step, at in line.latest.items():
                    latest[step] = min(latest.get(step, math.inf), at)
        waiting = bool(work)
        for line, strand in strands.items():
            token_s = self._token_s(line)
            for row, key in zip(strand.rows, strand.keys, strict=True):
                work[int(key // step_s)] += token_s * job.lengths[row]
        first = int(min(strand.keys[0] for strand in strands.values()) // step_s)
        last = int(max(strand.keys[-1] for strand in strands.values()) // step_s)
        answered = done = now + self._running_s(now)
        excess = 0.0
        for step in sorted(work):
            done += work[step]
            if step <= last:
                answered = done
            if step >= first:
                excess = max(excess, done - latest.get(step, math.inf))
        excess = max(excess, answered - (job.latest - _RESERVE * self.limits.max_wait_s))
        # By others alone: what takes too long by itself is tried, since no later try would fare better.
        alone = job.latest - job.arrived - _WAIT * self.limits.max_wait_s
        late = answered - alone > job.deadline
        full = waiting and self.tokens + job.tokens > self.limits.max_tokens
        if late or full or (waiting and excess > 0):
            return Refused(answered - now, max(0.05, _ROOM * self.limits.max_wait_s, excess), late)
        return None

    def cancel(self, job: Job) -> None:
        """Nobody wants the job any more. Its rows that run already are computed for nobody."""
        if not job.over:
            self.counters.cancelled += job in self._jobs  # or it was never submitted
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
            self._line(job.output, self._bound(job.lengths[strand.rows[0]])).drop(strand)
        job.strands = []

    def _bound(self, length: int) -> int:
        return next((bound for bound in self._bounds if length <= bound), self._bounds[-1])

    def _line(self, output: str, bound: int) -> Line:
        line = self._lines.get((output, bound))
        if line is None:
            shortest = 1 + max((other for other in self._bounds if other < bound), default=0)
            line = self._lines[output, bound] = Line(output, shortest, self.places.covering(bound), self._step_s)
        return line

    # Batches

    def take(self, now: float) -> Batch | None:
        """The next batch that may start, which is then under way; None when nothing can start now."""
        self.due = math.inf
        heads = self._heads()
        if not heads:
            return None
        held = Held(set())
        lone = not self._batches and len(heads) == 1 and heads[0][2].rows == 1
        for _, _, line in heads:
            if self.limits.max_delay_s and not self._ripe(line, now):
                continue
            place, abreast = self.places.choose(line.covering, widest=lone, held=held)
            if place is not None:
                # While several instances are free, they share what waits.
                return self._fill(line, place, math.ceil(line.tokens / abreast), now)
            self.places.hold(line.covering, held)
        return None

    def stopping(self, now: float) -> list[Batch]:
        """The batches under way that should stop for what waits, the longest first; not more than rows wait."""
        heads = self._heads() if self._batches else []
        if not heads:
            return []
        found = [
            batch
            for batch in self._batches
            if batch.stopped_at is None and self._passing(batch, heads, now) is not None
        ]
        return sorted(found, key=lambda batch: -batch.left(now))[: self.rows]

    def take_between(self, outer: Batch, now: float) -> Batch | None:
        """What runs next while ``outer`` stops, which is then under way; None when ``outer`` goes on."""
        passing = self._passing(outer, self._heads(), now)
        if passing is None:
            outer.stopped_s, outer.stopped_at = outer.stopped(now), None
            return None
        if outer.stopped_at is None:
            outer.stopped_at = now
        line, place, most = passing
        overhead, token = self.cost.line(place.group, line.output)
        return self._fill(line, place, int((most - overhead) / token), now, outer)

    def _passing(
        self, batch: Batch, heads: list[tuple[float, int, Line]], now: float
    ) -> tuple[Line, Place, float] | None:
        """The line of the first of the rows that wait, are due before the batch, and are short beside what is left of
        it; where they would run, and for how long. In all a batch stops for no longer than it runs.
        """
        place = self.places.between[batch.place]
        if place is None or batch.outer is not None:
            return None
        most = min(_SHORTER * batch.left(now), batch.expected - batch.stopped(now))
        for key, _, line in heads:
            if key >= batch.key:
                return None
            alone = self.cost.seconds(place.group, line.output, line.first_length)
            if alone > most or place.group not in line.covering:
                continue
            if not self.limits.max_delay_s or self._ripe(line, now):
                return line, place, most
        return None

    def _heads(self) -> list[tuple[float, int, Line]]:
        """The lines in which something waits, in the order of their first rows' keys, which stand before them."""
        heads = []
        for line in self._lines.values():
            head = line.head()
            if head is not None:
                heads.append((head[0], head[1], line))
        heads.sort(key=lambda head: head[:2])
        return heads

    def _ripe(self, line: Line, now: float) -> bool:
        if line.tokens >= self.limits.batch_tokens:
            return True
        oldest = min(strand.job.came for _, _, strand in line.heap if not strand.job.over)
        ripe = oldest + self.limits.max_delay_s
        if ripe <= now:
            return True
        self.due = min(self.due, ripe)
        return False

    def _fill(self, line: Line, place: Place, most: int, now: float, outer: Batch | None = None) -> Batch:
        """A batch of at most so many tokens, or of one row."""
        most = min(self._enough(place.group, line.output), most)
        key = line.heap[0][0]
        parts: dict[Job, Part] = {}
        tokens = 0
        while line.head() is not None:
            length = line.first_length
            if tokens and tokens + length > most:
                break
            job, row = line.pop_row()
            tokens += length
            part = parts.get(job)
            if part is None:
                part = parts[job] = Part(job, [])
                job.begun = now
            part.rows.append(row)
        if outer is None:
            self.places.start(place)
        expected = self.cost.seconds(place.group, line.output, tokens)
        batch = Batch(place, line.output, list(parts.values()), tokens, now, expected, key, outer)
        self._batches.append(batch)
        return batch

    def _enough(self, group: int, output: str) -> int:
        """Tokens from which on a batch is no quicker by the token, so that a longer one only makes others wait."""
        overhead, token = self.cost.line(group, output)
        enough = max(overhead, _OWN_S) / token * (1 / _OVERHEAD - 1)
        return max(1, int(min(self.limits.batch_tokens, enough)))

    def finish(self, batch: Batch, now: float, *, failed: bool = False, disturbed: bool = False) -> list[Job]:
        """The batch has ended; returns the jobs that are whole with it. ``failed``: it gave no rows. ``disturbed``: its
        time is not that of one run of all its rows.
        """
        self._batches.remove(batch)
        if batch.outer is None:
            self.places.end(batch.place)
        seconds = now - batch.begun - batch.stopped_s
        counters = self.counters
        counters.batches += 1
        counters.batch_tokens.append(batch.tokens)
        counters.busy_s[batch.place.group] += seconds
        if failed:
            return []
        if not disturbed and not batch.stopped_s:  # else its other threads went on, and its caches are another's
            self.cost.observe(batch.place.group, batch.output, batch.tokens, seconds)
        whole = []
        for part in batch.parts:
            job = part.job
            job.unfinished -= len(part.rows)
            job.longest = max(job.longest, (seconds, batch.tokens))
            if not job.over and not job.unfinished:
                job.over = True
                job.strands = []  # which know the job: it goes at once, and not with the next collection of cycles
                self._jobs.pop(job)
                whole.append(job)
        return whole
