"""The engine process: owns one model's queue and instances, and answers the runs of all fronts.

``python -m encast.serve.engine SETTINGS``, where SETTINGS is the JSON of ``control.EngineSettings``. One thread polls
the sockets; a thread for each instance runs batches and sends what they answer.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np

import encast.artifact as artifacts
import encast.serve.control as control_messages
from encast.artifact import Artifact, artifact_sha
from encast.backends.cpu import Pause
from encast.backends.devices import find_device
from encast.backends.groups import InstanceGroup, Setup
from encast.batch import Batch, Int32
from encast.engine import session_of, setup_of
from encast.errors import ArtifactError, EncastError, InputError
from encast.launch.process import die_with_parent, wake_promptly
from encast.machine import usable_cores
from encast.serve.canary import canary_run, cosine, least_cosine
from encast.serve.cards import Cards
from encast.serve.connections import Asked, Connection
from encast.serve.control import Counted, Drain, EngineSettings, EngineStarted, ToChild
from encast.serve.errors import Kind
from encast.serve.instances import Instances, Outcome
from encast.serve.join import Arrays
from encast.serve.options import ServeOptions
from encast.serve.places import Place, Places
from encast.serve.queue import Job, Queue, QueueLimits
from encast.serve.wire import Cancel, EngineStats, Failed, Rows, Submit, frame, peer_uid
from encast.tasks.session import F32, Run

__all__ = ["Engine", "Model", "default_setup", "end_with_any_thread", "open_model"]

_WIDEST = 8
"""Threads of the instance for a lone text: measured gains end there."""

_WARM_UP_TOKENS = (8, 64, 256)
_STATS_S = 0.25
_MOST_RUNS = 1 << 16
"""Without an answer, of one front."""


def default_setup(longest_text: int, cores: int) -> Setup:
    """One instance a core for all texts, and a wide one on the same cores for a lone text."""
    groups = [InstanceGroup(1, min(cores, _WIDEST), None)]
    if cores > 1:
        groups.insert(0, InstanceGroup(cores, 1, longest_text))
    return Setup(tuple(groups), QueueLimits.batch_tokens, shared_cores=True)


def open_model(artifact: str, options: ServeOptions, *, sha256: str | None = None, pin: bool = True) -> Model:
    """The model with its instances warm and its cost model fitted. ``sha256``: what ``artifact_sha`` must say of it;
    ``pin``: see ``CpuRunnable``. Raises ``EncastError``.
    """
    opened = artifacts.open(artifact)
    if sha256 not in (None, artifact_sha(opened)):
        raise ArtifactError(f"{artifact} was replaced by another artifact; SIGHUP makes the server open that one")
    cores, longest = len(usable_cores()), opened.graph.meta.max_len
    cards = None
    if options.devices:
        cards = Cards(opened, options.devices, options.card_dtype)
        tokens = options.batch_tokens
        if options.config is not None:
            tuned = setup_of(opened, options.config, cards=options.devices, dtype=options.card_dtype)
            tokens = tokens or tuned.batch_tokens
        cores, (setup, words) = cards.cores, cards.setup(tokens)
    elif options.config is not None:
        setup = setup_of(opened, options.config)
    elif options.instances is not None or options.threads is not None:
        instances = options.instances or max(1, cores // (options.threads or 1))
        threads = options.threads or max(1, cores // instances)
        setup = Setup((InstanceGroup(instances, threads),), QueueLimits.batch_tokens)
    else:
        setup = default_setup(longest, cores)
    runnable: Any = cards
    if cards is None:
        runnable, words = find_device("cpu", ()).open(opened, config=setup, apart=True, pin=pin), setup.text
    given: dict[str, Any] = {
        "max_tokens": options.max_queue_tokens or (None if cards is None else cards.queue_tokens),
        "max_wait_s": options.max_wait_s, "slowdown": options.slowdown,
        "max_delay_s": options.max_delay_s, "batch_tokens": options.batch_tokens or setup.batch_tokens,
    }  # fmt: skip
    limits = QueueLimits(**{name: value for name, value in given.items() if value is not None})
    queue = Queue(Places(setup.groups, runnable.cpus, cores), limits, longest_text=longest)
    if cards is None:
        canary = _warm_up(opened, runnable, queue, _WARM_UP_TOKENS, 1.0)
    else:
        # Every size compiles kernels of its own, and the largest batch shows whether memory holds it.
        sizes = [size for power in range(3, 32) for size in (1 << power, 3 << (power - 1))]
        largest = queue.limits.batch_tokens
        sizes = [*(size for size in sizes if size < largest), largest]
        canary = _warm_up(opened, runnable, queue, sizes, least_cosine(opened.card["dtype"], options.card_dtype))
    # Last: what could not be captured as a CUDA graph is known then.
    report = () if cards is None else tuple(cards.report())
    return Model(opened, setup, words, runnable, queue, canary, report)


@dataclass(frozen=True)
class Model:
    """An artifact ready to run. ``words``: where, in a few; ``runnable``: a ``Grouped``; ``canary``: the answer of
    ``canary_run`` as bytes; ``report``: what cards compute, lines for people.
    """

    opened: Artifact
    setup: Setup
    words: str
    runnable: Any
    queue: Queue
    canary: bytes
    report: tuple[str, ...] = ()


def _warm_up(opened: Artifact, runnable: Any, queue: Queue, sizes: Sequence[int], least: float) -> bytes:
    """Runs and times every instance. All must give the canary's answer with the same bits or, for a ``least`` cosine
    below 1, as much alike; the first is returned.
    """
    canary = canary_run(session_of(opened))
    canary_tokens = int(np.diff(canary.piece.batch.cu_seqlens).max())
    answers: dict[bytes, None] = {}  # a set in order
    for group, places in enumerate(queue.places.by_group):
        longest = min(queue.places.groups[group].longest or opened.graph.meta.max_len, opened.graph.meta.max_len)
        for place in places:
            if canary_tokens <= longest:
                answers[_timed(runnable, queue, place, canary.output, canary.piece.batch, canary.select)] = None
                other = queue.places.between[place]
                if other is not None and other.group in queue.places.covering(canary_tokens):
                    answers |= dict.fromkeys(_while_stopped(runnable, place, other, canary))
            for size in sizes:
                tokens = min(size, longest) if least == 1.0 else size
                ids = np.arange(tokens, dtype=np.int32) % opened.graph.meta.vocab
                batch = Batch(ids, np.array([*range(0, tokens, longest), tokens], np.int32))
                select = None if canary.select is None else np.zeros(1, np.int32)
                _timed(runnable, queue, place, canary.output, batch, select)
    first, *others = answers or [b""]
    if not first or (others and least == 1.0) or any(cosine(first, other) < least for other in others):
        raise InputError(
            f"{opened.path}: the instances give {len(answers)} different answers to the canary; the memory, or a "
            "processor or card, of this machine is damaged, or the groups take only texts that are shorter"
        )
    return first


def _while_stopped(runnable: Any, place: Place, other: Place, canary: Run) -> set[bytes]:
    """The canary's answers of a run on ``place`` that stops, and of the one on ``other`` for which it does."""
    run = partial(runnable.run, canary.output, canary.piece.batch, canary.select)
    answers: set[bytes] = set()

    def between() -> None:
        answers.add(run(group=other.group, instance=other.instance).tobytes())

    pause = Pause(between)
    pause.ask()
    answers.add(run(group=place.group, instance=place.instance, pause=pause).tobytes())
    return answers


