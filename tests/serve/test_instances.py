"""The threads of the instances, over a model that does as it is told, and a front's socket that is not read."""

from __future__ import annotations

import select
import socket
import threading
import time
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import encast.serve.connections as connections
import encast.serve.instances as instances_module
from encast.backends.groups import InstanceGroup
from encast.batch import Batch
from encast.errors import InputError, ResourceError
from encast.serve.connections import Connection
from encast.serve.instances import Instances, Outcome
from encast.serve.join import Arrays
from encast.serve.places import Places
from encast.serve.queue import Job, Queue, QueueLimits


class Model:
    """Gives each sequence its sum; refuses a batch with a 13, fails on a 99, has no memory for a 77 beside others or
    for two of them, and waits before its first batch.
    """

    def __init__(self) -> None:
        self.go = threading.Event()
        self.entered = threading.Event()

    def run(self, output: str, batch: Batch, select: Any = None, **where: Any) -> Any:
        self.entered.set()
        assert self.go.wait(30)
        if 13 in batch.token_ids:
            raise InputError("13 is refused")
        if 99 in batch.token_ids:
            raise MemoryError("99")
        if (len(batch.cu_seqlens) > 2 and 77 in batch.token_ids) or list(batch.token_ids).count(77) > 1:
            raise ResourceError("no memory for 77")
        return np.add.reduceat(batch.token_ids, batch.cu_seqlens[:-1]).astype(np.float32)[:, None]


class Running:
    """One instance over ``Model``, which is busy with a first job until ``go``."""

    def __init__(self) -> None:
        self.model = Model()
        # Of two cores: a batch that takes all of them may be the caller's.
        queue = Queue(Places([InstanceGroup(1, 1)], [[[0]]], 2), QueueLimits(), longest_text=512)
        # The first batch's wait would count as its cost, and dear tokens make small batches.
        queue.cost.observe = lambda *_: None  # type: ignore[method-assign]
        self.told: SimpleQueue[tuple[Job, Exception | None, float]] = SimpleQueue()
        self.instances = Instances(self.model, queue, self._tell)
        self.first = self.submit([1])
        assert self.model.entered.wait(30)

    def _tell(self, outcomes: list[Outcome], backlog_s: float) -> None:
        for job, error in outcomes:
            self.told.put((job, error, backlog_s))

    def submit(self, *rows: list[int]) -> Job:
        arrays = Arrays(Batch.of(rows), None, "seqs")
        now = time.monotonic()
        job = Job("sums", arrays.lengths, now, now + 60, 1, SimpleNamespace(arrays=arrays))
        assert self.instances.submit([job]) == ([], None)
        return job

    def finish(self, jobs: int) -> dict[Job, Any]:
        """The answer or error of each."""
        self.model.go.set()
        found = {}
        for _ in range(jobs):
            job, error, backlog = self.told.get(timeout=30)
            assert backlog >= 0
            found[job] = error or job.owner.arrays.result.ravel().tolist()
        self.instances.close()
        assert self.told.empty()
        return found


def test_jobs_that_come_together_share_a_batch_and_are_told_together() -> None:
    model = Model()
    model.go.set()
    told: SimpleQueue[list[Outcome]] = SimpleQueue()
    queue = Queue(Places([InstanceGroup(1, 1)], [[[0]]], 2), QueueLimits(), longest_text=512)
    instances = Instances(model, queue, lambda outcomes, _: told.put(outcomes))
    jobs, now = [], time.monotonic()
    for first in (1, 2, 3):
        arrays = Arrays(Batch.of([[first, first]]), None, "seqs")
        jobs.append(Job("sums", arrays.lengths, now, now + 60, 0, SimpleNamespace(arrays=arrays)))
    assert instances.submit(jobs) == ([], None)
    assert told.get(timeout=30) == [(job, None) for job in jobs]
    assert [job.owner.arrays.result.tolist() for job in jobs] == [[[2]], [[4]], [[6]]]
    instances.close()
    assert queue.counters.batches == 1


