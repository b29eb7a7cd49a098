"""What an engine keeps in memory: weights shared between processes, an arena that does not grow with the batch."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from compiled import minilm_folder, open_cpu, same_bits

import encast
from encast import artifact
from encast.backends.cpu import CpuRunnable
from encast.batch import Batch
from encast.errors import ArtifactError, InputError, ResourceError

WAITING = """
import sys
from encast import artifact
from encast.backends.cpu import CpuRunnable

cpu = CpuRunnable(artifact.open(sys.argv[1]), threads=1)
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encast.compile(minilm_folder(), tmp_path_factory.mktemp("minilm") / "m.encast", dtype="int8")


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The process id of another process that has the artifact open."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process.pid
    finally:
        process.communicate("")


def _weights_pss(pid: int) -> int:
    """Proportional set size of the mapping of weights.safetensors, in kB."""
    total, mine = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            mine = line.endswith("/weights.safetensors")
        elif mine and line.startswith("Pss:"):
            total += int(line.split()[1])
    return total


def test_processes_share_the_weights(minilm: Path) -> None:
    with _opened(minilm) as first:
        alone = _weights_pss(first)
        assert alone * 1024 > 0.9 * (minilm / "weights.safetensors").stat().st_size
        with _opened(minilm) as second:
            assert abs(_weights_pss(first) / alone - 0.5) < 0.05
            assert abs(_weights_pss(second) / alone - 0.5) < 0.05


def test_instances_share_the_weights(minilm: Path) -> None:
    opened = artifact.open(minilm)
    cpu = CpuRunnable(opened, threads=1, instances=4)
    mappings = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(opened.weights_path) in line]
    assert len(mappings) == 1
    cpu.close()
    del cpu
    gc.collect()
    assert str(opened.weights_path) not in Path("/proc/self/maps").read_text()


def test_a_copy_of_the_weights_gives_the_same_answers(minilm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, batch = artifact.open(minilm), Batch.of([[101, 2023, 2003, 102]])
    mapped = CpuRunnable(opened, threads=1)
    wanted = mapped.run("embedding", batch)
    mapped.close()
    del mapped
    gc.collect()
    monkeypatch.setenv("ENCAST_COPY_WEIGHTS", "1")
    copied = CpuRunnable(opened, threads=1)
    assert str(opened.weights_path) not in Path("/proc/self/maps").read_text()
    assert same_bits(copied.run("embedding", batch), wanted)


def _resident_kb() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])


def test_memory_does_not_grow_with_the_batch(minilm: Path) -> None:
    cpu = CpuRunnable(artifact.open(minilm), threads=2)

    def batch(seqs: int) -> Batch:
        return Batch(np.full(seqs * 128, 2000, np.int32), np.arange(0, seqs * 128 + 1, 128, dtype=np.int32))

    small, large = batch(16), batch(160)
    cpu.run("embedding", small)
    before = _resident_kb()
    cpu.run("embedding", large)
    assert _resident_kb() - before < 1024