def _timed(runnable: Any, queue: Queue, place: Place, output: str, batch: Batch, select: Int32 | None) -> bytes:
    seconds = math.inf
    for _ in range(3):  # the first touches memory
        begin = time.monotonic()
        rows: F32 = runnable.run(output, batch, select, group=place.group, instance=place.instance)
        seconds = min(seconds, time.monotonic() - begin)
    queue.cost.observe(place.group, output, batch.tokens, seconds)
    return rows.tobytes()


class Engine:
    """Answers fronts that connect to ``listener``.

    It ends by ``Drain``, or when the supervisor at the other end of ``control`` has gone.
    """

    def __init__(self, model: Model, listener: socket.socket, control: socket.socket) -> None:
        graph = model.opened.graph
        self._kinds: dict[str, Any] = {name: graph.type_of(value).shape[0] for name, value in graph.outputs.items()}
        self._poll = select.epoll()
        self._listener: socket.socket | None = listener
        self._fronts: dict[int, Connection] = {}
        self._strangers: set[int] = set()
        self._control = Connection(control, self._poll)
        # Beside a card this thread has a core of its own.
        lend = not isinstance(model.runnable, Cards)
        self._instances = Instances(model.runnable, model.queue, self._tell, lend=lend)
        self._decoder = msgspec.msgpack.Decoder(Submit | Cancel)
        self._orders = msgspec.msgpack.Decoder(ToChild)
        self._give_up = math.inf
        listener.setblocking(False)
        self._poll.register(listener, select.EPOLLIN)

    def drain(self, seconds: float) -> None:
        """Takes no more connections, and returns from ``serve`` once the fronts have closed theirs, at the latest after
        so many seconds.
        """
        self._give_up = min(self._give_up, time.monotonic() + seconds)
        if self._listener is not None:
            while self._accept():  # fronts that wait since the engine before this one ended
                pass
            self._poll.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def report(self, message: msgspec.Struct) -> None:
        """Tells the supervisor, which may read it later: the socket does not block, and takes a large one in parts."""
        self._control.send(frame(message))

    def serve(self) -> None:
        """Polls until drained, or until the supervisor is gone."""
        stats_at = 0.0
        while True:
            expired, due = self._instances.tick()
            for job in expired:
                self._refuse(job, "expired", "the deadline passed while the run waited", None, 0.0)
            now = time.monotonic()
            if now >= stats_at:
                stats_at = now + _STATS_S
                self._send_stats()
            if now >= self._give_up or (self._listener is None and not self._fronts):
                break
            for fd, event in self._poll.poll(max(0.0, min(due, stats_at, self._give_up) - now)):
                if not self._attend(fd, event):
                    return
        for front in self._fronts.values():
            front.close()

    def _attend(self, fd: int, event: int) -> bool:
        """False when the supervisor has gone."""
        if self._listener is not None and fd == self._listener.fileno():
            self._accept()
        elif fd == self._control.fileno():
            if event & select.EPOLLOUT:
                self._control.flush()
            orders = self._control.read()
            for order in map(self._orders.decode, orders or ()):
                if isinstance(order, Drain):
                    self.drain(order.seconds)
            return orders is not None
        else:
            front = self._fronts.get(fd)
            if front is not None and event & select.EPOLLOUT:
                front.flush()
            if front is not None and event & ~select.EPOLLOUT:
                self._hear(fd, front)
        return True

    def _accept(self) -> bool:
        """Whether one was there."""
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it went away again, or there are no descriptors left: others are served on
            return False
        if peer_uid(sock) != os.geteuid():
            if peer_uid(sock) not in self._strangers:  # one line for each is enough
                self._strangers.add(peer_uid(sock))
                print(f"encast: a process of user {peer_uid(sock)} was turned away", file=sys.stderr)
            sock.close()
            return True
        front = Connection(sock, self._poll)
        self._fronts[front.fileno()] = front
        return True

    def _hear(self, fd: int, front: Connection) -> None:
        jobs: list[Job] = []
        try:
            frames = front.read()
            if frames:
                jobs = self._obey(front, [self._decoder.decode(data) for data in frames])
        except (msgspec.MsgspecError, ValueError) as error:
            print(f"encast: a front broke the protocol and is cut off: {error}", file=sys.stderr)
            frames = None
        if frames is None:
            del self._fronts[fd]
            front.close()
            for job in list(front.jobs.values()):
                self._instances.cancel(job)
        elif jobs:
            self._submit(jobs)

    def _obey(self, front: Connection, messages: list[Submit | Cancel]) -> list[Job]:
        """In their order. Returns the runs that are still wanted."""
        jobs = []
        for message in messages:
            if isinstance(message, Cancel):
                gone = front.jobs.pop(message.id, None)
                if gone is not None:
                    self._instances.cancel(gone)
            elif (job := self._job(front, message)) is not None:
                jobs.append(job)
        return [job for job in jobs if not job.over]

    def _submit(self, jobs: list[Job]) -> None:
        """Together: they may share batches."""
        all_refused, kept = self._instances.submit(jobs)
        for job, refused in all_refused:
            late = ", longer than the request has" if refused.late else ""
            # From its arrival: a run that waited for a new engine is refused for that, whatever waits before it here.
            after_s = time.monotonic() + refused.wait_s - job.arrived
            words = f"the queue is full: the answer would come after {after_s:.1f} s{late}; try again later"
            self._refuse(job, "overloaded", words, refused.retry_after, refused.wait_s, full=not refused.late)
        if kept is not None:
            self._instances.run(kept)

    def _job(self, front: Connection, message: Submit) -> Job | None:
        """None for one that the model cannot run, which is answered."""
        if message.id in front.jobs or len(front.jobs) >= _MOST_RUNS:
            raise ValueError(f"run {message.id} is under way already, or {_MOST_RUNS} are")
        if not math.isfinite(message.arrived + message.deadline) or message.before < 0:
            raise ValueError("times must be finite and earlier tokens not negative")
        ids, cu_seqlens = _vector(message.token_ids), _vector(message.cu_seqlens)
        types = None if message.token_type_ids is None else _vector(message.token_type_ids)
        chosen = None if message.select is None else _vector(message.select)
        try:
            if message.output not in self._kinds:
                raise InputError(f"the model has no output {message.output!r}; it has {sorted(self._kinds)}")
            arrays = Arrays(Batch(ids, cu_seqlens, types), chosen, self._kinds[message.output])
        except InputError as error:
            front.send(frame(Failed(message.id, "unprocessable", str(error), None, 0.0)))
            return None
        asked = Asked(front, message.id, arrays)
        arrived = min(message.arrived, time.monotonic())
        job = Job(message.output, arrays.lengths, arrived, message.deadline, message.before, asked)
        front.jobs[message.id] = job
        return job

    def _tell(self, outcomes: list[Outcome], backlog_s: float) -> None:
        """Called by whichever thread ran a batch. One message for each front: it is woken once."""
        answers: dict[Connection, bytearray] = {}
        for job, error in outcomes:
            asked: Asked = job.owner
            answer = _rows(job, asked, backlog_s) if error is None else _failed(asked, error, backlog_s)
            if (earlier := answers.setdefault(asked.connection, answer)) is not answer:
                earlier += answer
        for connection, data in answers.items():
            connection.send(data)
        for job, _ in outcomes:
            job.owner.connection.jobs.pop(job.owner.id, None)

    def _refuse(
        self, job: Job, kind: Kind, message: str, retry_after: float | None, backlog_s: float, *, full: bool = False
    ) -> None:
        asked: Asked = job.owner
        asked.connection.send(frame(Failed(asked.id, kind, message, retry_after, backlog_s, full)))
        asked.connection.jobs.pop(asked.id, None)

    def _send_stats(self) -> None:
        stats = self._instances.look(self._stats)
        if not self._control.unsent:
            self.report(Counted(msgspec.msgpack.encode(stats)))

    def _stats(self, queue: Queue) -> EngineStats:
        counters = queue.counters
        batch_tokens, counters.batch_tokens = counters.batch_tokens, []
        return EngineStats(
            queue.rows, queue.tokens, queue.backlog_s(time.monotonic()), len(queue.places.running), len(self._fronts),
            counters.runs, counters.rows, counters.tokens, counters.batches, counters.refused, counters.expired,
            counters.cancelled, self._instances.failed, list(counters.busy_s),
            [group.instances for group in queue.places.groups], batch_tokens,
        )  # fmt: skip