@pytest.mark.parametrize(("cores", "seconds", "kept"), [(1, 1e-3, True), (1, 3e-3, False), (2, 1e-3, False)])
def test_a_short_batch_that_takes_all_cores_is_run_by_its_caller(cores: int, seconds: float, kept: bool) -> None:
    model = Model()
    model.go.set()
    told: SimpleQueue[tuple[int, list[Outcome]]] = SimpleQueue()
    queue = Queue(Places([InstanceGroup(1, 1)], [[[0]]], cores), QueueLimits(), longest_text=512)
    queue.cost.observe(0, "sums", 2, seconds)
    instances = Instances(model, queue, lambda outcomes, _: told.put((threading.get_ident(), outcomes)))
    now = time.monotonic()
    arrays = Arrays(Batch.of([[3, 4]]), None, "seqs")
    job = Job("sums", arrays.lengths, now, now + 60, 0, SimpleNamespace(arrays=arrays))
    refused, batch = instances.submit([job])
    assert (refused, batch is not None) == ([], kept)
    if batch is not None:
        assert told.empty()
        instances.run(batch)
    thread, outcomes = told.get(timeout=30)
    assert (thread == threading.get_ident(), outcomes) == (kept, [(job, None)])
    assert job.owner.arrays.result.tolist() == [[7]]
    instances.close()
    assert queue.idle


