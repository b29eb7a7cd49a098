"""Fronts' clients and real engine processes: the same bits as offline, and nothing lost when an engine ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
from checkpoints import make_checkpoint
from engine_process import EngineProcess, Listening, listening
from local import artifact, engine

import encast
from encast.batch import Batch
from encast.errors import InputError
from encast.machine import usable_cores
from encast.serve import wire
from encast.serve.control import Drain, Failed
from encast.serve.errors import RefusalError
from encast.serve.models import Timing
from encast.serve.options import ServeOptions
from encast.serve.remote import RemoteEngine, _Pending
from encast.serve.wire import Cancel, Frames, Rows, Submit, frame
from encast.tasks.session import Piece, Run

T = TypeVar("T")
F32 = np.ndarray[Any, np.dtype[np.float32]]
LONGEST = 40
PATIENCE_S = 60.0
"""On a busy machine a new engine comes after more than the 2 s for which runs may wait by default."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def embed(base: Path) -> Path:
    return artifact(base, "embed")


@pytest.fixture(scope="module")
def shared(embed: Path) -> Iterator[tuple[Listening, EngineProcess]]:
    """One engine for the tests that leave it as it was."""
    with listening() as here:
        yield here, here.engine(embed)


def texts(*lengths: int, output: str = "embedding", select: list[int] | None = None, first: int = 6) -> Run:
    ids = [[(7 * at + length + first) % 180 + 6 for at in range(length)] for length in lengths]
    return Run(output, Piece(0, (), Batch.of(ids)), None if select is None else np.array(select, np.int32))


def offline(base: Path, name: str, run: Run) -> F32:
    return engine(base, name).runnable.run(run.output, run.piece.batch, run.select)


async def ask(
    remote: RemoteEngine, run: Run, *, seconds: float = 60.0, before: int = 0, size: int = 100
) -> tuple[F32, Timing]:
    now, timing = time.monotonic(), Timing()
    rows = await remote.run(run, arrived=now, deadline=now + seconds, before=before, size=size, timing=timing)
    return rows, timing


def with_remote(here: Listening, work: Callable[[RemoteEngine], Awaitable[T]]) -> T:
    async def main() -> T:
        remote = RemoteEngine(here.address)
        try:
            return await work(remote)
        finally:
            await remote.close()
            assert remote.unanswered == 0

    return asyncio.run(main())


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.001)


# Sending


def test_small_runs_of_one_turn_leave_in_one_write() -> None:
    writes: list[list[int]] = []

    class Transport:
        def write(self, data: bytes) -> None:
            decode = msgspec.msgpack.Decoder(Submit | Cancel).decode
            writes.append([decode(one).id for one in Frames().feed(data)])

        def writelines(self, parts: list[bytes]) -> None:
            self.write(b"".join(parts))

    async def main() -> None:
        remote = RemoteEngine("nowhere")
        remote._connected(SimpleNamespace(transport=Transport()))  # type: ignore[arg-type]
        runs = [texts(3), texts(4), texts(5)]
        first, second, third = tasks = [asyncio.ensure_future(ask(remote, run)) for run in runs]
        await asyncio.sleep(0)
        second.cancel()  # before it has left: the engine never hears of it
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        large = asyncio.ensure_future(ask(remote, texts(*[LONGEST] * 100)))
        await asyncio.sleep(0)
        assert writes == [[1, 3], [4]]
        first.cancel()
        await asyncio.sleep(0)
        assert writes[2:] == [[1]]
        third.cancel()
        large.cancel()
        await asyncio.gather(*tasks, large, return_exceptions=True)

    asyncio.run(main())


# Answers


@pytest.mark.parametrize(
    ("name", "output", "select"),
    [
        ("embed", "embedding", None),
        ("embed", "last_hidden_state", None),
        ("tag", "logits", None),
        ("fill-mask", "logits", [7, 0, 50, 50, 3]),
    ],
)
def test_bits_are_those_of_the_offline_engine_alone_and_under_load(
    base: Path, name: str, output: str, select: list[int] | None
) -> None:
    source = random.Random(1)
    runs = [
        texts(*source.choices(range(1, LONGEST), k=source.choice([1, 1, 2, 60])), 51 - 12, 12, output=output)
        for _ in range(40)
    ]
    runs = [Run(run.output, run.piece, None if select is None else np.array(select, np.int32)) for run in runs]
    expected = [offline(base, name, run) for run in runs]

    async def work(remote: RemoteEngine) -> None:
        for run, right in zip(runs[:5], expected, strict=False):
            alone, timing = await ask(remote, run)
            assert alone.tobytes() == right.tobytes()
            assert alone.shape == right.shape
            assert timing.batch_tokens > 0
            assert 0 < timing.inference_s < 10
        together = await asyncio.gather(*(ask(remote, run) for run in runs * 3))
        assert [rows.tobytes() for rows, _ in together] == [right.tobytes() for right in expected * 3]

    with listening() as here:
        here.engine(artifact(base, name))
        with_remote(here, work)