def _rows(job: Job, asked: Asked, backlog_s: float) -> bytearray:
    rows = asked.arrays.result
    assert rows is not None
    seconds, tokens = job.longest
    data = np.ascontiguousarray(rows).data
    return frame(Rows(asked.id, rows.shape[1], data, job.begun - job.came, seconds, tokens, backlog_s))


def _failed(asked: Asked, error: Exception, backlog_s: float) -> bytearray:
    if isinstance(error, InputError):
        return frame(Failed(asked.id, "unprocessable", str(error), None, backlog_s))
    words = "the engine failed to run the model; its log says why"
    return frame(Failed(asked.id, "failed", words, None, backlog_s))


def _vector(data: memoryview) -> Int32:
    return np.frombuffer(data, np.int32)


def end_with_any_thread() -> None:
    """Ends the process when a thread ends by an exception: the supervisor starts another, but sees no lost instance."""

    def end(failed: threading.ExceptHookArgs) -> None:
        sys.__excepthook__(failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback)
        sys.stderr.flush()
        os._exit(70)

    threading.excepthook = end


def main(arguments: Sequence[str]) -> int:
    """Runs the process; returns its exit code."""
    settings = msgspec.json.decode(arguments[0], type=EngineSettings)
    die_with_parent(signal.SIGKILL, os.getppid())
    end_with_any_thread()
    os.nice(settings.nice)  # before there are other threads, which inherit it
    # A thread that comes back from the core takes the interpreter from the one that polls after this time at most.
    sys.setswitchinterval(5e-4)
    listener, control = socket.socket(fileno=settings.listen_fd), socket.socket(fileno=settings.control_fd)
    try:
        model = open_model(settings.artifact, settings.options, sha256=settings.sha256, pin=settings.pin)
    except EncastError as error:
        control.send(frame(control_messages.Failed(str(error))))
        return 1
    for line in model.report:
        print(f"encast: {line}", file=sys.stderr, flush=True)
    engine = Engine(model, listener, control)
    wake_promptly()
    instances = sum(group.instances for group in model.setup.groups)
    engine.report(EngineStarted(model.words, instances, model.canary))
    engine.serve()
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    # Batches that run for nobody must not hold up the end.
    os._exit(code)