class Stopping:
    """Whose first run stops once it is asked to, and gives each sequence its sum."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.order: list[tuple[int, int]] = []

    def run(self, output: str, batch: Batch, select: Any = None, *, group: int, instance: int, pause: Any) -> Any:
        first = not self.entered.is_set()
        self.entered.set()
        assert (pause is None) == (not first)
        if first:
            assert pause.asked.wait(30)
            pause.between()
        self.order.append((len(batch.token_ids), threading.get_ident()))
        return np.add.reduceat(batch.token_ids, batch.cu_seqlens[:-1]).astype(np.float32)[:, None]


class Pause:
    """As ``backends.cpu.Pause``, with what it was given in reach."""

    def __init__(self, between: Any) -> None:
        self.between, self.asked = between, threading.Event()
        self.ask = self.asked.set


def stopped(monkeypatch: pytest.MonkeyPatch, tell: Any) -> tuple[Stopping, Instances, Any, Any]:
    """A long batch that stops for a short one."""
    monkeypatch.setattr(instances_module, "Pause", Pause)
    model = Stopping()
    queue = Queue(Places([InstanceGroup(1, 1)], [[[0]]], 1), QueueLimits(), longest_text=512)
    queue.cost.observe(0, "sums", 400, 20.0)
    queue.cost.observe(0, "sums", 2, 0.1)
    instances = Instances(model, queue, tell)
    jobs = []
    for length in (400, 2):
        now = time.monotonic()
        arrays = Arrays(Batch.of([[1] * length]), None, "seqs")
        jobs.append(Job("sums", arrays.lengths, now, now + 60, 0, SimpleNamespace(arrays=arrays)))
        assert instances.submit(jobs[-1:]) == ([], None)
        assert model.entered.wait(30)
    return model, instances, *jobs


def test_a_long_batch_stops_and_its_thread_runs_the_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    told: SimpleQueue[list[Outcome]] = SimpleQueue()
    model, instances, long, short = stopped(monkeypatch, lambda outcomes, _: told.put(outcomes))
    assert told.get(timeout=30) == [(short, None)]
    assert told.get(timeout=30) == [(long, None)]
    assert [length for length, _ in model.order] == [2, 400]
    assert len({thread for _, thread in model.order}) == 1
    assert [job.owner.arrays.result.tolist() for job in (long, short)] == [[[400]], [[2]]]
    instances.close()
    assert instances.look(lambda queue: queue.idle)


def test_a_defect_while_a_batch_has_stopped_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: SimpleQueue[Any] = SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", ended.put)

    def tell(outcomes: list[Outcome], backlog_s: float) -> None:
        raise RuntimeError("a defect")

    stopped(monkeypatch, tell)
    assert "a defect" in str(ended.get(timeout=30).exc_value.__cause__)


def test_one_that_is_refused_does_not_fail_the_others_of_its_batch() -> None:
    running = Running()
    one, bad, other = running.submit([1, 2], [3]), running.submit([4], [13]), running.submit([5, 5])
    found = running.finish(4)
    assert (found[running.first], found[one], found[other]) == ([1], [3, 3], [10])
    assert isinstance(found[bad], InputError)
    assert running.instances.failed == 0


def test_a_batch_that_memory_does_not_hold_runs_one_by_one(capfd: pytest.CaptureFixture[str]) -> None:
    running = Running()
    one, large, beyond = running.submit([1, 2]), running.submit([77]), running.submit([77, 77])
    found = running.finish(4)
    assert (found[one], found[large]) == ([3], [77])
    assert isinstance(found[beyond], ResourceError)
    assert running.instances.failed == 1
    assert "no memory for 77" in capfd.readouterr().err


@pytest.mark.parametrize("lend", [True, False])
def test_the_thread_that_submits_is_lent_or_not(lend: bool) -> None:
    queue = Queue(Places([InstanceGroup(1, 2)], [[[]]], 2), QueueLimits(), longest_text=512)
    queue.cost.observe(0, "out", 8, 1e-5)
    model = Model()
    model.go.set()
    instances = Instances(model, queue, lambda outcomes, backlog_s: None, lend=lend)
    arrays = Arrays(Batch.of([[1, 2]]), None, "seqs")
    job = Job("out", arrays.lengths, time.monotonic(), time.monotonic() + 60, 0, SimpleNamespace(arrays=arrays))
    refused, kept = instances.submit([job])
    assert refused == []
    assert (kept is not None) == lend
    instances.close()


def test_an_unforeseen_error_fails_its_batch_and_nothing_after(capfd: pytest.CaptureFixture[str]) -> None:
    running = Running()
    one, bad = running.submit([1, 2]), running.submit([99])
    after = running.submit([5] * 100)  # of another length class
    found = running.finish(4)
    assert isinstance(found[one], MemoryError)
    assert isinstance(found[bad], MemoryError)
    assert found[after] == [500]
    assert running.instances.failed == 2
    assert "MemoryError: 99" in capfd.readouterr().err


def test_what_is_cancelled_while_it_waits_or_runs_is_not_told() -> None:
    running = Running()
    waits, stays = running.submit([1]), running.submit([2])
    running.instances.cancel(waits)
    running.instances.cancel(running.first)
    assert running.finish(1) == {stays: [2]}


def test_a_batch_that_nobody_wants_any_more_teaches_the_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running()
    queue = running.instances._queue
    observed: list[int] = []
    monkeypatch.setattr(queue.cost, "observe", lambda group, output, tokens, seconds: observed.append(tokens))
    gone = running.submit([2, 2])

    def tell(outcomes: list[Outcome], backlog_s: float) -> None:
        running.instances.cancel(gone)  # its batch is taken already, and begins after this
        running._tell(outcomes, backlog_s)

    monkeypatch.setattr(running.instances, "_tell", tell)
    assert running.finish(1) == {running.first: [1]}
    assert observed == [1]


def test_an_expired_job_is_handed_out_once() -> None:
    running = Running()
    late = running.submit([1])
    late.deadline = time.monotonic()
    running.instances.look(lambda queue: setattr(queue, "soonest", 0.0))
    assert running.instances.tick()[0] == [late]
    assert running.instances.tick()[0] == []
    assert running.finish(1) == {running.first: [1]}


def test_a_side_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_MOST_UNSENT", 1 << 20)
    ours, theirs = socket.socketpair()
    with ours, theirs, select.epoll() as poll:
        connection = Connection(ours, poll)
        for _ in range(3):
            connection.send(bytes(1 << 18))
        assert connection.unsent > 0
        received = 0
        while connection.unsent:  # it reads after all
            received += len(theirs.recv(1 << 16))
            connection.flush()
        while received < 3 << 18:
            received += len(theirs.recv(1 << 16))
        assert poll.poll(0) == []
        for _ in range(8):
            connection.send(bytes(1 << 18))
        ((_, event),) = poll.poll(0)
        assert event & select.EPOLLHUP
        assert connection.read() is None
        connection.close()
        connection.send(b"nobody")  # and closed connections take no notice
