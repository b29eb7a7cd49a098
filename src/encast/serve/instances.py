"""The instances at work: a thread for each, which takes its next batch from the queue when one ends. A long
batch stops for a short one that is due before it, which its thread runs then. A short batch that takes all cores is run
by the thread that submits it.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

from encast.backends.cpu import Pause
from encast.batch import Batch as PackedBatch
from encast.batch import Int32
from encast.errors import InputError, ResourceError
from encast.serve.join import Arrays, join, spread
from encast.serve.places import Place
from encast.serve.queue import Batch, Job, Part, Queue, Refused
from encast.tasks.session import F32

__all__ = ["Grouped", "Instances", "Outcome"]

Outcome = tuple[Job, Exception | None]
"""A job that has ended, and why it has no answer."""


_CALLER_S = 2e-3
"""So long, as expected, a batch may keep the thread that submitted it from its sockets."""


class _BrokenError(BaseException):
    """Not an error of a batch: it ends the thread, also where it was raised while a batch had stopped."""


class Grouped(Protocol):
    """A ``Runnable`` whose caller names the instance, as ``CpuRunnable(apart=True)``."""

    def run(
        self, output: str, batch: PackedBatch, select: Int32 | None, *, group: int, instance: int, pause: Pause | None
    ) -> F32: ...


class Instances:
    """Runs what is submitted. The ``owner`` of a job has its ``arrays``.

    ``tell(outcomes, backlog_s)`` is called, from any thread, with the jobs that ended with one batch. Each job that is
    not cancelled or expired is among them once: without an error its answer is in ``job.owner.arrays.result``.
    ``lend``: whether a short batch may run on the thread that submits it.
    """

    def __init__(
        self, runnable: Grouped, queue: Queue, tell: Callable[[list[Outcome], float], None], *, lend: bool = True
    ) -> None:
        self._runnable, self._queue, self._tell, self._lend = runnable, queue, tell, lend
        self._lock = threading.Lock()
        self._inboxes: dict[Place, SimpleQueue[Batch | None]] = {
            place: SimpleQueue() for places in queue.places.by_group for place in places
        }
        self._threads = [
            threading.Thread(
                target=self._serve, args=(place,), name=f"instance-{place.group}-{place.instance}", daemon=True
            )
            for place in self._inboxes
        ]
        self._pauses = {place: Pause(partial(self._between, place)) for place in self._inboxes}
        self._outer: dict[Place, Batch] = {}
        """What a place runs, and not what it stops for."""
        self.failed = 0
        """Jobs that failed for a reason of ours."""
        for thread in self._threads:
            thread.start()

    def submit(self, jobs: Iterable[Job]) -> tuple[list[tuple[Job, Refused]], Batch | None]:
        """As ``Queue.submit``, one after the other, and then starts what can start: jobs that come together share
        batches. Returns the refused ones, and a batch that the caller must now ``run`` itself.
        """
        with self._lock:
            now = time.monotonic()
            answers = [(job, self._queue.submit(job, now)) for job in jobs]
            batch = self._queue.take(now)
            kept = batch if batch is not None and self._is_for_caller(batch) else None
            if batch is not None and kept is None:
                self._inboxes[batch.place].put(batch)
            self._start(now)
        return [(job, refused) for job, refused in answers if refused is not None], kept

    def run(self, batch: Batch) -> None:
        """Runs a batch that ``submit`` kept for its caller, and tells of it."""
        self._work(batch, None)

    def _is_for_caller(self, batch: Batch) -> bool:
        """Whether to spare a short batch the wake of a thread, because nothing can start until it has ended."""
        return self._lend and batch.expected <= _CALLER_S and batch.place.threads >= self._queue.places.cores

    def cancel(self, job: Job) -> None:
        """As ``Queue.cancel``."""
        with self._lock:
            self._queue.cancel(job)

    def tick(self) -> tuple[list[Job], float]:
        """The jobs that have expired, and when to call again at the latest; starts what has waited for companions."""
        with self._lock:
            now = time.monotonic()
            expired = self._queue.expire(now)
            if now >= self._queue.due:
                self._start(now)
            return expired, min(self._queue.due, self._queue.soonest)

    def look(self, at: Callable[[Queue], Any]) -> Any:
        """What ``at`` says of the queue, which does not change meanwhile."""
        with self._lock:
            return at(self._queue)

    def close(self) -> None:
        """Ends the threads, after the batches that they run."""
        for inbox in self._inboxes.values():
            inbox.put(None)
        for thread in self._threads:
            thread.join()

    def _start(self, now: float, own: Place | None = None) -> Batch | None:
        """Hands out all batches that may start; returns that of ``own``, the caller's place."""
        mine = None
        while (batch := self._queue.take(now)) is not None:
            if batch.place is own:
                mine = batch
            else:
                self._inboxes[batch.place].put(batch)
        for batch in self._queue.stopping(now):
            self._pauses[batch.place].ask()
        return mine

    def _serve(self, place: Place) -> None:
        inbox = self._inboxes[place]
        batch: Batch | None = None
        while True:
            if batch is None:
                batch = inbox.get()
            if batch is None:
                return
            batch = self._work(batch, place)

    def _between(self, place: Place) -> None:
        """Runs what goes before the rest of the place's batch, on its thread, where that batch stops."""
        try:
            while True:
                with self._lock:
                    batch = self._queue.take_between(self._outer[place], time.monotonic())
                if batch is None:
                    return
                self._work(batch, None)
        except Exception as error:
            raise _BrokenError from error

    def _work(self, batch: Batch, own: Place | None) -> Batch | None:
        """Runs a batch, tells of the jobs that end with it, and starts what can start then; returns that of ``own``."""
        wanted = [part for part in batch.parts if not part.job.over]
        errors = self._compute(batch, wanted)
        with self._lock:
            now = time.monotonic()
            refused = [part.job for part in batch.parts if part.job in errors and self._queue.fail(part.job)]
            disturbed = bool(errors) or len(wanted) < len(batch.parts)
            failed = len(errors) == len(wanted)
            whole = self._queue.finish(batch, now, failed=failed, disturbed=disturbed)
            backlog = self._queue.backlog_s(now)
            mine = self._start(now, own)
        outcomes: list[Outcome] = [(job, None) for job in whole]
        outcomes += [(job, errors[job]) for job in refused]
        if outcomes:
            self._tell(outcomes, backlog)
        return mine

    def _compute(self, batch: Batch, wanted: list[Part]) -> dict[Job, Exception]:
        """Runs these parts; where the model refuses them, or has no memory for all, each job runs again alone, so that
        one does not fail another.
        """
        if not wanted:
            return {}
        try:
            self._run(batch, wanted)
        except (InputError, ResourceError) as error:
            if len(wanted) > 1:
                return {job: error for part in wanted for job, error in self._alone(batch, part)}
            if isinstance(error, InputError):
                return {wanted[0].job: error}
            return self._broken(wanted, error)
        except Exception as error:
            return self._broken(wanted, error)
        return {}

    def _broken(self, parts: list[Part], error: Exception) -> dict[Job, Exception]:
        """Called where the error is caught."""
        traceback.print_exc(file=sys.stderr)
        self.failed += len(parts)
        return {part.job: error for part in parts}

    def _alone(self, batch: Batch, part: Part) -> list[tuple[Job, Exception]]:
        try:
            self._run(batch, [part])
        except InputError as error:
            return [(part.job, error)]
        except Exception as error:
            return [*self._broken([part], error).items()]
        return []

    def _run(self, batch: Batch, parts: list[Part]) -> None:
        arrays: list[tuple[Arrays, list[int]]] = [(part.job.owner.arrays, part.rows) for part in parts]
        joined, select = join(arrays)
        place = batch.place
        run = partial(self._runnable.run, batch.output, joined, select, group=place.group, instance=place.instance)
        if batch.outer is not None:
            rows = run(pause=None)
        else:
            self._outer[place] = batch
            try:
                rows = run(pause=self._pauses[place])
            finally:
                del self._outer[place]  # which knows its jobs
        spread(arrays, rows)
