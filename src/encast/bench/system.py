"""The system under test, as MLPerf calls it: a backend in one or more processes, each on cores of its own."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]

from encast.batch import Batch
from encast.bench.peers.base import BackendSpec, ModelFiles
from encast.bench.worker import Limits, Worker, WorkerError, receive, temporary_files, write_batch
from encast.errors import InputError
from encast.launch import MemoryBinding, Placement
from encast.measure import processes
from encast.measure.batches import pick, portions

__all__ = ["ColdStart", "System", "Usage"]

Float32 = np.ndarray[Any, np.dtype[np.float32]]

SETTLE_SECONDS = 0.03
"""Longer than thread pools spin without work: the ones asked before have left the processors."""
_MARGIN_NS = 5_000_000
_LATE_NS = 1_000_000
"""An instance that begins later than at its moment, by more than this and a twentieth of a call, is late."""
_TRIES = 2
"""Of a burst or stream in which an instance was late, and of a start whose backend tried several ways."""
_SHORT_NS = 50_000_000
_MESSAGES_NS = 3_000_000
_GAP_NS = 10_000
"""What a burst takes beside its calls, at most: a request and its answer, and between two calls."""
_REST_NS = 100_000_000
"""Between two bursts of a round nobody else is asked."""
_SAMPLE_SECONDS = 0.004


@dataclass(frozen=True)
class ColdStart:
    """Seconds until the first answer, each of the slowest instance (all start together); None without a first call."""

    import_s: float
    load_s: float
    first_call_s: float | None


@dataclass(frozen=True)
class Usage:
    """What the processes did from before a burst's wake-up to its answer, read from /proc by the parent.

    ``explained``: the share of the time until its answer, on the parent's clock, that the calls of a burst say they
    took, the wake-up counted and messages and gaps allowed for, of the instance that explains least. None where that
    says nothing: instances that wait for each other or begin late, and bursts that are over at once.
    """

    cpu_s: float
    wall_s: float
    explained: float | None


class System:
    """A context manager: leaving it ends the processes. A backend that fails raises ``worker.WorkerError``.

    What the machine refuses whatever the backend is raises ``ResourceError``.

    ``open``, ``bind``, then ``burst`` or ``stream`` as often as wanted. ``open`` may be called again, for a new cold
    start. Only one system at a time is asked; the others sleep.

    ``checked``: the numbers of a batch's sequences whose states ``outputs`` returns; by default all.
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
        self.checked: Callable[[Batch], Sequence[int]] = lambda batch: range(batch.seqs)
        self.cold: ColdStart | None = None
        """Of the last ``open``."""
        self.usages: list[Usage] = []
        """Of every burst and stream."""
        self.idle: list[Usage] = []
        """Of the time between bursts in which others were asked; what threads may take to go to sleep left out."""
        self.round_number = 0
        """Of the round that is taken, from 0: scenarios draw from it what is the same for all systems."""
        self._environment, self._memory, self._cache = environment, memory, cache
        self._workers: list[Worker] = []
        self._bound: list[Batch] = []
        self._parts: list[list[Batch]] = []  # by instance
        self._ended: processes.CpuTime | None = None  # what was counted last, unless something else was asked since
        # What the backend cannot know beforehand: which of its outputs are looked at.
        self._random = random.SystemRandom()
        self._call_ns = self._late_ns = 0
        self._peak_known = True
        self._cpu_s = 0.0

    @property
    def name(self) -> str:
        return self.backend.name

    @property
    def is_open(self) -> bool:
        return bool(self._workers)

    @property
    def instances(self) -> int:
        return len(self.placements)

    @property
    def threads(self) -> int:
        """The budget of all instances together."""
        return sum(placement.threads for placement in self.placements)

    @property
    def parts(self) -> tuple[Batch, ...]:
        """What the first instance was bound to: the batches, or its parts of them."""
        return tuple(self._parts[0]) if self._parts else ()

    def cpu_seconds(self) -> float:
        """Processor time of all that it was asked for, also where it failed, and of its end.

        What it uses while others are asked is no part of it.
        """
        return self._cpu_s

    def open(self, batches: Sequence[Batch] | None = None) -> ColdStart:
        """Starts the processes, loads the model, and makes a first call for the first of ``batches``, if any.

        All of it is done once more after a first call for which the backend has tried several ways, see ``Peer.tried``.
        """
        for _ in range(_TRIES):
            self.close()
            with self._counted(self._cpu_time()):
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
                first_s, tried = None, False
                if batches:
                    requests = self._divide(batches[:1], split=False)
                    begin = time.perf_counter()
                    tried = self._bind(requests)
                    self._all("first", self._seconds(1))
                    first_s = time.perf_counter() - begin
            if not tried:
                break
        self._ended, self._peak_known = None, True
        import_ns, load_ns = (max(answer[part] for answer in opened) for part in ("import_ns", "load_ns"))
        self.cold = ColdStart(import_ns / 1e9, load_ns / 1e9, first_s)
        return self.cold

    def bind(self, batches: Sequence[Batch], *, split: bool = False) -> None:
        """Readies every instance for the batches, which ``burst`` calls in turn; what was bound before is dropped.

        ``split``: each batch is divided over the instances by whole sequences, as evenly as they go.
        """
        if not batches:
            raise InputError("there is no batch to bind; give at least one")
        requests = self._divide(batches, split=split)
        with self._counted(self._cpu_time()):
            self._bind(requests)

    def _divide(self, batches: Sequence[Batch], *, split: bool) -> list[dict[str, Any]]:
        """What each instance is asked to bind."""
        self._bound, self._ended, self._call_ns, self._late_ns = list(batches), None, 0, 0
        divided = [portions(batch, self.instances) if split else [batch] * self.instances for batch in batches]
        self._parts = [list(parts) for parts in zip(*divided, strict=True)]
        requests: list[dict[str, Any]] = []
        for worker, parts in zip(self._workers, self._parts, strict=True):
            if requests and not split:  # all have the same
                requests.append(requests[0])
                continue
            files = [write_batch(part, worker.folder / f"batch-{index}.npz") for index, part in enumerate(parts)]
            rows = [[part.cu_seqlens[own : own + 2].tolist() for own in self.checked(part)] for part in parts]
            requests.append({"files": files, "rows": rows})
        return requests

    def _bind(self, requests: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the backend has tried several ways."""
        self.limit_growth(False)  # other batches may need more
        for worker, request in zip(self._workers, requests, strict=True):
            worker.send("bind", **request)
        return any(answer["tried"] for answer in receive(self._workers, "bind", self.limits.bind_seconds))

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
        self._burst(len(self._bound), None, keep_all=True)

    def watch(self, seconds: float) -> list[int]:
        """A burst during which the threads that run or want to are counted, every few milliseconds, from outside.

        The backend cannot tell it from another.
        """
        members = self._members()
        counts: list[int] = []

        def look() -> None:
            time.sleep(_SAMPLE_SECONDS)
            counts.append(processes.runnable_threads(members))

        self._burst(None, seconds, meanwhile=look)
        return counts

    def _burst(
        self,
        calls: int | None,
        seconds: float | None,
        in_step: bool = False,
        *,
        keep_all: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[list[int]]:
        if (calls is None) == (seconds is None):
            raise InputError("a burst has either calls or seconds; give one of them")
        if in_step and calls is None:
            raise InputError("a burst in step has a number of calls; give calls")
        expected = calls or max(1, math.ceil((seconds or 0) * 1e9 / self._call_ns) if self._call_ns else 1)
        keep = list(range(len(self._bound))) if keep_all else self._some(expected)
        for _ in range(_TRIES):
            counters = str(self._shared_file("steps", bytes(8 * self.instances))) if in_step else None
            before = self._settled()
            at = None if self.instances == 1 else time.perf_counter_ns() + self._margin()
            with self._counted(before):
                for own, worker in enumerate(self._workers):
                    step = {"file": counters, "instances": self.instances, "own": own} if in_step else None
                    worker.send("burst", at=at, calls=calls, seconds=seconds, keep=keep, step=step)
                longest = (seconds or 0.0) + self._seconds((calls or 0) + 3)
                answers = receive(self._workers, "burst", longest, meanwhile)
            times: list[list[int]] = [answer["ns"] for answer in answers]
            self._call_ns = max(int(np.median(own)) for own in times) if all(times) else self._call_ns
            late = at is not None and self._late(at, answers)
            self._used(before, None if in_step or late else times, at)
            if not late:
                break
        return times

    def stream(self, arrivals_ns: Sequence[int], batches: Sequence[Batch]) -> list[tuple[int, int, int]]:
        """Open loop: (due, begun, ended) of every request in nanoseconds since the stream began.

        Request i is due at ``arrivals_ns[i]`` (rising) and asks ``batches[i % len(batches)]``. An idle instance
        takes the oldest request that nobody has taken, so one that waits is counted as waiting.
        """
        if len(batches) != len(self._bound) or any(a is not b for a, b in zip(batches, self._bound, strict=True)):
            self.bind(batches)
        keep = self._some(len(arrivals_ns))
        for _ in range(_TRIES):
            ticket = self._shared_file("ticket", bytes(8))
            with temporary_files():
                np.save(ticket.with_name("arrivals.npy"), np.asarray(arrivals_ns, np.int64))
            files = {"arrivals": str(ticket.with_name("arrivals.npy")), "ticket": str(ticket)}
            before = self._settled()
            begin = time.perf_counter_ns() + self._margin()
            with self._counted(before):
                for worker in self._workers:
                    worker.send("stream", at=begin, keep=keep, **files)
                longest = arrivals_ns[-1] / 1e9 + self._seconds(len(arrivals_ns))
                answers = receive(self._workers, "stream", longest)
            self._used(before, None, begin)
            if not self._late(begin, answers):
                break
        requests = sorted(request for answer in answers for request in answer["served"])
        return [(int(arrivals_ns[number]), begun, ended) for number, begun, ended in requests]

    def outputs(self) -> list[tuple[Batch, Float32]]:
        """The ``checked`` sequences of calls that were timed: a batch of them, and the states that were returned.

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
                    if len(numbers := self.checked(parts[index])):
                        kept.append((pick(parts[index], numbers), np.load(file)))
                    Path(file).unlink()
        return kept

    def fresh_calls(self, batch: Batch, *, known_first: bool) -> tuple[int, int]:
        """Nanoseconds of two first calls of the first instance, whose threads are awake.

        The first of the batch that ``bind`` had first, whose ids it has been asked before, the second of this one. Both
        are bound anew and asked alike, each after a pause. Ask now one first and now the other: a scheduler that stops
        whoever has just worked for some milliseconds would else stop the same one of them every time.
        """
        self._ended = None
        worker = self._workers[0]
        known = write_batch(self._parts[0][0], worker.folder / "known.npz")
        fresh = write_batch(batch, worker.folder / "fresh.npz")
        seconds = self.limits.bind_seconds + 2 * self.limits.call_seconds
        taken = {}
        for file in (known, fresh) if known_first else (fresh, known):
            time.sleep(SETTLE_SECONDS)
            taken[file] = int(worker.ask("fresh", seconds=seconds, file=file))
        return taken[known], taken[fresh]

    def limit_growth(self, limited: bool = True) -> None:
        """From now on the resident memory of each instance may grow by ``limits.growth_mib``, or as before that."""
        for worker in self._workers:
            worker.limit_growth(limited)

    def forget_peak(self) -> None:
        """The peak of ``memory`` begins anew: what was before belongs to another point."""
        self._peak_known = processes.forget_peak(self._members())

    def memory(self) -> dict[str, int | None]:
        """Bytes of all instances together: peak resident, and proportional (shared pages count once).

        The peak is of the first point of a process from its start on, loading included, of a later one from its own
        begin on; None where the kernel cannot tell these apart.
        """
        members = self._members()
        peak = processes.peak_bytes(members) if self._peak_known else None
        return {"peak_rss_bytes": peak, "pss_bytes": processes.proportional_bytes(members)}

    def foreign_cpus(self) -> set[int]:
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
                ends.callback(worker.close)  # also at Ctrl-C while time is counted
            with self._counted(self._cpu_time()), ends.pop_all():
                for worker in self._workers:
                    worker.leave()  # all at once
        self._workers = []

    def __enter__(self) -> System:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _some(self, calls: int) -> list[int]:
        """The numbers of the calls whose outputs are kept."""
        return self._random.sample(range(calls), min(2, len(self._bound), calls))

    def _settled(self) -> processes.CpuTime:
        """Waits until the others' threads sleep, and says what was used until then."""
        time.sleep(SETTLE_SECONDS)
        now, ended = self._cpu_time(), self._ended
        if ended is not None and now.at - ended.at > _REST_NS:
            beyond = (now.cpu - ended.cpu) / 1e9 - self.threads * SETTLE_SECONDS
            self.idle.append(Usage(max(0.0, beyond), (now.at - ended.at) / 1e9, None))
        return now

    def _margin(self) -> int:
        """Nanoseconds until instances begin together: each wakes up before, by calls that are not counted."""
        return _MARGIN_NS + 2 * self._call_ns + 2 * self._late_ns

    def _late(self, at: int, answers: Sequence[Mapping[str, Any]]) -> bool:
        """Whether an instance had not woken up by that moment; the next one then lies further ahead."""
        late = max(answer["begin"] for answer in answers) - at
        if late <= _LATE_NS + self._call_ns // 20:
            return False
        self._late_ns = max(self._late_ns, late)
        return True

    def _seconds(self, calls: int) -> float:
        """How long so many calls may take before the backend counts as hung."""
        return self.limits.call_seconds + 10 * calls * self._call_ns / 1e9

    def _shared_file(self, name: str, content: bytes) -> Path:
        file = self._workers[0].folder / name
        with temporary_files():
            file.write_bytes(content)
        return file

    def _all(self, do: str, seconds: float) -> list[Any]:
        for worker in self._workers:
            worker.send(do)
        return receive(self._workers, do, seconds)

    def _members(self) -> list[psutil.Process]:
        return [process for worker in self._workers for process in worker.family()]

    def _cpu_time(self) -> processes.CpuTime:
        cpu = sum(worker.cpu_ns() for worker in self._workers)
        return processes.CpuTime(time.perf_counter_ns(), cpu)

    @contextmanager
    def _counted(self, before: processes.CpuTime) -> Iterator[None]:
        """Adds what is used from ``before`` on to ``cpu_seconds``, also where the workers fail.

        Else the time of a backend that spins until its limit would be that of processes that nobody measures.
        """
        try:
            yield
        finally:
            self._ended = self._cpu_time()
            self._cpu_s += (self._ended.cpu - before.cpu) / 1e9

    def _used(self, before: processes.CpuTime, times: Sequence[Sequence[int]] | None, at: int | None) -> None:
        """Notes what a burst took, whose calls took ``times``, those of each instance from ``at`` on."""
        assert self._ended is not None
        after = self._ended
        for worker in self._workers:
            worker.check_memory()
        wall = after.at - before.at
        explained = None
        if times is not None and all(times) and wall > _SHORT_NS:
            explained = 1.0
            for own, worker in zip(times, self._workers, strict=True):
                # One that begins at a moment has been woken before it.
                calls = sum(own) if at is not None else sum(own) * (1 + 1 / len(own))
                taken = worker.answered_ns - (before.at if at is None else at)
                explained = min(explained, (calls + _MESSAGES_NS + _GAP_NS * len(own)) / taken)
        self.usages.append(Usage((after.cpu - before.cpu) / 1e9, wall / 1e9, explained))
