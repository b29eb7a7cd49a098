"""The engine process: owns one model's queue and instances, and answers the runs of all fronts.

``python -m encast.serve.engine OPTIONS``, where OPTIONS is the JSON of ``EngineOptions``. One thread polls the sockets;
a thread for each instance runs batches and sends what they answer.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

import encast.artifact as artifacts
from encast.artifact import Artifact
from encast.backends.devices import find_device
from encast.backends.groups import InstanceGroup, Setup
from encast.batch import Batch, Int32
from encast.engine import setup_of
from encast.errors import ArtifactError, EncastError, InputError
from encast.launch.process import die_with_parent
from encast.machine import usable_cores
from encast.serve.canary import canary
from encast.serve.connections import Asked, Connection, peer_uid
from encast.serve.errors import Kind
from encast.serve.instances import Instances
from encast.serve.join import Arrays
from encast.serve.places import Places
from encast.serve.queue import Job, Queue, QueueLimits
from encast.serve.wire import Cancel, EngineFailed, EngineReady, EngineStats, Failed, Rows, Submit, frame
from encast.tune.configuration import artifact_sha

__all__ = ["Engine", "EngineOptions", "default_setup", "open_model"]

_WIDEST = 8
"""Threads of the instance for a lone text: measured gains end there."""

_STATS_S = 0.25
_MOST_RUNS = 1 << 16
"""Without an answer, of one front."""


class EngineOptions(msgspec.Struct, forbid_unknown_fields=True):
    """``listen_fd``: a listening Unix socket; ``control_fd``: a connected one, to the supervisor; both inherited.
    ``config``: what ``encast tune`` wrote. ``batch_tokens``: overrules the set-up's. ``parent``: the process with which
    this one ends. ``drain_s``: after SIGTERM, until what is queued is dropped. ``sha256``: what ``artifact_sha`` must
    say of the artifact. ``threads`` and ``instances``: as of ``encast.load``, in place of the default set-up. The rest:
    see ``QueueLimits``.
    """

    artifact: str
    listen_fd: int
    control_fd: int | None = None
    parent: int | None = None
    sha256: str | None = None
    config: str | None = None
    threads: int | None = None
    instances: int | None = None
    batch_tokens: int | None = None
    max_queue_tokens: int = QueueLimits.max_tokens
    max_wait_s: float = QueueLimits.max_wait_s
    max_delay_s: float = QueueLimits.max_delay_s
    slowdown: float = QueueLimits.slowdown
    drain_s: float = 25.0
    pin: bool = True


def default_setup(longest_text: int, cores: int) -> Setup:
    """One instance a core for all texts, and a wide one on the same cores for a lone text."""
    groups = [InstanceGroup(1, min(cores, _WIDEST), None)]
    if cores > 1:
        groups.insert(0, InstanceGroup(cores, 1, longest_text))
    return Setup(tuple(groups), QueueLimits.batch_tokens, shared_cores=True)


def _setup(opened: Artifact, options: EngineOptions, longest_text: int, cores: int) -> Setup:
    if options.config is not None:
        return setup_of(opened, options.config)
    if options.threads is None and options.instances is None:
        return default_setup(longest_text, cores)
    instances = options.instances or max(1, cores // (options.threads or cores))
    group = InstanceGroup(instances, options.threads or max(1, cores // instances))
    return Setup((group,), QueueLimits.batch_tokens)


def open_model(options: EngineOptions) -> tuple[Artifact, Any, Queue]:
    """The artifact, its instances (a ``Grouped``), warm, and their queue with a cost model. Raises ``EncastError``."""
    opened = artifacts.open(options.artifact)
    if options.sha256 not in (None, artifact_sha(opened)):
        raise ArtifactError(f"{opened.path} was replaced by another artifact; send the server SIGHUP to serve that one")
    longest = opened.graph.meta.max_len
    cores = len(usable_cores())
    setup = _setup(opened, options, longest, cores)
    runnable: Any = find_device("cpu", ()).open(opened, config=setup, apart=True, pin=options.pin)
    limits = QueueLimits(
        batch_tokens=options.batch_tokens or setup.batch_tokens,
        max_tokens=options.max_queue_tokens,
        max_wait_s=options.max_wait_s,
        slowdown=options.slowdown,
        max_delay_s=options.max_delay_s,
    )
    queue = Queue(Places(setup.groups, runnable.cpus, cores), limits, longest_text=longest)
    _warm_up(opened, runnable, queue)
    return opened, runnable, queue


def _warm_up(opened: Artifact, runnable: Any, queue: Queue) -> None:
    """Runs and times every instance; the bits of one text must be those of the first, alone and beside another."""
    graph = opened.graph
    output = next(name for name in ("embedding", "logits", "last_hidden_state") if name in graph.outputs)
    kind = graph.type_of(graph.outputs[output]).shape[0]
    text = _text(16, graph.meta.max_len, graph.meta.vocab)
    expected = None
    for group, instances in enumerate(queue.places.by_group):
        longest = min(queue.places.groups[group].longest or graph.meta.max_len, graph.meta.max_len)
        sizes = sorted({min(size, longest) for size in (16, 64, 256)})
        for place in instances:
            for size in sizes:
                beside = _text(size, longest, graph.meta.vocab)
                batch = Batch.of([text, beside] if len(text) <= longest else [beside])
                chosen = np.array([0], np.int32) if kind == "selected" else None
                for _ in range(3):  # the first touches memory, the others count
                    begin = time.monotonic()
                    rows = runnable.run(output, batch, chosen, group=group, instance=place.instance)
                    seconds = time.monotonic() - begin
                queue.cost.observe(group, output, batch.tokens, seconds)
                if len(text) > longest:
                    continue
                first = rows[: len(text)] if kind == "tokens" else rows[:1]
                if expected is None:
                    expected = runnable.run(output, Batch.of([text]), chosen, group=group, instance=place.instance)
                if first.tobytes() != expected.tobytes() or not np.isfinite(first).all():
                    raise InputError(
                        f"{opened.path}: instance {place.instance} of group {group} answers the canary with other bits "
                        "than the first instance alone, or with numbers that are not finite; the artifact or this "
                        "machine's memory is damaged"
                    )


def ask_canary(opened: Artifact, runnable: Any, queue: Queue) -> bytes:
    """The answer to ``canary``, f32; raises ``InputError`` unless all instances that take its texts give the same."""
    output, batch, select = canary(opened.graph)
    longest = int(np.diff(batch.cu_seqlens).max())
    answers = {
        runnable.run(output, batch, select, group=place.group, instance=place.instance).tobytes()
        for group in queue.places.covering(longest)
        for place in queue.places.by_group[group]
    }
    if len(answers) != 1:
        raise InputError(f"{opened.path}: instances answer the canary with different bits; this machine is damaged")
    return answers.pop()


def _text(tokens: int, longest: int, vocab: int) -> list[int]:
    return [(7 * index + 3) % vocab for index in range(min(tokens, longest))]


class Engine:
    """Answers fronts that connect to ``listener``, until ``stop`` or SIGTERM and all that was accepted is answered."""

    def __init__(
        self, opened: Artifact, runnable: Any, queue: Queue, listener: socket.socket, control: socket.socket | None,
        *, drain_s: float,
    ) -> None:  # fmt: skip
        graph = opened.graph
        self._kinds: dict[str, Any] = {name: graph.type_of(value).shape[0] for name, value in graph.outputs.items()}
        self._drain_s = drain_s
        self._poll = select.epoll()
        self._listener: socket.socket | None = listener
        self._fronts: dict[int, Connection] = {}
        self._control = None if control is None else Connection(control, self._poll)
        self._instances = Instances(runnable, queue, self._tell)
        self._decoder = msgspec.msgpack.Decoder(Submit | Cancel)
        self._wake_in, self._wake_out = socket.socketpair()
        self._give_up = math.inf
        for sock in (self._wake_in, self._wake_out, listener):
            sock.setblocking(False)
        self._poll.register(self._wake_in, select.EPOLLIN)
        self._poll.register(listener, select.EPOLLIN)

    def stop(self) -> None:
        """From any thread or a signal handler: take nothing new, answer what was taken, then return from ``serve``."""
        self._give_up = min(self._give_up, time.monotonic() + self._drain_s)
        with contextlib.suppress(BlockingIOError):
            self._wake_out.send(b"\0")

    def serve(self) -> None:
        """Polls until stopped and drained, or until the supervisor is gone."""
        stats_at = 0.0
        while True:
            expired, due = self._instances.tick()
            for job in expired:
                self._refuse(job, "expired", "the deadline passed while the run waited", None, 0.0)
            now = time.monotonic()
            if now >= stats_at:
                stats_at = now + _STATS_S
                self._send_stats()
            if self._give_up < math.inf:
                self._stop_listening()
                if now >= self._give_up or self._drained():
                    break
                due = min(due, now + 0.01)  # what is left is answered by other threads
            for fd, event in self._poll.poll(max(0.0, min(due, stats_at) - now)):
                if not self._attend(fd, event):
                    return
        for front in self._fronts.values():
            front.close()

    def _attend(self, fd: int, event: int) -> bool:
        """False when the supervisor has gone."""
        if fd == self._wake_in.fileno():
            self._wake_in.recv(64)
        elif self._listener is not None and fd == self._listener.fileno():
            self._accept()
        elif self._control is not None and fd == self._control.fileno():
            if event & select.EPOLLOUT:
                self._control.flush()
            return self._control.read() is not None
        else:
            front = self._fronts.get(fd)
            if front is not None and event & select.EPOLLOUT:
                front.flush()
            if front is not None and event & ~select.EPOLLOUT:
                self._hear(fd, front)
        return True

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it went away again, or there are no descriptors left: others are served on
            return
        if peer_uid(sock) != os.geteuid():
            print(f"encast: a process of user {peer_uid(sock)} was turned away", file=sys.stderr)
            sock.close()
            return
        front = Connection(sock, self._poll)
        self._fronts[front.fileno()] = front

    def _hear(self, fd: int, front: Connection) -> None:
        try:
            frames = front.read()
            for data in frames or ():
                self._obey(front, self._decoder.decode(data))
        except (msgspec.MsgspecError, ValueError) as error:
            print(f"encast: a front broke the protocol and is cut off: {error}", file=sys.stderr)
            frames = None
        if frames is None:
            del self._fronts[fd]
            front.close()
            for job in list(front.jobs.values()):
                self._instances.cancel(job)

    def _obey(self, front: Connection, message: Submit | Cancel) -> None:
        if isinstance(message, Cancel):
            job = front.jobs.pop(message.id, None)
            if job is not None:
                self._instances.cancel(job)
            return
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
            return
        asked = Asked(front, message.id, arrays)
        arrived = min(message.arrived, time.monotonic())
        job = Job(message.output, arrays.lengths, arrived, message.deadline, message.before, asked)
        front.jobs[message.id] = job
        if self._give_up < math.inf:
            self._refuse(job, "unavailable", "the engine is about to end", 1.0, 0.0)
            return
        refused, _ = self._instances.submit(job)
        if refused is not None:
            late = ", after the request's deadline" if refused.late else ""
            self._refuse(
                job, "overloaded", f"a new run would wait {refused.wait_s:.1f} s{late}; try again later",
                refused.retry_after, refused.wait_s,
            )  # fmt: skip

    def _tell(self, job: Job, error: Exception | None, backlog_s: float) -> None:
        """Called by the instances' threads."""
        if isinstance(error, InputError):
            self._refuse(job, "unprocessable", str(error), None, backlog_s)
        elif error is not None:
            self._refuse(job, "failed", "the engine failed to run the model; its log says why", None, backlog_s)
        else:
            asked: Asked = job.owner
            rows = asked.arrays.result
            assert rows is not None
            seconds, tokens = job.longest
            data = np.ascontiguousarray(rows).data
            answer = Rows(asked.id, rows.shape[1], data, job.begun - job.came, seconds, tokens, backlog_s)
            asked.connection.send(frame(answer))
            asked.connection.jobs.pop(asked.id, None)  # after it is sent: a drained engine ends once there are none

    def _refuse(self, job: Job, kind: Kind, message: str, retry_after: float | None, backlog_s: float) -> None:
        asked: Asked = job.owner
        asked.connection.send(frame(Failed(asked.id, kind, message, retry_after, backlog_s)))
        asked.connection.jobs.pop(asked.id, None)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._poll.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _drained(self) -> bool:
        idle: bool = self._instances.look(lambda queue: queue.idle)
        return idle and not any(front.jobs or front.unsent for front in self._fronts.values())

    def _send_stats(self) -> None:
        stats = self._instances.look(self._stats)
        if self._control is not None and not self._control.unsent:
            self._control.send(frame(stats))

    def _stats(self, queue: Queue) -> EngineStats:
        counters = queue.counters
        batch_tokens, counters.batch_tokens = counters.batch_tokens, []
        return EngineStats(
            queue.rows, queue.tokens, queue.backlog_s(time.monotonic()), len(queue.places.running), len(self._fronts),
            counters.runs, counters.rows, counters.tokens, counters.batches, counters.refused, counters.expired,
            counters.cancelled, self._instances.failed, list(counters.busy_s),
            [group.instances for group in queue.places.groups], batch_tokens,
        )  # fmt: skip


