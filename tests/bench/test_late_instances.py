"""Instances that begin late, on a made-up clock: ``Server`` answers what ``System`` asks, without processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from encast.batch import Batch
from encast.bench import system as module
from encast.bench import worker_process
from encast.bench.peers.base import BackendSpec
from encast.bench.system import System
from encast.bench.worker_process import Server
from encast.launch import Placement

BATCH = Batch.of([[1, 2, 3]])
MS = 1_000_000


class Clock:
    """Moves by what is spent, and a little whenever it is read, so that a moment that is waited for comes."""

    now = 10**12

    def __call__(self) -> int:
        self.now += 1_000
        return self.now


class Peer:
    """Calls take ``call_ms``, and ``wake_ms`` more after a pause of 20 ms, the ``times`` first times, ever longer."""

    tried = False

    def __init__(self, clock: Clock, call_ms: int, wake_ms: int, times: float) -> None:
        self.clock, self.call_ms, self.wake_ms, self.left = clock, call_ms, wake_ms, times
        self.calls: list[tuple[int, int]] = []

    def bind(self, batch: Batch) -> Any:
        return self.call

    def call(self) -> Any:
        begin = self.clock.now
        if self.left and (not self.calls or begin - self.calls[-1][1] > 20 * MS):
            self.left -= 1
            self.clock.now += self.wake_ms * MS
            self.wake_ms *= 10
        self.clock.now += self.call_ms * MS
        self.calls.append((begin, self.clock.now))
        return np.zeros((3, 4), np.float32)


class Instance:
    """Its answers take the time of the clock from the request on, whatever others did since."""

    answered_ns = 0

    def __init__(self, clock: Clock, folder: Path, peer: Any) -> None:
        self.clock, self.folder = clock, folder
        self.server = Server()
        self.server._peer = peer

    def send(self, do: str, **fields: Any) -> None:
        sent = self.clock.now
        self.value = getattr(self.server, do)(**fields)
        self.answered_ns, self.clock.now = self.clock.now, sent

    def cpu_ns(self) -> int:
        return 0

    def check_memory(self) -> None:
        pass

    def limit_growth(self, limited: bool) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made_up = Clock()

    def sleep(seconds: float) -> None:
        made_up.now += round(seconds * 1e9)

    def receive(workers: Sequence[Instance], *_: Any) -> list[Any]:
        made_up.now = max(worker.answered_ns for worker in workers)
        return [worker.value for worker in workers]

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter_ns", made_up)
    monkeypatch.setattr(worker_process, "_clock", made_up)
    monkeypatch.setattr(module, "receive", receive)
    return made_up


def opened(clock: Clock, folder: Path, *peers: Peer) -> System:
    """Bound to a batch."""
    model: Any = None
    places = [Placement((0,), None, 1)] * len(peers)
    system = System(BackendSpec("fake", "nowhere:Nothing", "f32"), model, places, cache=folder)
    for number, peer in enumerate(peers):
        (folder / str(number)).mkdir()
        instance: Any = Instance(clock, folder / str(number), peer)
        system._workers.append(instance)
    system.bind([BATCH])
    return system


def test_the_first_burst_of_long_calls_is_explained(clock: Clock, tmp_path: Path) -> None:
    """Nobody knows beforehand that a call takes longer than the margin: both begin late, and then once more in time."""
    peers = [Peer(clock, call_ms=200, wake_ms=0, times=0) for _ in range(2)]
    system = opened(clock, tmp_path, *peers)
    times = system.burst(calls=1)
    assert [[round(call / MS) for call in own] for own in times] == [[200], [200]]
    assert [usage.explained for usage in system.usages] == [None, pytest.approx(1, abs=0.02)]
    one, other = (peer.calls[-1] for peer in peers)
    assert max(one[0], other[0]) < min(one[1], other[1]), "they compute beside each other"
    system.burst(calls=3)
    assert len(system.usages) == 3, "what is known is enough"


@pytest.mark.parametrize(("times", "explained"), [(0, [1]), (1, [None, 1]), (9, [None, None])])
def test_a_burst_that_begins_late_is_taken_again_once(
    clock: Clock, tmp_path: Path, times: int, explained: list[float | None]
) -> None:
    """And is not judged where that is late as well."""
    slow = Peer(clock, call_ms=1, wake_ms=120, times=times)
    system = opened(clock, tmp_path, Peer(clock, call_ms=1, wake_ms=0, times=0), slow)
    assert [len(own) for own in system.burst(calls=100)] == [100, 100]
    found = [usage.explained for usage in system.usages]
    assert found == [None if one is None else pytest.approx(one, abs=0.02) for one in explained]


@pytest.mark.parametrize(("times", "taken"), [(0, 1), (1, 2)])
def test_a_stream_that_begins_late_is_streamed_again(clock: Clock, tmp_path: Path, times: int, taken: int) -> None:
    """Else requests would have waited for nothing but the instance's wake-up."""
    system = opened(clock, tmp_path, Peer(clock, call_ms=2, wake_ms=120, times=times))
    served = system.stream([0, 10 * MS, 20 * MS], [BATCH])
    assert len(system.usages) == taken
    assert [due for due, _, _ in served] == [0, 10 * MS, 20 * MS]
    assert all(begun - due < 1 * MS for due, begun, _ in served)