def test_callers_of_one_engine_get_their_own_answers(tmp_path_factory: pytest.TempPathFactory) -> None:
    cpu = open_cpu("bert-embed", "int8", tmp_path_factory, threads=1, instances=2)
    rng = np.random.default_rng(0)
    batches = [Batch.of([rng.integers(0, 200, size).tolist()]) for size in (1, 5, 17, 30, 44, 48)]
    wanted = [cpu.run("embedding", batch) for batch in batches]
    wrong: list[int] = []

    def call(index: int) -> None:
        answers = [cpu.run("embedding", batches[index]) for _ in range(30)]
        wrong.extend(index for answer in answers if not same_bits(answer, wanted[index]))

    callers = [threading.Thread(target=call, args=(index,)) for index in range(len(batches))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_a_closed_backend_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    cpu = open_cpu("bert-embed", "f32", tmp_path_factory, threads=1, instances=2)
    cpu.close()
    cpu.close()
    for _ in range(3):
        with pytest.raises(ResourceError, match="closed"):
            cpu.run("embedding", Batch.of([[1, 2]]))


def test_a_forked_child_is_told_to_load_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    cpu = open_cpu("bert-embed", "f32", tmp_path_factory, threads=2)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            cpu.run("embedding", Batch.of([[1, 2]]))
            message = "an answer"
        except ResourceError as error:
            message = str(error)
        del cpu
        os.write(writer, message.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        assert "load the artifact in the child" in answer.read()
    assert os.waitpid(child, 0)[1] == 0
    cpu.run("embedding", Batch.of([[1, 2]]))


@contextmanager
def _busy(cpu: CpuRunnable, batch: Batch) -> Iterator[threading.Thread]:
    """A thread that runs the batch again and again."""
    stop = threading.Event()
    started = threading.Event()

    def work() -> None:
        while not stop.is_set():
            started.set()
            cpu.run("embedding", batch)

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    try:
        yield thread
    finally:
        stop.set()
        thread.join()


def test_a_forked_child_may_close_what_its_parent_uses(tmp_path_factory: pytest.TempPathFactory) -> None:
    cpu = open_cpu("bert-embed", "f32", tmp_path_factory, threads=2)
    with _busy(cpu, Batch.of([[1] * 40] * 500)):
        for _ in range(5):
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                cpu.close()
                del cpu
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    cpu.run("embedding", Batch.of([[1, 2]]))


INTERRUPTED = """
import signal, sys
from encast import artifact
from encast.backends.cpu import CpuRunnable
from encast.batch import Batch

cpu = CpuRunnable(artifact.open(sys.argv[1]), threads=1, instances=2)
batch = Batch.of([[1, 2, 3]])
wanted = cpu.run("embedding", batch).tobytes()
heard = 0
signal.signal(signal.SIGALRM, signal.default_int_handler)
while heard < 300:
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005 + heard % 7 * 0.0001)
        while True:
            cpu.run("embedding", batch)
    except KeyboardInterrupt:
        heard += 1
signal.signal(signal.SIGALRM, signal.SIG_DFL)
signal.alarm(20)
assert cpu.run("embedding", batch).tobytes() == wanted
cpu.close()
"""


def test_interrupted_calls_lose_no_instance(minilm: Path) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, str(minilm)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_call_that_waits_for_an_instance_can_be_interrupted(minilm: Path) -> None:
    cpu = CpuRunnable(artifact.open(minilm), threads=1)
    short = Batch.of([[1, 2, 3]])
    long = Batch(np.full(65536, 2000, np.int32), np.arange(0, 65537, 128, dtype=np.int32))
    other = threading.Thread(target=cpu.run, args=("embedding", long))

    def wait() -> None:
        other.start()
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        while other.is_alive():
            cpu.run("embedding", short)

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            wait()
        assert other.is_alive()
    finally:
        signal.signal(signal.SIGALRM, before)
        other.join()


def test_closing_waits_for_running_calls(tmp_path_factory: pytest.TempPathFactory) -> None:
    cpu = open_cpu("bert-embed", "f32", tmp_path_factory, threads=1, instances=2)
    batch = Batch.of([[1] * 40] * 200)
    wanted = cpu.run("embedding", batch)
    turned_away: list[bool] = []

    def work() -> None:
        try:
            while True:
                assert same_bits(cpu.run("embedding", batch), wanted)
        except ResourceError as error:
            turned_away.append("closed" in str(error))

    callers = [threading.Thread(target=work) for _ in range(4)]
    for caller in callers:
        caller.start()
    cpu.close()
    for caller in callers:
        caller.join()
    assert turned_away == [True] * 4


@pytest.mark.parametrize("options", [{"threads": 0}, {"instances": 0}, {"threads": -1}])
def test_impossible_options(options: dict[str, int], tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(InputError, match="at least 1"):
        open_cpu("bert-embed", "f32", tmp_path_factory, **options)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    path = encast.compile(minilm_folder(), tmp_path / "m.encast", dtype="int8")
    weights = path / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 16
    weights.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"checksum of tensor .* compile the artifact again"):
        CpuRunnable(artifact.open(path), threads=2)


def test_selected_rows_may_come_in_any_order(tmp_path_factory: pytest.TempPathFactory) -> None:
    cpu = open_cpu("bert-fill_mask", "f32", tmp_path_factory, threads=1)
    batch = Batch.of([[1, 2, 3], [4, 5, 6, 7]])
    rising = cpu.run("logits", batch, np.array([0, 2, 5], np.int32))
    mixed = cpu.run("logits", batch, np.array([5, 0, 5, 2], np.int32))
    assert same_bits(mixed, rising[[2, 0, 2, 1]])
