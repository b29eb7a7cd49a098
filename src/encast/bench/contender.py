"""One side of a comparison: a backend in one or more processes, each on cores of its own."""

from __future__ import annotations

import math
import random
import select
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from encast.batch import Batch
from encast.bench.peers.base import BackendSpec, ModelFiles
from encast.bench.worker import Limits, Worker, WorkerError, temporary_files, write_batch
from encast.errors import InputError
from encast.launch import MemoryBinding, Placement
from encast.measure import processes
from encast.measure.batches import pick, portions

__all__ = ["ColdStart", "Contender", "Memory", "Usage"]

Float32 = np.ndarray[Any, np.dtype[np.float32]]

SETTLE_SECONDS = 0.03
"""Longer than thread pools spin without work: the ones asked before have left the processors."""
_MARGIN_NS = 5_000_000
_LATE_NS = 1_000_000
_TRIES = 3
_SHORT_NS = 50_000_000
_MESSAGES_NS = 3_000_000
_GAP_NS = 10_000
"""What a burst takes beside its calls, at most: a request and its answer, and between two calls."""
_REST_NS = 100_000_000
"""Between two bursts of a round nobody else is asked."""
_POLL_SECONDS = 0.2
_SAMPLE_SECONDS = 0.004


@dataclass(frozen=True)
class ColdStart:
    """Seconds until the first answer, each of the slowest instance (all start together)."""

    import_s: float
    load_s: float
    first_call_s: float


@dataclass(frozen=True)
class Memory:
    """Bytes of all instances together: peak resident, and proportional (shared pages count once).

    The peak is of the first point of a process from its start on, loading included, of a later one from its own begin
    on; None where the kernel cannot tell these apart.
    """

    peak_rss_bytes: int | None
    pss_bytes: int


@dataclass(frozen=True)
class Usage:
    """What the processes did from before a burst's wake-up to its answer, read from /proc by the parent.

    ``explained``: the share of the time until its answer, on the parent's clock, that the calls of a burst say they
    took, the wake-up counted and messages and gaps allowed for, of the instance that explains least. None where that
    says nothing: instances that wait for each other, and bursts that are over at once.
    """

    cpu_s: float
    wall_s: float
    explained: float | None


