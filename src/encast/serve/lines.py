"""What waits: the rows of runs, in a line for each output and length class, by their keys."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any

__all__ = ["Job", "Line", "Strand"]


class Job:
    """A run that waits: ``lengths`` of its rows in tokens; the rest as in ``wire.Submit``. ``owner`` is the caller's.

    ``came``, ``begun``: when it was submitted and when the last of its rows so far was begun; ``latest``: when it must
    be answered; ``longest``: of its batches so far that which took longest, as (seconds, tokens).
    """

    __slots__ = (
        "arrived", "before", "begun", "came", "deadline", "latest", "lengths", "longest", "output", "over", "owner",
        "strands", "tokens", "unfinished",
    )  # fmt: skip

    def __init__(
        self, output: str, lengths: Sequence[int], arrived: float, deadline: float, before: int = 0, owner: Any = None
    ) -> None:
        self.output, self.lengths, self.arrived, self.deadline = output, lengths, arrived, deadline
        self.before, self.owner = before, owner
        self.tokens = sum(lengths)
        self.unfinished = len(lengths)
        self.came = self.begun = self.latest = 0.0
        self.longest = (0.0, 0)
        self.over = False
        self.strands: list[Strand] = []


class Strand:
    """The rows of one job that belong to one class: their keys rise, so that only the next one stands in the heap."""

    __slots__ = ("at", "job", "keys", "rows")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rows: list[int] = []
        self.keys: list[float] = []
        self.at = 0


class Line:
    """What waits for one output and length class: a heap of strands by their next row's key. ``shortest``: of the rows
    of its class; ``by_step``: its tokens by the step of ``step_s`` seconds in which their key lies; ``latest``: when
    strands must be done whose last key does.
    """

    def __init__(self, output: str, shortest: int, covering: list[int], step_s: float) -> None:
        self.output, self.shortest, self.covering, self._step_s = output, shortest, covering, step_s
        self.heap: list[tuple[float, int, Strand]] = []
        self.by_step: dict[int, int] = {}
        self.latest: dict[int, float] = {}
        self.tokens = self.rows = self.dead = 0

    def push(self, strand: Strand, number: int) -> None:
        """The strand, of which nothing has run, waits."""
        for row, key in zip(strand.rows, strand.keys, strict=True):
            step = int(key // self._step_s)
            self.by_step[step] = self.by_step.get(step, 0) + strand.job.lengths[row]
            self.tokens += strand.job.lengths[row]
        self.latest[step] = min(self.latest.get(step, math.inf), strand.job.latest)
        self.rows += len(strand.rows)
        heapq.heappush(self.heap, (strand.keys[0], number, strand))

    def head(self) -> tuple[float, int, Strand] | None:
        heap = self.heap
        while heap and heap[0][2].job.over:
            heapq.heappop(heap)
            self.dead -= 1
        return heap[0] if heap else None

    @property
    def first_length(self) -> int:
        """Tokens of the row with the smallest key; there must be one."""
        _, _, strand = self.heap[0]
        return strand.job.lengths[strand.rows[strand.at]]

    def drop(self, strand: Strand) -> None:
        """The strand's job is over; its rows leave now, its place in the heap with the next clearing."""
        if strand.at == len(strand.rows):
            return
        for at in range(strand.at, len(strand.rows)):
            self._forget(strand.keys[at], strand.job.lengths[strand.rows[at]])
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
        self._forget(strand.keys[strand.at], length)
        strand.at += 1
        self.rows -= 1
        if strand.at < len(strand.rows):
            heapq.heapreplace(self.heap, (strand.keys[strand.at], number, strand))
        else:
            heapq.heappop(self.heap)
        return strand.job, row

    def _forget(self, key: float, length: int) -> None:
        self.tokens -= length
        step = int(key // self._step_s)
        left = self.by_step[step] - length
        if left:
            self.by_step[step] = left
        else:
            del self.by_step[step]
            self.latest.pop(step, None)