def _vector(data: memoryview) -> Int32:
    return np.frombuffer(data, np.int32)


def main(arguments: Sequence[str]) -> int:
    """Runs the process; returns its exit code."""
    options = msgspec.json.decode(arguments[0], type=EngineOptions)
    if options.parent is not None:
        die_with_parent(signal.SIGKILL, options.parent)
    # A thread that comes back from the core takes the interpreter from the one that polls after this time at most.
    sys.setswitchinterval(5e-4)
    begin = time.monotonic()
    listener = socket.socket(fileno=options.listen_fd)
    control = None if options.control_fd is None else socket.socket(fileno=options.control_fd)
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the supervisor says what to do
    try:
        opened, runnable, queue = open_model(options)
        answer = ask_canary(opened, runnable, queue)
    except EncastError as error:
        if control is None:
            print(f"encast: error: {error}", file=sys.stderr)
        else:
            control.send(frame(EngineFailed(str(error))))
        return 1
    engine = Engine(opened, runnable, queue, listener, control, drain_s=options.drain_s)
    signal.signal(signal.SIGTERM, lambda *_: engine.stop())
    if stopped:
        return 0
    if control is not None:
        control.send(
            frame(
                EngineReady(
                    Setup(queue.places.groups, queue.limits.batch_tokens).text,
                    time.monotonic() - begin,
                    sum(group.instances for group in queue.places.groups),
                    answer,
                )
            )
        )
    engine.serve()
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    # Batches that run for nobody must not hold up the end.
    os._exit(code)
