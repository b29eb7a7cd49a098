"""Which shard a cluster's replicas are given, and when one is given up: the executor over a Ray that a test plays."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import encast.cluster.executor as executor
from encast.cluster.replica import Said
from encast.data.inputs import InputFile
from encast.errors import ArtifactError, EncastError, ResourceError
from encast.jobs.job import Cut, Job, Shards
from encast.jobs.layout import Done, Written
from encast.jobs.run import Failed
from encast.tasks.table import RunOptions


def shards_of(count: int) -> Shards:
    file = InputFile("a.txt", "/a.txt", "text", 1, 1, 0)
    job = Job("1", "a", "embed", ("text",), RunOptions(), "jsonl", 1, 1, (file,))
    return Shards(job, [Cut(count, "", np.stack([np.arange(count), np.arange(1, count + 1)], 1))])


class RayError(Exception):
    pass


class ActorUnavailableError(RayError):
    pass


class ActorDiedError(RayError):
    pass


class FakeRay:
    """``behave(node, what)`` answers a call, raises, or is ``None`` where the call never ends: ``what`` is "numbers",
    "progress" or the number of a shard."""

    exceptions = SimpleNamespace(
        RayError=RayError, ActorUnavailableError=ActorUnavailableError, ActorDiedError=ActorDiedError
    )
    util = SimpleNamespace(
        scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: node)
    )

    def __init__(self, nodes: list[str], behave: Callable[[str, Any], Any]) -> None:
        self.alive, self.behave = nodes, behave
        self.calls: list[tuple[str, Any]] = []
        self.cpus = 1
        self.gpus = 0
        self.taken: list[dict[str, Any]] = []
        self.told: dict[int, Any] = {}
        self.restarted: list[str] = []
        self.turns = itertools.count()

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"Alive": True, "NodeID": node, "NodeManagerAddress": node, "Resources": resources}
            for resources in [{"CPU": float(self.cpus), **({"GPU": float(self.gpus)} if self.gpus else {})}]
            for node in self.alive
        ]

    def remote(self, *, scheduling_strategy: str, **options: Any) -> Any:
        node = scheduling_strategy
        self.taken.append({name: value for name, value in options.items() if name.startswith(("num_", "max_c"))})

        def call(what: Any) -> object:
            self.calls.append((node, what))
            return len(self.calls)  # true, and another one each time

        def method(what: str | None) -> Any:
            made = SimpleNamespace(remote=(lambda: call(what)) if what else call)
            made.options = lambda concurrency_group: made
            return made

        actor = SimpleNamespace(node=node, numbers=method("numbers"), run=method(None), progress=method("progress"))
        return lambda kind: SimpleNamespace(remote=lambda *made: actor)

    def wait(self, calls: list[int], num_returns: int, timeout: float) -> tuple[list[int], list[int]]:
        """Every member has its turn."""
        ended = [call for call in calls if self._told(call) is not None]
        return ended[next(self.turns) % len(ended) :][:1] if ended else [], []

    def _told(self, call: int) -> Any:
        """Each call ends once."""
        if self.told.get(call) is None:
            try:
                self.told[call] = self.behave(*self.calls[call - 1])
            except RayError as error:
                self.told[call] = error
        return self.told[call]

    def get(self, call: int) -> Any:
        told = self._told(call)
        if isinstance(told, RayError):
            raise told
        return told

    def kill(self, actor: Any, *, no_restart: bool = True) -> None:
        if not no_restart:
            self.restarted.append(actor.node)


Run = Callable[..., list[Done | Failed]]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> Run:
    monkeypatch.setattr(executor, "_ASK_S", 0.0)
    monkeypatch.setattr(executor, "_LOOK_S", 0.0)
    monkeypatch.setattr(executor, "head_answers", lambda ray: True)

    def made(ray: FakeRay, count: int = 20, **options: Any) -> list[Done | Failed]:
        monkeypatch.setattr(executor, "connect", lambda address: ray)
        options = {"instances": ray.cpus, **options}
        maker = executor.RayExecutor("x", Path("f"), Path("a"), [], threads=None, say=said.append, **options)
        return list(maker.run(shards_of(count), range(count), lambda numbers: None))

    return made


def answer(what: Any) -> Any:
    return {} if isinstance(what, str) else Done(what, 1, 0, Written(1, ""))


def numbers_of(outcomes: list[Done | Failed]) -> list[int]:
    return sorted(one.shard for one in outcomes if isinstance(one, Done))


def test_a_node_that_is_dead_before_ray_knows(run: Run) -> None:
    asked = 0

    def behave(node: str, what: Any) -> Any:
        nonlocal asked
        if node == "a" and (what != "numbers" or asked):
            asked += 1
            if asked > 10:
                ray.alive = ["b"]
            raise ActorUnavailableError
        asked += node == "a"
        return answer(what)

    ray = FakeRay(["a", "b"], behave)
    assert numbers_of(run(ray)) == list(range(20))
    # While nobody knows whether it is there, it gets no shard.
    assert ray.calls.count(("a", "numbers")) > 5
    assert len([what for node, what in ray.calls if node == "a" and what != "numbers"]) <= 2


def test_a_shard_that_kills_its_worker_is_tried_on_all_nodes_and_not_for_ever(run: Run) -> None:
    def behave(node: str, what: Any) -> Any:
        if what == 2:
            tries.append(node)
            raise ActorUnavailableError
        return answer(what)

    tries: list[str] = []

    ray = FakeRay(["a", "b"], behave)
    outcomes = run(ray)
    assert numbers_of(outcomes) == [number for number in range(20) if number != 2]
    (failed,) = [one for one in outcomes if isinstance(one, Failed)]
    assert (failed.shard.number, failed.died) == (2, True)
    assert isinstance(failed.error, ResourceError)
    # What waited behind it in the same process was no try; on each node it was tried before it was tried twice.
    assert len(tries) == 4
    assert {*tries[:2]} == {"a", "b"}


def test_an_input_that_nobody_can_read_is_no_node_s_fault(run: Run, said: list[str]) -> None:
    def behave(node: str, what: Any) -> Any:
        return Said("InputError", "cannot be read") if what in range(5, 15) else answer(what)

    outcomes = run(FakeRay(["a", "b", "c"], behave))
    assert numbers_of(outcomes) == [*range(5), *range(15, 20)]
    assert sorted(one.shard.number for one in outcomes if isinstance(one, Failed)) == list(range(5, 15))
    assert said == []


def test_a_node_on_which_all_fails_is_left_out_aloud(run: Run, said: list[str]) -> None:
    def behave(node: str, what: Any) -> Any:
        return Said("ResourceError", "no memory") if node == "b" and what != "numbers" else answer(what)

    ray = FakeRay(["a", "b", "c"], behave)
    assert numbers_of(run(ray, 300)) == list(range(300))
    assert said == [
        "the node b is left out: 3 shards failed there that other nodes have finished, the last with: no memory (on "
        "the node b); see its memory, its disks and Ray's logs"
    ]
    # It is not taken in again, though it is there.
    assert len([what for node, what in ray.calls if node == "b" and what == "numbers"]) == 1


def test_a_node_that_fails_now_and_then_is_kept(run: Run, said: list[str]) -> None:
    def behave(node: str, what: Any) -> Any:
        if node == "b" and what != "numbers" and what % 3 == 0:
            return Said("ResourceError", "no memory")
        return answer(what)

    assert numbers_of(run(FakeRay(["a", "b"], behave), 300)) == list(range(300))
    assert said == []


def test_many_shards_take_no_longer_each(run: Run) -> None:
    def seconds(count: int) -> float:
        begun = time.process_time()
        # All fail once, and half of the nodes can have none of them.
        failed: set[int] = set()

        def behave(node: str, what: Any) -> Any:
            if isinstance(what, int) and node in "ab" and what not in failed:
                return Said("InputError", "once")
            if isinstance(what, int):
                failed.add(what)
            return answer(what)

        assert len(run(FakeRay(["a", "b", "c", "d"], behave), count)) == count
        return time.process_time() - begun

    seconds(100)
    few, many = (median(seconds(count) for _ in range(3)) for count in (1000, 8000))
    assert many < 40 * few  # 8 times the work; 64 times where a list is searched for each


def test_a_replica_that_hangs_is_started_again(run: Run, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_WATCH_S", 0.02)
    monkeypatch.setattr(executor, "_STILL_S", 0.3)
    progress = itertools.count()

    def behave(node: str, what: Any) -> Any:
        if what == "progress":
            return {0: 7} if node == "a" else {19: next(progress)}
        if what == 0 and not hung:
            if not ray.restarted:
                return None
            hung.append(node)
            raise ActorDiedError
        if what == 19 and not hung:
            return None  # slow, and it moves
        return answer(what)

    hung: list[str] = []
    ray = FakeRay(["a", "b"], behave)
    begun = time.monotonic()
    assert numbers_of(run(ray)) == list(range(20))
    assert time.monotonic() - begun > 0.3
    assert ray.restarted == hung == ["a"]
    (line,) = said
    assert "has done nothing for 0 s; it is started again" in line


def test_a_node_that_dies_is_no_try_of_its_shards(run: Run) -> None:
    """More nodes die under one shard than it has tries."""
    deaths = 0

    def behave(node: str, what: Any) -> Any:
        nonlocal deaths
        if what == 0 and deaths < 2 * executor.TRIES:
            deaths += 1
            ray.alive = [f"node {deaths}"]
            raise ActorDiedError
        if node not in ray.alive:
            raise ActorDiedError
        return answer(what)

    ray = FakeRay(["node 0"], behave)
    assert numbers_of(run(ray)) == list(range(20))
    assert deaths == 2 * executor.TRIES


def test_an_error_is_the_user_s_and_names_the_node(run: Run) -> None:
    with pytest.raises(ArtifactError, match=r"it is not there \(on the node a\)"):
        run(FakeRay(["a"], lambda node, what: Said("ArtifactError", "it is not there")))


def test_a_node_on_which_nothing_starts_is_given_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_GIVE_UP_S", 0.2)

    def behave(node: str, what: Any) -> Any:
        raise ActorDiedError("killed")

    with pytest.raises(EncastError, match="no engine can be started on the node a: killed"):
        run(FakeRay(["a"], behave))


def test_one_thread_that_hangs_beside_one_that_computes(
    run: Run, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "_WATCH_S", 0.02)
    monkeypatch.setattr(executor, "_STILL_S", 0.3)
    moving = itertools.count()
    begun = time.monotonic()
    died: set[int] = set()

    def behave(node: str, what: Any) -> Any:
        if what == "progress":
            return {0: 7, 1: next(moving)}
        if what == 0 and not ray.restarted:
            return None
        if what == 1 and not ray.restarted:
            return None if time.monotonic() - begun < 3 else answer(what)
        if what in (0, 1) and what not in died:
            died.add(what)
            raise ActorDiedError
        return answer(what)

    ray = FakeRay(["a"], behave)
    ray.cpus = 2
    assert numbers_of(run(ray)) == list(range(20))
    assert time.monotonic() - begun < 3
    assert ray.restarted == ["a"]


def test_files_that_nobody_counts_are_not_waited_for_without_a_word(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counting(FakeRay):
        def remote(self, **_: Any) -> Any:
            return lambda kind: SimpleNamespace(remote=lambda *made: 1)

        def wait(self, calls: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
            time.sleep(0.01)
            looks = next(self.turns)
            if looks == 20:
                self.alive = []
            return [], calls

        def get(self, call: Any) -> Any:
            raise AssertionError("it would wait for ever")

    monkeypatch.setattr(executor, "connect", lambda address: Counting(["a"], lambda node, what: None))
    monkeypatch.setattr(executor, "head_answers", lambda ray: True)
    monkeypatch.setattr(executor, "_BUSY_S", 0.1)
    monkeypatch.setattr(executor, "_WAIT_S", 0.3)
    maker = executor.RayExecutor("x", Path("f"), Path("a"), ["/a"], threads=None, instances=1, say=said.append)
    file = InputFile("a.txt", "/a.txt", "text", executor.COUNT_HERE_BYTES, 1, 0)
    with pytest.raises(ResourceError, match="the cluster has no node that can run the job"):
        list(maker.find_cuts([file], ["text"], 10))
    assert said
    assert set(said) == {"waiting for the first file to be counted; other jobs may have the cluster's CPUs"}


def test_a_head_that_is_lost_ends_the_job_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_HEAD_S", 0.3)
    monkeypatch.setattr(executor, "_LOOK_S", 0.0)

    class Headless(FakeRay):
        def nodes(self) -> list[dict[str, Any]]:
            assert head_answers(self), "Ray would wait"
            return super().nodes()

        def wait(self, calls: list[int], num_returns: int, timeout: float) -> tuple[list[int], list[int]]:
            time.sleep(0.01)
            return super().wait(calls, num_returns, timeout)

    def head_answers(ray: Any) -> bool:
        return not any(what == 7 for _, what in ray.calls)

    ray = Headless(["a"], lambda node, what: None if what == 9 else answer(what))
    monkeypatch.setattr(executor, "head_answers", head_answers)
    monkeypatch.setattr(executor, "connect", lambda address: ray)
    maker = executor.RayExecutor("x", Path("f"), Path("a"), [], threads=None, instances=1, say=lambda what: None)
    with pytest.raises(ResourceError, match="the head of the Ray cluster has not answered"):
        list(maker.run(shards_of(20), range(20), lambda numbers: None))
    left = threading.Event()
    ray.shutdown = left.wait  # type: ignore[attr-defined]
    monkeypatch.setattr(executor, "_LEAVE_S", 0.1)
    maker.__exit__(None, None, None)
    left.set()


def test_what_failed_on_a_node_that_is_left_out_was_no_try(run: Run, said: list[str]) -> None:
    tries: list[str] = []

    def behave(node: str, what: Any) -> Any:
        if what == 0:
            tries.append(node)
        bad = what == 0 or (node == "b" and what != "numbers")
        return Said("InputError", "cannot be read") if bad else answer(what)

    outcomes = run(FakeRay(["b", "a", "c"], behave), 60)
    assert numbers_of(outcomes) == list(range(1, 60))
    assert len(said) == 1
    assert tries[0] == "b"
    assert len(tries) == 1 + executor.TRIES


def test_a_replica_takes_a_card_and_its_share_of_the_cpus(run: Run) -> None:
    ray = FakeRay(["a", "b"], lambda node, what: answer(what))
    ray.cpus, ray.gpus = 9, 4
    assert numbers_of(run(ray, device="cuda", instances=2)) == list(range(20))
    assert ray.taken == [{"num_cpus": 2, "num_gpus": 1, "max_concurrency": 2}] * 8


def test_a_card_that_is_lost_does_not_end_the_job_of_the_others(run: Run, said: list[str]) -> None:
    """Its process ends, and the one that Ray starts then finds no card."""
    ended = False

    def behave(node: str, what: Any) -> Any:
        nonlocal ended
        if node == "b" and what != "numbers":
            ended = True
            raise ActorUnavailableError
        return Said("ResourceError", "PyTorch finds no CUDA card") if node == "b" and ended else answer(what)

    ray = FakeRay(["a", "b"], behave)
    ray.gpus = 1
    assert numbers_of(run(ray, device="cuda", instances=2)) == list(range(20))
    assert said == ["the node b is left out: PyTorch finds no CUDA card (on the node b)"]


def test_a_cluster_without_cards_is_said_at_once(run: Run) -> None:
    ray = FakeRay(["a", "b"], lambda node, what: answer(what))
    ray.cpus = 4
    with pytest.raises(ResourceError, match="no node of the Ray cluster has GPUs: it has 2 nodes with 8 CPUs"):
        run(ray, device="cuda", instances=2)
    assert ray.taken == []


def test_without_a_device_no_card_is_taken(run: Run) -> None:
    ray = FakeRay(["a"], lambda node, what: answer(what))
    ray.gpus = 4
    run(ray)
    assert ray.taken == [{"num_cpus": 1, "max_concurrency": 1}]
