"""Backends that crash, hang, leak or fail end as a sentence that says so, and everything that they started ends."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from lab import PEERS, TINY

from encast.batch import Batch
from encast.bench.config import load_jobs
from encast.bench.models import make_model
from encast.bench.peers.base import BackendSpec, ModelFiles
from encast.bench.system import System
from encast.bench.worker import Limits, Worker, WorkerError, receive
from encast.errors import InputError, ResourceError
from encast.launch import Placement
from encast.measure import processes
from encast.measure.batches import portions

pytestmark = pytest.mark.serial("starts processes on processors of their own and times them")

ALL = tuple(sorted(os.sched_getaffinity(0)))
BATCHES = [Batch.of([[number, 7, 8, 9], [number, 5, 6]]) for number in range(1, 5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    (job,) = load_jobs(TINY)
    return make_model(job.model, tmp_path_factory.mktemp("cache"))


def spec(peer: str, **options: Any) -> BackendSpec:
    return BackendSpec(peer.lower(), f"{PEERS}:{peer}", "f32", options=options)


def system(model: ModelFiles, what: BackendSpec, instances: int = 1, **limits: float) -> System:
    places = [Placement((ALL[index % len(ALL)],), None, 1) for index in range(instances)]
    return System(what, model, places, cache=model.checkpoint.parent, limits=Limits(**limits))


@pytest.fixture(scope="module")
def pair(model: ModelFiles) -> Iterator[System]:
    """Two open instances, bound to ``BATCHES``."""
    with system(model, spec("Honest", milliseconds=1), instances=2) as both:
        both.open()
        both.bind(BATCHES)
        yield both


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("abort", "crashed", "ended by signal SIGABRT during 'burst'"),
        ("segfault", "crashed", "ended by signal SIGSEGV during 'burst'"),
        ("exit", "crashed", "ended by exit code 3 during 'burst'; it said last:\n  going down"),
        ("raise", "failed", "burst: ZeroDivisionError: division by zero"),
    ],
)
def test_a_crash_has_its_reason(model: ModelFiles, how: str, status: str, said: str) -> None:
    with system(model, spec("Failing", how=how, after=2)) as failing:
        failing.open(BATCHES)
        failing.bind(BATCHES)
        with pytest.raises(WorkerError) as caught:
            failing.burst(calls=5)
    assert caught.value.status == status
    assert f"failing: {said}" in str(caught.value)


def test_a_hang_ends(model: ModelFiles) -> None:
    with system(model, spec("Failing", how="hang", after=0), call_seconds=0.3) as failing:
        failing.open()
        failing.bind(BATCHES)
        (pid,) = [worker.pid for worker in failing._workers]
        with pytest.raises(WorkerError, match=r"failing: no answer to 'burst' within") as caught:
            failing.burst(calls=1)
        assert caught.value.status == "timed_out"
        assert processes.family(pid) == []


def test_a_leak_ends(model: ModelFiles) -> None:
    with system(model, spec("Failing", how="leak"), growth_mib=100) as failing:
        failing.open()
        failing.bind(BATCHES)
        failing.limit_growth()
        with pytest.raises(WorkerError, match=r"MiB resident, 100 MiB more than after its warm-up") as caught:
            failing.burst(calls=10)
        assert caught.value.status == "leaked"


def test_what_needs_more_than_there_is_ends(model: ModelFiles) -> None:
    with system(model, spec("Failing", how="leak", after=1), memory_share=0.02, growth_mib=1e6) as failing:
        failing.open()
        failing.bind(BATCHES)
        with pytest.raises(WorkerError, match=r"more than 2% of the memory there is; .*limits.memory_share") as caught:
            failing.burst(calls=1000)
        assert caught.value.status == "leaked"


def test_what_a_backend_started_ends_with_it(model: ModelFiles) -> None:
    worker = Worker(spec("Honest"), model, 1, cache=model.checkpoint.parent)
    worker.ask("open", seconds=60)
    folder = worker.folder
    assert [process.pid for process in processes.family(worker.pid)] == [worker.pid]
    worker.close()
    assert processes.family(worker.pid) == []
    assert not folder.exists()


def test_a_peak_belongs_to_its_point(model: ModelFiles) -> None:
    with system(model, spec("Failing", how="swell")) as swelling:
        swelling.open()
        swelling.bind(BATCHES)
        swelling.burst(calls=1)
        peak = swelling.memory()["peak_rss_bytes"]
        swelling.forget_peak()
        later = swelling.memory()
    assert peak is not None
    if later["peak_rss_bytes"] is None:
        pytest.skip("this kernel keeps the peak of a process for ever")
    assert peak - later["peak_rss_bytes"] > 100 << 20
    assert later["peak_rss_bytes"] >= later["pss_bytes"]


def test_a_daemon_is_counted_and_ends(model: ModelFiles, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with system(model, spec("Daemon", milliseconds=5, pid_file=str(file))) as daemon:
        daemon.open()
        daemon.bind(BATCHES)
        pid = int(file.read_text())
        (worker,) = daemon._workers
        assert [process.pid for process in worker.family()] == sorted([worker.pid, pid])
        assert max(daemon.watch(0.3)) >= 2
        # Only the daemon uses any: the worker sleeps.
        before = processes.cpu_time(worker.family()).cpu
        end = time.monotonic() + 60
        while processes.cpu_time(worker.family()).cpu < before + 50_000_000:
            assert time.monotonic() < end, "nobody counts what the daemon uses"
            time.sleep(0.01)
    assert not running(pid)


def test_a_daemon_ends_with_a_worker_that_crashed(model: ModelFiles, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with system(model, spec("Daemon", pid_file=str(file))) as daemon:
        daemon.open()
        (worker,) = daemon._workers
        assert len(worker.family()) == 2
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="SIGKILL"):
            daemon.bind(BATCHES)
    assert not running(int(file.read_text()))


def running(pid: int) -> bool:
    """Whether it still does something; the kernel ends a killed process when it next gets to it."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state in "ZX":
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (BackendSpec("gone", "no.such.module:Peer", "f32"), "no.such.module:Peer: cannot be imported"),
        (BackendSpec("gone", f"{PEERS}:Nobody", "f32"), "has no Nobody; it has"),
        (BackendSpec("gone", f"{PEERS}:spin", "f32"), "is no Peer"),
        (BackendSpec("gone", "nothing", "f32"), "names nothing"),
        (BackendSpec("gone", f"{PEERS}:Honest", "int8"), "honest has no int8; it has f32"),
    ],
)
def test_a_peer_that_cannot_be_made(model: ModelFiles, wrong: BackendSpec, said: str) -> None:
    with system(model, wrong) as gone, pytest.raises(WorkerError) as caught:
        gone.open()
    assert caught.value.status == "failed"
    assert said in str(caught.value)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("python", ["/no/such/python", "/tmp", __file__])