class Contender:
    """A context manager: leaving it ends the processes. A backend that fails raises ``worker.WorkerError``.

    What the machine refuses whatever the backend is raises ``ResourceError``.

    ``open``, ``bind``, then ``burst`` or ``stream`` as often as wanted. ``open`` may be called again, for a new cold
    start. Only one contender at a time is asked; the others sleep.

    ``looked_at``: the numbers of a batch's sequences whose states ``outputs`` returns; by default all.
    """

    def __init__(
        self,
        backend: BackendSpec,
        model: ModelFiles,
        placements: Sequence[Placement],
        *,
        cache: Path,
        environment: Callable[[Placement], Mapping[str, str]] = lambda placement: {},
        memory: MemoryBinding | None = None,
        limits: Limits | None = None,
    ) -> None:
        """``environment``: the variables that an instance at a placement is started with."""
        self.backend, self.model, self.placements = backend, model, tuple(placements)
        self.limits = limits or Limits()
        self.looked_at: Callable[[Batch], Sequence[int]] = lambda batch: range(batch.seqs)
        self._environment, self._memory, self._cache = environment, memory, cache
        self._workers: list[Worker] = []
        self._bound: list[Batch] = []
        self._parts: list[list[Batch]] = []  # by instance
        self._usages: list[Usage] = []
        self._rests: list[Usage] = []
        self._ended: processes.CpuTime | None = None  # the last burst, unless something else was asked since
        self._tried = False
        # What the backend cannot know beforehand: which of its outputs are looked at.
        self._random = random.SystemRandom()
        self._answered: list[int] = []  # by instance, when its last answer was there
        self._call_ns = self._late_ns = 0
        self._peak_known = True
        self._spent = 0  # by processes that have ended
        self._counted = 0  # the most that was seen: nobody can ask a process that has crashed

    @property
    def name(self) -> str:
        return self.backend.name

    @property
    def is_open(self) -> bool:
        return bool(self._workers)

    def cpu_seconds(self) -> float:
        """Processor time of all the processes that it has had, without what they used while others were asked."""
        self._now()
        return self._counted / 1e9 - sum(rest.cpu_s for rest in self._rests)

    @property
    def parts(self) -> tuple[Batch, ...]:
        """What the first instance was bound to: the batches, or its parts of them."""
        return tuple(self._parts[0]) if self._parts else ()

    @property
    def instances(self) -> int:
        return len(self.placements)

    @property
    def threads(self) -> int:
        """The budget of all instances together."""
        return sum(placement.threads for placement in self.placements)

    def open(self, batches: Sequence[Batch] | None = None) -> ColdStart:
        """Starts the processes, loads the model, and makes a first call for the first of ``batches``.

        Without batches no call is made, and ``first_call_s`` is 0. All of it is done once more after a first call for
        which the backend has tried several ways, see ``Peer.tried``.
        """
        cold = self._opened(batches)
        return self._opened(batches) if self._tried else cold

    def _opened(self, batches: Sequence[Batch] | None) -> ColdStart:
        self.close()
        self._ended, self._tried, self._peak_known = None, False, True
        for placement in self.placements:
            self._workers.append(
                Worker(
                    self.backend,
                    self.model,
                    placement.threads,
                    cache=self._cache,
                    placement=placement,
                    environment=self._environment(placement),
                    memory=self._memory,
                    limits=self.limits,
                )
            )
        opened = self._all("open", self.limits.open_seconds)
        first_s = 0.0
        if batches:
            requests = self._divide(batches[:1], split=False)
            begin = time.perf_counter()
            self._bind(requests)
            self._all("first", self._seconds(1))
            first_s = time.perf_counter() - begin
        return ColdStart(
            max(answer["import_ns"] for answer in opened) / 1e9,
            max(answer["load_ns"] for answer in opened) / 1e9,
            first_s,
        )

    def bind(self, batches: Sequence[Batch], *, split: bool = False) -> None:
        """Readies every instance for the batches, which ``burst`` calls in turn; what was bound before is dropped.

        ``split``: each batch is divided over the instances by whole sequences, as evenly as they go.
        """
        if not batches:
            raise InputError("there is no batch to bind; give at least one")
        self._bind(self._divide(batches, split=split))

    def _divide(self, batches: Sequence[Batch], *, split: bool) -> list[dict[str, Any]]:
        """What each instance is asked to bind."""
        self._bound, self._ended = list(batches), None
        divided = [portions(batch, self.instances) if split else [batch] * self.instances for batch in batches]
        self._parts = [list(parts) for parts in zip(*divided, strict=True)]
        self._call_ns = self._late_ns = 0
        requests: list[dict[str, Any]] = []
        for worker, parts in zip(self._workers, self._parts, strict=True):
            if requests and not split:  # all have the same
                requests.append(requests[0])
                continue
            files = [write_batch(part, worker.folder / f"batch-{index}.npz") for index, part in enumerate(parts)]
            rows = [[part.cu_seqlens[own : own + 2].tolist() for own in self.looked_at(part)] for part in parts]
            requests.append({"files": files, "rows": rows})
        return requests

    def _bind(self, requests: Sequence[Mapping[str, Any]]) -> None:
        for worker in self._workers:
            worker.lift_memory()  # other batches may need more
        for worker, request in zip(self._workers, requests, strict=True):
            worker.send("bind", **request)
        answers = self._receive("bind", self.limits.bind_seconds)
        self._tried = any(answer["tried"] for answer in answers)

    def burst(
        self, *, calls: int | None = None, seconds: float | None = None, in_step: bool = False
    ) -> list[list[int]]:
        """Nanoseconds of every call, a list an instance; all instances begin at one moment.

        Give ``calls`` of each instance or ``seconds``. ``in_step``: no instance begins a call before all have ended
        the one before, so that the time of a divided batch is the largest of the instances' times of the same call;
        it needs ``calls``.
        """
        return self._burst(calls, seconds, in_step)

    def verify(self) -> None:
        """Calls every bound batch once as ``burst`` does, and keeps each output for ``outputs``."""
        self._burst(len(self._bound), None, False, keep_all=True)

    def watch(self, seconds: float) -> list[int]:
        """A burst during which the threads that run or want to are counted, every few milliseconds, from outside.

        The backend cannot tell it from another.
        """
        members = self._members()
        counts: list[int] = []

        def look() -> None:
            time.sleep(_SAMPLE_SECONDS)
            counts.append(processes.runnable_threads(members))

        self._burst(None, seconds, False, meanwhile=look)
        return counts

    def stream(self, arrivals_ns: Sequence[int], batches: Sequence[Batch]) -> list[tuple[int, int, int]]:
        """Open loop: (due, begun, ended) of every request in nanoseconds since the stream began.

        Request i is due at ``arrivals_ns[i]`` (rising) and asks ``batches[i % len(batches)]``. An idle instance
        takes the oldest request that nobody has taken, so one that waits is counted as waiting.
        """
        if len(batches) != len(self._bound) or any(a is not b for a, b in zip(batches, self._bound, strict=True)):
            self.bind(batches)
        folder = self._workers[0].folder
        keep, ticket = self._kept(len(arrivals_ns)), str(folder / "ticket")
        with temporary_files():
            np.save(folder / "arrivals.npy", np.asarray(arrivals_ns, np.int64))
        for _ in range(_TRIES):
            with temporary_files():
                Path(ticket).write_bytes(bytes(8))
            before = self._settled()
            begin = time.perf_counter_ns() + self._margin()
            for worker in self._workers:
                worker.send("stream", at=begin, arrivals=str(folder / "arrivals.npy"), ticket=ticket, keep=keep)
            answers = self._receive("stream", arrivals_ns[-1] / 1e9 + self._seconds(len(arrivals_ns)))
            self._usages.append(self._used(before, None, begin))
            if self._in_time(begin, answers):
                break
        requests = sorted(request for answer in answers for request in answer["served"])
        return [(int(arrivals_ns[number]), begun, ended) for number, begun, ended in requests]

    def outputs(self) -> list[tuple[Batch, Float32]]:
        """Sequences that are ``looked_at`` with the ``f32[tokens, hidden]`` that was computed for them.

        Of random calls since ``bind`` and the last ``outputs``, at most one for each bound batch and instance.
        """
        self._ended = None
        kept: list[tuple[Batch, Float32]] = []
        for worker, parts in zip(self._workers, self._parts, strict=True):
            with temporary_files():
                try:
                    saved = worker.ask("outputs", seconds=self.limits.call_seconds, folder=str(worker.folder))
                except WorkerError as error:
                    if error.status == "failed":  # it asks the backend for nothing, and only writes files
                        raise OSError(str(error)) from None
                    raise
                for index, file in saved:
                    if len(numbers := self.looked_at(parts[index])):
                        kept.append((pick(parts[index], numbers), np.load(file)))
                    Path(file).unlink()
        return kept

    def fresh_calls(self, batches: Sequence[Batch]) -> list[tuple[int, int]]:
        """For each batch the nanoseconds of two first calls of the first instance, whose threads are awake.

        The first of the batch that ``bind`` had first, whose ids it has been asked before, the second of this one. Both
        are bound anew and asked alike, each after a pause, now one first and now the other: a scheduler that stops
        whoever has just worked for some milliseconds would else stop the same one of them every time.
        """
        self._ended = None
        worker = self._workers[0]
        known = write_batch(self._parts[0][0], worker.folder / "known.npz")
        seconds = self.limits.bind_seconds + 2 * self.limits.call_seconds
        times = []
        for number, batch in enumerate(batches):
            files = [known, write_batch(batch, worker.folder / f"fresh-{number}.npz")]
            taken = {}
            for file in files if number % 2 == 0 else files[::-1]:
                time.sleep(SETTLE_SECONDS)
                taken[file] = int(worker.ask("fresh", seconds=seconds, file=file))
            times.append((taken[files[0]], taken[files[1]]))
        return times

    def settle_memory(self) -> None:
        """From now on the instances' resident memory may grow by ``limits.growth_mib`` each."""
        for worker in self._workers:
            worker.settle_memory()

    def forget_peak(self) -> None:
        """The peak of ``memory`` begins anew: what was before belongs to another point."""
        self._peak_known = processes.forget_peak(self._members())

    def memory(self) -> Memory:
        members = self._members()
        peak = processes.resident_bytes(members, peak=True) if self._peak_known else None
        return Memory(peak, processes.proportional_bytes(members))

    @property
    def usages(self) -> list[Usage]:
        """Of every burst and stream."""
        return list(self._usages)

    @property
    def rests(self) -> list[Usage]:
        """Of the time between bursts in which others were asked; what its threads may take to go to sleep left out."""
        return list(self._rests)

    def usage(self) -> Usage:
        """Of the last burst or stream."""
        if not self._usages:
            raise InputError(f"{self.name} has not been asked for a burst yet; there is no usage of one")
        return self._usages[-1]

    def strays(self) -> set[int]:
        """Processors that a thread may run on although its instance was not given them."""
        found: set[int] = set()
        for worker, placement in zip(self._workers, self.placements, strict=True):
            found |= processes.allowed_cpus(worker.family()) - set(placement.cpus)
        return found

    def facts(self) -> dict[str, Any]:
        """What the peer says of itself: version, settings in force, what was chosen."""
        self._ended = None
        return dict(self._workers[0].ask("facts", seconds=self.limits.call_seconds))

    def close(self) -> None:
        with ExitStack() as ends:
            for worker in self._workers:
                ends.callback(worker.close)
            self._now()
            self._spent = self._counted
            for worker in self._workers:
                worker.leave()  # all at once
            self._workers = []

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _burst(
        self,
        calls: int | None,
        seconds: float | None,
        in_step: bool,
        *,
        keep_all: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[list[int]]:
        if (calls is None) == (seconds is None):
            raise InputError("a burst has either calls or seconds; give one of them")
        if in_step and calls is None:
            raise InputError("a burst in step has a number of calls; give calls")
        expected = calls if calls is not None else self._expected(seconds or 0.0)
        keep = list(range(len(self._bound))) if keep_all else self._kept(expected)
        for _ in range(_TRIES):
            before = self._settled()
            at = None if self.instances == 1 else time.perf_counter_ns() + self._margin()
            self._send_burst(at, calls, seconds, keep, self._step_file() if in_step else None)
            answers = self._receive("burst", (seconds or 0.0) + self._seconds((calls or 0) + 3), meanwhile)
            times: list[list[int]] = [answer["ns"] for answer in answers]
            self._call_ns = max(int(np.median(own)) for own in times) if all(times) else self._call_ns
            self._usages.append(self._used(before, None if in_step else times, at))
            if at is None or self._in_time(at, answers):
                break
        return times

    def _in_time(self, at: int, answers: Sequence[Mapping[str, Any]]) -> bool:
        """Whether all instances began at that moment. If not, the next moment lies further ahead.

        The wake-up of one took longer than was known: once more, now that it is known.
        """
        late = max(answer["begin"] for answer in answers) - at
        if late < _LATE_NS + self._call_ns // 20:
            return True
        self._late_ns = max(self._late_ns, late)
        return False

    def _kept(self, calls: int) -> list[int]:
        return self._random.sample(range(calls), min(2, len(self._bound), calls))

    def _settled(self) -> processes.CpuTime:
        """Waits until the others' threads sleep, and says what was used until then."""
        time.sleep(SETTLE_SECONDS)
        now, ended = self._now(), self._ended
        if ended is not None and now.at - ended.at > _REST_NS:
            beyond = (now.cpu - ended.cpu) / 1e9 - self.threads * SETTLE_SECONDS
            self._rests.append(Usage(max(0.0, beyond), (now.at - ended.at) / 1e9, None))
        return now

    def _expected(self, seconds: float) -> int:
        return max(1, math.ceil(seconds * 1e9 / self._call_ns)) if self._call_ns else 1

    def _margin(self) -> int:
        return _MARGIN_NS + 2 * self._call_ns + 2 * self._late_ns

    def _seconds(self, calls: int) -> float:
        """How long so many calls may take before the backend counts as hung."""
        return self.limits.call_seconds + 10 * calls * self._call_ns / 1e9

    def _send_burst(
        self, at: int | None, calls: int | None, seconds: float | None, keep: list[int], file: str | None
    ) -> None:
        for own, worker in enumerate(self._workers):
            step = None if file is None else {"file": file, "instances": self.instances, "own": own}
            worker.send("burst", at=at, calls=calls, seconds=seconds, keep=keep, step=step)

    def _step_file(self) -> str:
        file = self._workers[0].folder / "steps"
        with temporary_files():
            file.write_bytes(bytes(8 * self.instances))
        return str(file)

    def _all(self, do: str, seconds: float) -> list[Any]:
        for worker in self._workers:
            worker.send(do)
        return self._receive(do, seconds)

    def _receive(self, do: str, seconds: float, meanwhile: Callable[[], None] | None = None) -> list[Any]:
        deadline = time.monotonic() + seconds
        answered: dict[Worker, int] = {}
        while time.monotonic() < deadline:
            waiting = [worker for worker in self._workers if worker not in answered]
            if not waiting:
                break
            if meanwhile is not None:
                meanwhile()
            ready = select.select(waiting, [], [], 0 if meanwhile else _POLL_SECONDS)[0]
            answered.update(dict.fromkeys(ready, time.perf_counter_ns()))
            if not ready and not all(worker.lives() for worker in waiting):
                break  # ``receive`` finds out why
            if not ready and meanwhile is None:
                for worker in waiting:
                    worker.check_memory()
        self._answered = [answered.get(worker, time.perf_counter_ns()) for worker in self._workers]
        return [worker.receive(do, max(0.0, deadline - time.monotonic())) for worker in self._workers]

    def _members(self) -> list[int]:
        return [pid for worker in self._workers for pid in worker.family()]

    def _now(self) -> processes.CpuTime:
        now = processes.cpu_time(self._members())
        self._counted = max(self._counted, self._spent + now.cpu)
        return now

    def _used(self, before: processes.CpuTime, times: Sequence[Sequence[int]] | None, at: int | None) -> Usage:
        self._ended = after = self._now()
        for worker in self._workers:
            worker.check_memory()
        wall = after.at - before.at
        explained = None
        if times is not None and all(times) and wall > _SHORT_NS:
            # One that begins at a moment has been woken before it.
            calls = [sum(own) if at is not None else sum(own) * (1 + 1 / len(own)) for own in times]
            allowed = [_MESSAGES_NS + _GAP_NS * len(own) for own in times]
            ends = [answered - (before.at if at is None else at) for answered in self._answered]
            explained = min(1.0, *((one + gaps) / end for one, gaps, end in zip(calls, allowed, ends, strict=True)))
        return Usage((after.cpu - before.cpu) / 1e9, wall / 1e9, explained)