def test_token_types_travel(base: Path, shared: tuple[Listening, EngineProcess]) -> None:
    run = texts(9, 5)
    plain = run.piece.batch
    typed = Run("embedding", Piece(0, (), Batch(plain.token_ids, plain.cu_seqlens, np.arange(14, dtype=np.int32) % 2)))
    expected = [offline(base, "embed", one).tobytes() for one in (run, typed)]
    assert expected[0] != expected[1]

    async def work(remote: RemoteEngine) -> None:
        found = await asyncio.gather(*(ask(remote, one) for one in (run, typed, run, typed)))
        assert [rows.tobytes() for rows, _ in found] == expected * 2

    with_remote(shared[0], work)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (texts(3, output="logits"), "no output 'logits'; it has"),
        (texts(49), "at most 48"),
        (Run("embedding", Piece(0, (), Batch.of([[1, 200]]))), r"token_ids\[1\].* is 200; the model takes 0 to 199"),
        (texts(3, select=[0]), "select"),
    ],
)
def test_what_the_model_refuses(shared: tuple[Listening, EngineProcess], run: Run, message: str) -> None:
    async def work(remote: RemoteEngine) -> None:
        beside = [ask(remote, texts(5)) for _ in range(5)]
        with pytest.raises(InputError, match=message):
            await ask(remote, run)
        await asyncio.gather(*beside)

    with_remote(shared[0], work)


# Those who go, and those who wait too long


def test_a_run_that_nobody_waits_for_leaves_the_queue(shared: tuple[Listening, EngineProcess]) -> None:
    here, process = shared
    before = process.stats().cancelled

    async def work(remote: RemoteEngine) -> None:
        large = asyncio.ensure_future(ask(remote, texts(*[LONGEST] * 20_000)))
        await until(lambda: remote.unanswered == 1)
        await ask(remote, texts(3), before=1)  # the large one is there, and does not hold this one up
        assert not large.done()
        large.cancel()
        with pytest.raises(asyncio.CancelledError):
            await large
        assert remote.unanswered == 0

    with_remote(here, work)
    stats = process.stats()
    assert stats.cancelled == before + 1
    assert (stats.queue_rows, stats.queue_tokens) == (0, 0)


def test_the_runs_of_a_front_that_vanishes_leave_the_queue(shared: tuple[Listening, EngineProcess]) -> None:
    here, process = shared
    before = process.stats().cancelled
    with socket.socket(socket.AF_UNIX) as front:
        front.connect("\0" + here.address)
        front.sendall(submit(1, texts(*[LONGEST] * 20_000)))
        front.sendall(submit(2, texts(3), before=1))
        front.recv(1)
    stats = process.stats()
    assert (stats.queue_rows, stats.fronts, stats.cancelled) == (0, 0, before + 1)


def test_a_deadline_ends_a_run_in_the_queue(shared: tuple[Listening, EngineProcess]) -> None:
    here, process = shared
    before = process.stats().expired

    async def work(remote: RemoteEngine) -> None:
        with pytest.raises(RefusalError) as refused:
            await ask(remote, texts(*[LONGEST] * 20_000), seconds=0.05)
        assert refused.value.kind == "expired"
        await ask(remote, texts(3))

    with_remote(here, work)
    assert process.stats().expired == before + 1