def test_an_interpreter_that_is_none(model: ModelFiles, temporary: Path, python: str) -> None:
    absent = BackendSpec("elsewhere", f"{PEERS}:Honest", "f32", python=python)
    said = rf"elsewhere: {python} cannot be started \(.*\); correct `python` in the backend's YAML"
    with pytest.raises(WorkerError, match=said) as caught:
        Worker(absent, model, 1, cache=model.checkpoint.parent)
    assert caught.value.status == "unavailable"
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("what", "number", "said"),
    [
        ("tempfile.mkdtemp", errno.ENOSPC, "temporary files cannot be written (No space left on device); make room"),
        ("pathlib.Path.symlink_to", errno.ENOSPC, "temporary files cannot be written (No space left on device); "),
        ("subprocess.Popen", errno.EAGAIN, "its process cannot be started (Resource temporarily unavailable); free"),
        ("subprocess.Popen", errno.ENOMEM, "its process cannot be started (Cannot allocate memory); free memory"),
        ("subprocess.Popen", errno.EMFILE, "(Too many open files)"),
        ("socket.socketpair", errno.EMFILE, "(Too many open files)"),
    ],
)
def test_what_the_machine_refuses_is_no_fault_of_a_backend(
    model: ModelFiles, temporary: Path, monkeypatch: pytest.MonkeyPatch, what: str, number: int, said: str
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(what, refuse)
    elsewhere = BackendSpec("elsewhere", f"{PEERS}:Honest", "f32", python=sys.executable)
    with pytest.raises(ResourceError, match=re.escape(said)) as caught:
        Worker(elsewhere, model, 1, cache=model.checkpoint.parent)
    assert "YAML" not in str(caught.value)
    assert list(temporary.iterdir()) == []


def test_files_that_cannot_be_written_are_no_fault_of_a_backend(model: ModelFiles, temporary: Path) -> None:
    with system(model, spec("Honest"), instances=2) as both:
        both.open()
        both.bind(BATCHES)
        both.verify()
        shutil.rmtree(both._workers[0].folder)
        for act in (
            both.outputs,
            lambda: both.stream([0], BATCHES),
            lambda: both.burst(calls=1, in_step=True),
            lambda: both.fresh_calls(BATCHES[0], known_first=True),
            lambda: both.bind(BATCHES),
        ):
            with pytest.raises(ResourceError, match=r"temporary files cannot be written \(.*folder with TMPDIR"):
                act()


def test_bursts_of_instances_are_beside_each_other(pair: System) -> None:
    times = pair.burst(calls=6)
    assert [len(own) for own in times] == [6, 6]
    assert min(min(own) for own in times) >= 1_000_000  # each call computes for a millisecond
    usage = pair.usages[-1]
    assert usage.cpu_s > 0
    assert usage.wall_s >= 0.006
    times = pair.burst(seconds=0.05)
    assert all(own for own in times)


def test_instances_in_step_wait_for_each_other(model: ModelFiles) -> None:
    turns = itertools.count()
    places = [Placement((ALL[index % len(ALL)],), None, 1) for index in range(2)]
    alternating = System(
        spec("Alternating"),
        model,
        places,
        cache=model.checkpoint.parent,
        environment=lambda place: {"ENCAST_TEST_ODD": str(next(turns))},
    )
    with alternating:
        alternating.open()
        alternating.bind(BATCHES)
        times = alternating.burst(calls=24, in_step=True)
    # In each step one of the two sleeps, and the other waits for it. A busy machine makes calls longer, never shorter.
    assert [len(own) for own in times] == [24, 24]
    slow = [[call >= 20_000_000 for call in own] for own in times]
    assert all(one or other for one, other in zip(*slow, strict=True))
    # Each sleeps in half of the steps, and waits 20 ms before each of these; the wait is no part of a call's time.
    assert all(12 <= sum(own) < 24 for own in slow)
    assert all(sorted(own)[14] < 40_000_000 for own in times)
    assert alternating.usages[-1].wall_s >= 24 * 0.02


def test_a_burst_has_calls_or_seconds(pair: System) -> None:
    with pytest.raises(InputError, match="in step has a number of calls"):
        pair.burst(seconds=1, in_step=True)
    with pytest.raises(InputError, match="either calls or seconds"):
        pair.burst()


def test_new_and_known_texts_are_first_in_turn(pair: System, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.bind(BATCHES)
    asked = []
    ask = Worker.ask

    def spy(worker: Worker, do: str, **fields: Any) -> Any:
        asked.append(Path(fields["file"]).stem)
        return ask(worker, do, **fields)

    monkeypatch.setattr(Worker, "ask", spy)
    times = [*pair.fresh_calls(BATCHES[1], known_first=True), *pair.fresh_calls(BATCHES[2], known_first=False)]
    assert asked == ["known", "fresh", "fresh", "known"]
    assert all(one >= 1_000_000 for one in times)


def test_outputs_are_of_the_bound_batches(pair: System) -> None:
    pair.bind(BATCHES)
    pair.verify()
    outputs = pair.outputs()
    assert len(outputs) == 2 * len(BATCHES)
    by_ids = {tuple(batch.token_ids.tolist()): states for batch, states in outputs}
    assert len(by_ids) == len(BATCHES)
    assert all(states.shape == (7, 64) for states in by_ids.values())
    first, second = by_ids[tuple(BATCHES[0].token_ids.tolist())], by_ids[tuple(BATCHES[1].token_ids.tolist())]
    assert np.abs(first - second).max() > 1e-3


def test_only_what_is_checked_is_kept(pair: System) -> None:
    pair.checked = lambda batch: [1] if batch.token_ids[0] < 3 else []
    try:
        pair.bind(BATCHES)
        pair.verify()
        outputs = pair.outputs()
        again = pair.outputs()
    finally:
        pair.checked = lambda batch: range(batch.seqs)
    assert sorted(batch.token_ids.tolist() for batch, _ in outputs) == [[1, 5, 6]] * 2 + [[2, 5, 6]] * 2
    assert {states.shape for _, states in outputs} == {(3, 64)}
    assert again == [], "what was looked at is dropped"
    assert not [file for worker in pair._workers for file in worker.folder.glob("output-*")]
    pair.bind(BATCHES)
    pair.verify()
    whole = next(states for batch, states in pair.outputs() if batch.token_ids[0] == 1)
    part = next(states for batch, states in outputs if batch.token_ids[0] == 1)
    assert np.allclose(whole[4:], part)


def test_what_a_stream_computes_is_kept(pair: System) -> None:
    pair.bind(BATCHES)
    pair.stream([0] * 8, BATCHES)
    found = {tuple(batch.token_ids.tolist()) for batch, _ in pair.outputs()}
    # Distinct ones: a stream that began late is served once more, then perhaps by the other instance.
    assert 1 <= len(found) <= 2
    assert found <= {tuple(batch.token_ids.tolist()) for batch in BATCHES}


def test_trials_are_no_part_of_a_cold_start(model: ModelFiles, tmp_path: Path) -> None:
    file = tmp_path / "processes"
    with system(model, spec("Trying", file=str(file))) as trying:
        assert (trying.open(BATCHES).first_call_s or 9) < 0.5
        assert len(set(file.read_text().split())) == 2, "it begins anew, knowing what it has tried"
        trying.open(BATCHES)
        assert len(file.read_text().split()) == 3


def test_who_tries_at_every_start_is_started_twice(model: ModelFiles, tmp_path: Path) -> None:
    file = tmp_path / "processes"
    with system(model, spec("AlwaysTrying", file=str(file))) as trying:
        assert trying.open(BATCHES).first_call_s is not None
    assert len(set(file.read_text().split())) == 2


@pytest.mark.parametrize(("how", "status"), [("abort", "crashed"), ("spin", "timed_out")])
def test_processor_time_outlives_a_failure(model: ModelFiles, how: str, status: str) -> None:
    """Else what it used would count as used by processes that nobody measures."""
    with system(model, spec("Failing", how=how, after=3, milliseconds=50), call_seconds=1) as failing:
        failing.open()
        failing.bind(BATCHES)
        before = failing.cpu_seconds()
        assert before > 0
        with pytest.raises(WorkerError) as caught:
            failing.burst(calls=8)
        assert caught.value.status == status
        used = failing.cpu_seconds()
        assert used > before
        failing.close()
        assert failing.cpu_seconds() >= used


def test_a_worker_that_never_ends_its_answer_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless:
        def __init__(self, fd: int) -> None:
            self.fd, self.turns = fd, 0

        def fileno(self) -> int:
            return self.fd

        def read(self, do: str) -> bool:
            self.turns += 1
            assert self.turns < 100
            return False

        def check(self, do: str, late: bool, seconds: float) -> None:
            if late:
                raise WorkerError("timed_out", do)

    clock = itertools.count()
    monkeypatch.setattr("encast.bench.worker.time", SimpleNamespace(monotonic=lambda: next(clock)))
    begin, end = os.pipe()
    os.write(end, b"x")
    worker: Any = Endless(begin)
    try:
        with pytest.raises(WorkerError, match="burst"):
            receive([worker], "burst", 5)
    finally:
        os.close(begin)
        os.close(end)
    assert worker.turns > 1


def test_a_divided_batch_is_computed_in_parts(pair: System) -> None:
    pair.bind(BATCHES, split=True)
    pair.verify()
    assert sorted(batch.seqs for batch, _ in pair.outputs()) == [1] * 8
    assert pair.parts[0].token_ids.tolist() == [1, 7, 8, 9]
    pair.bind(BATCHES)


def test_an_open_loop_counts_the_waiting(pair: System) -> None:
    # Six requests at once on two instances of at least a millisecond a call: the last ones wait for the others.
    served = pair.stream([0] * 6, BATCHES)
    assert [due for due, _, _ in served] == [0] * 6
    assert all(ended - begun >= 1_000_000 for _, begun, ended in served)
    assert max(ended for _, _, ended in served) >= 3_000_000
    later = pair.stream([0, 30_000_000], BATCHES)
    assert later[1][0] == 30_000_000
    assert later[1][1] >= 30_000_000


def test_instances_are_where_they_were_put(pair: System) -> None:
    assert pair.foreign_cpus() == set()
    assert (pair.memory()["peak_rss_bytes"] or 0) >= (pair.memory()["pss_bytes"] or 0) > 0
    assert pair.facts() == {"version": "1.0", "milliseconds": 1}


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_portions_are_whole_sequences(count: int) -> None:
    batch = Batch.of([[1], [2, 2], [3], [4, 4, 4], [5]], [[0], [1, 1], [0], [1, 1, 1], [0]])
    parts = portions(batch, count)
    assert [part.seqs for part in parts] in ([5], [2, 3], [2, 1, 2], [1] * 5)
    assert np.concatenate([part.token_ids for part in parts]).tolist() == batch.token_ids.tolist()
    assert all(part.cu_seqlens[0] == 0 and part.cu_seqlens[-1] == part.tokens for part in parts)
    with pytest.raises(InputError, match="5 sequences cannot be divided over 6 instances"):
        portions(batch, 6)


def test_processor_time_is_seen_from_outside() -> None:
    own = [psutil.Process()]
    before = processes.cpu_time(own)
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    after = processes.cpu_time(own)
    assert after.cpu - before.cpu > 0.045e9
    assert processes.runnable_threads(own) >= 1
    assert processes.allowed_cpus(own) == set(ALL)
    assert processes.peak_bytes(own) >= processes.resident_bytes(own) > 0
    assert processes.family(1 << 30) == []


def test_a_batch_survives_its_file(tmp_path: Path) -> None:
    from encast.bench.worker import write_batch
    from encast.bench.worker_process import read_batch

    for batch in (BATCHES[0], Batch.of([[1, 2]], [[0, 1]])):
        read = read_batch(write_batch(batch, tmp_path / "batch.npz"))
        assert read.token_ids.tolist() == batch.token_ids.tolist()
        assert read.cu_seqlens.tolist() == batch.cu_seqlens.tolist()
        assert (read.token_type_ids is None) == (batch.token_type_ids is None)