def test_a_deadline_holds_although_the_engine_hangs(embed: Path) -> None:
    async def work(remote: RemoteEngine) -> None:
        await ask(remote, texts(3))
        os.kill(process.process.pid, signal.SIGSTOP)
        with pytest.raises(RefusalError) as refused:
            await ask(remote, texts(3), seconds=0.1)
        assert refused.value.kind == "expired"
        with pytest.raises(RefusalError) as refused:
            await ask(remote, texts(3), seconds=0)
        assert refused.value.kind == "expired"
        # What it does not read does not pile up here: new requests are refused at once.
        large = texts(*[LONGEST] * 2_000)
        tasks = [asyncio.ensure_future(ask(remote, large)) for _ in range(100)]
        await until(lambda: any(task.done() for task in tasks))
        refusals = [task.exception() for task in tasks if task.done()]
        assert {error.kind for error in refusals if isinstance(error, RefusalError)} == {"overloaded"}
        assert remote.unanswered < 60  # of 100, each of a third of a megabyte
        for task in tasks:
            task.cancel()
        os.kill(process.process.pid, signal.SIGCONT)
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: not remote._paused)
        await ask(remote, texts(3), before=1)

    with listening() as here:
        process = here.engine(embed)
        with_remote(here, work)


def test_a_run_without_time_closes_no_gate() -> None:
    async def work() -> None:
        remote, pending = RemoteEngine("nobody"), asyncio.get_running_loop().create_future()
        remote._pending[1] = _Pending(bytearray(), 100, pending)
        remote._hear(wire.Failed(1, "overloaded", "longer than the request has", 1.0, 0.5))
        assert not remote.full(100), "others have more time"
        remote._hear(wire.Failed(1, "overloaded", "full", 1.0, 0.5, True))
        assert remote.full(100)

    asyncio.run(work())


def test_a_full_engine_refuses_and_the_front_remembers(embed: Path) -> None:
    async def work(remote: RemoteEngine) -> object:
        large = asyncio.ensure_future(ask(remote, texts(*[LONGEST] * 60_000)))
        await until(lambda: remote.unanswered == 1)
        await ask(remote, texts(3), before=1)
        with pytest.raises(RefusalError) as refused:
            await ask(remote, texts(3), size=1000)
        assert refused.value.kind == "overloaded"
        assert refused.value.retry_after is not None
        assert refused.value.retry_after >= 0.05  # the queue's least; how much more says the speed of this machine
        assert [remote.full(size) for size in (499, 500, 1 << 30)] == [False, True, True]
        with pytest.raises(RefusalError):
            await ask(remote, texts(3), size=400)
        assert [remote.full(size) for size in (199, 200, 1 << 30)] == [False, True, True]
        assert remote.backlog_s > 0
        remote._gate = (time.monotonic() + 60, 100)
        with pytest.raises(RefusalError, match="full"):
            await ask(remote, texts(3), size=100)
        await ask(remote, texts(3), size=100, before=1)  # of an accepted request
        remote._gate = (0.0, 0)
        large.cancel()
        await asyncio.gather(large, return_exceptions=True)
        while True:  # until the batches that ran have ended
            with contextlib.suppress(RefusalError):
                return await ask(remote, texts(3))
            await asyncio.sleep(0.001)

    with listening() as here:
        here.engine(embed, max_wait_s=1e-3)
        with_remote(here, work)


# Engines that end


def test_a_killed_engine_loses_nothing(base: Path, embed: Path) -> None:
    runs = [texts(length, first=length) for length in range(1, LONGEST)]
    expected = [offline(base, "embed", run).tobytes() for run in runs]

    async def work(remote: RemoteEngine) -> None:
        await ask(remote, runs[0])
        os.kill(first.process.pid, signal.SIGSTOP)  # so that all are under way when it ends
        tasks = [asyncio.ensure_future(ask(remote, run)) for run in runs]
        await until(lambda: remote.unanswered == len(runs))
        first.kill()
        await until(lambda: all(pending.sent == 2 for pending in remote._pending.values()))
        await asyncio.to_thread(here.engine, embed, max_wait_s=PATIENCE_S)
        assert [(await task)[0].tobytes() for task in tasks] == expected

    with listening() as here:
        first = here.engine(embed, max_wait_s=PATIENCE_S)
        with_remote(here, work)


def test_a_run_under_which_two_engines_end_has_failed(embed: Path) -> None:
    async def work(remote: RemoteEngine) -> None:
        await ask(remote, texts(3))
        os.kill(first.process.pid, signal.SIGSTOP)
        deadly = asyncio.ensure_future(ask(remote, texts(3)))
        await until(lambda: remote.unanswered == 1)
        first.kill()
        await until(lambda: remote._connection is not None and remote._pending[2].sent == 2)
        # The second engine is that of this socket: it takes the connection and ends.
        here.listener.accept()[0].close()
        with pytest.raises(RefusalError, match="ended twice") as refused:
            await deadly
        assert refused.value.kind == "failed"

    with listening() as here:
        first = here.engine(embed)
        with_remote(here, work)


def test_a_connection_that_breaks_as_it_is_made_is_made_again() -> None:
    async def breaking(here: Listening) -> None:
        """Ends two connections before the client has sent anything."""
        here.listener.setblocking(False)
        ended = 0
        while ended < 2:
            with contextlib.suppress(BlockingIOError):
                here.listener.accept()[0].close()
                ended += 1
            await asyncio.sleep(0)

    async def work(remote: RemoteEngine) -> None:
        ends = asyncio.ensure_future(breaking(here))
        await asyncio.sleep(0)
        with pytest.raises(RefusalError, match="ended twice"):
            await asyncio.wait_for(ask(remote, texts(3)), 10)
        await ends

    with listening() as here:
        with_remote(here, work)


def test_answers_stay_right_while_engines_are_killed_and_replaced(base: Path, embed: Path) -> None:
    runs = [texts(length, length, first=length) for length in range(1, LONGEST)]
    expected = [offline(base, "embed", run).tobytes() for run in runs]
    ended = asyncio.Event()
    answered = 0

    async def client(remote: RemoteEngine, number: int) -> None:
        nonlocal answered
        source = random.Random(number)
        while not ended.is_set():
            index = source.randrange(len(runs))
            rows, _ = await ask(remote, runs[index])  # none was under way in two engines
            assert rows.tobytes() == expected[index]
            answered += 1

    async def work(remote: RemoteEngine) -> None:
        clients = [asyncio.ensure_future(client(remote, number)) for number in range(16)]
        for _ in range(3):
            seen = answered
            # A client that failed says why below.
            await until(lambda: answered > seen + 200 or any(one.done() for one in clients))  # noqa: B023 - awaited here
            here.engines[-1].kill()
            await asyncio.to_thread(here.engine, embed, max_wait_s=PATIENCE_S)
        ended.set()
        await asyncio.gather(*clients)

    with listening() as here:
        here.engine(embed, max_wait_s=PATIENCE_S)
        with_remote(here, work)
    assert answered > 600


def test_an_engine_that_is_drained_as_it_starts_answers_who_waits_for_it(embed: Path) -> None:
    """A reload takes the place of an engine that is just being replaced: fronts wait for it with what they accepted."""
    with listening() as here, socket.socket(socket.AF_UNIX) as front:
        front.connect("\0" + here.address)
        front.settimeout(30)
        front.sendall(submit(5, texts(3)))
        process = EngineProcess(here.listener, embed, ServeOptions(), before=[Drain(30.0)])
        here.engines.append(process)
        (answer,) = Frames().feed(front.recv(1 << 16))
        assert msgspec.msgpack.decode(answer, type=Rows).id == 5
        front.close()
        assert process.wait() == (0, "")


def test_a_set_up_whose_short_group_is_shorter_than_the_canary(embed: Path, tmp_path: Path) -> None:
    """Where the wide instance stops, the canary cannot run on an instance for texts of 8 tokens."""
    if len(usable_cores()) < 2:
        pytest.skip("this process may use one core; the set-up needs two")
    groups = [{"instances": 2, "threads": 1, "longest": 8}, {"instances": 1, "threads": 2, "longest": None}]
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"schema": 1, "chosen": {"groups": groups, "shared_cores": True}}))
    with listening() as here:
        here.engine(embed, config=str(config))


def test_an_engine_ends_when_one_of_its_threads_does() -> None:
    code = (
        "import threading; from encast.serve.engine import end_with_any_thread; end_with_any_thread(); "
        "thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join(); print('goes on')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (70, "")
    assert "ZeroDivisionError" in ended.stderr


def test_a_drained_engine_ends_when_its_fronts_have_gone(embed: Path) -> None:
    async def work(remote: RemoteEngine) -> None:
        await ask(remote, texts(3))
        process.tell(Drain(30.0))
        process.stats()
        await ask(remote, texts(4))  # of requests that the front has accepted
        assert process.process.poll() is None

    with listening() as here:
        process = here.engine(embed)
        with_remote(here, work)
        assert process.wait() == (0, "")


def test_an_engine_ends_with_its_supervisor(embed: Path) -> None:
    with listening() as here:
        process = here.engine(embed)
        process.control.shutdown(socket.SHUT_RDWR)
        assert process.wait()[0] == 0


def test_an_engine_starts_whose_canary_is_larger_than_a_socket_takes(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", "bert", "fill_mask", layers=1, hidden=32, heads=2, vocab=60_000)
    with listening() as here:
        process = here.engine(encast.compile(folder, tmp_path / "m.encast", dtype="f32", task="fill_mask"))
        assert len(process.started.canary) == 4 * 60_000 * 4
        assert process.stats().runs == 0


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    with listening() as here:
        process = EngineProcess(here.listener, tmp_path / "none.encast", ServeOptions())
        here.engines.append(process)
        assert isinstance(process.started, Failed)
        assert "none.encast" in process.started.message
        assert process.wait()[0] == 1


# Fronts that lie


def submit(id: int, run: Run, **changed: Any) -> bytes:
    batch = run.piece.batch
    message = Submit(
        id, run.output, batch.token_ids.data, batch.cu_seqlens.data, None, None, time.monotonic(),
        time.monotonic() + 3600, 0,
    )  # fmt: skip
    return bytes(frame(msgspec.structs.replace(message, **changed)))


# Made when the tests are collected: their deadlines must be far away.
LIES = {
    "a frame of 4 GB": b"\xff\xff\xff\xff",
    "no MessagePack": b"\4\0\0\0\xc1\xc1\xc1\xc1",
    "an answer": bytes(frame(Rows(1, 1, memoryview(b"1234"), 0.0, 0.0, 1, 0.0))),
    "half a number": submit(1, texts(3), token_ids=memoryview(b"12345")),
    "no time": submit(1, texts(3), arrived=float("nan")),
    "no end of time": submit(1, texts(3), deadline=float("inf")),
    "less than nothing before": submit(1, texts(3), before=-1),
    # The first must still be under way when the second comes.
    "one number twice": submit(1, texts(*[LONGEST] * 20_000)) + submit(1, texts(3)),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=list(LIES))
def test_a_front_that_breaks_the_protocol_is_cut_off_and_nobody_else(
    shared: tuple[Listening, EngineProcess], lie: bytes
) -> None:
    here, process = shared

    async def work(remote: RemoteEngine) -> None:
        await ask(remote, texts(3))
        with socket.socket(socket.AF_UNIX) as front:
            front.connect("\0" + here.address)
            front.settimeout(30)
            front.sendall(lie)
            with contextlib.suppress(ConnectionResetError):
                assert front.recv(100) == b""
        await ask(remote, texts(3))

    with_remote(here, work)
    assert process.process.poll() is None


def test_pieces_of_frames_are_put_together(shared: tuple[Listening, EngineProcess]) -> None:
    """And a withdrawal of what was never asked for is nothing."""
    with socket.socket(socket.AF_UNIX) as front:
        front.connect("\0" + shared[0].address)
        for byte in bytes(frame(Cancel(77))) + submit(5, texts(3)):
            front.send(bytes([byte]))
        frames = Frames()
        answers: list[memoryview] = []
        while not answers:
            answers += frames.feed(front.recv(10))
        assert msgspec.msgpack.decode(answers[0], type=Rows).id == 5


def test_a_run_that_is_withdrawn_in_the_same_read_never_starts(shared: tuple[Listening, EngineProcess]) -> None:
    here, process = shared
    before = process.stats()
    with socket.socket(socket.AF_UNIX) as front:
        front.connect("\0" + here.address)
        front.sendall(submit(1, texts(3)) + bytes(frame(Cancel(1))) + submit(1, texts(4)))  # the number is free again
        answer = next(Frames().feed(front.recv(1 << 16)))
        assert msgspec.msgpack.decode(answer, type=Rows).id == 1
    after = process.stats()
    assert (after.runs, after.tokens, after.cancelled) == (before.runs + 1, before.tokens + 4, before.cancelled)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_turned_away(shared: tuple[Listening, EngineProcess]) -> None:
    code = (
        "import os, socket, sys\nos.setuid(65534)\nfront = socket.socket(socket.AF_UNIX)\n"
        "front.connect('\\0' + sys.argv[1])\nprint(front.recv(10))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, shared[0].address], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout == "b''\n"
