"""Which shard a cluster's replicas are given, and when one is given up: the executor over a Ray that a test plays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import encast.cluster.executor as executor
from encast.cluster.replica import Said
from encast.data.inputs import InputFile
from encast.data.rows import Span
from encast.errors import ArtifactError, EncastError
from encast.jobs.folder import Done
from encast.jobs.job import Shard
from encast.jobs.run import Failed

FILE = InputFile("a.txt", "/a.txt", "text", 1, 1)
SHARDS = [Shard(number, FILE, Span(number, number + 1, 1)) for number in range(20)]


class RayError(Exception):
    pass


class ActorUnavailableError(RayError):
    pass


class ActorDiedError(RayError):
    pass


class FakeRay:
    """``behave(node, what)`` answers a call, or raises: ``what`` is "numbers" or the number of a shard."""

    exceptions = SimpleNamespace(
        RayError=RayError, ActorUnavailableError=ActorUnavailableError, ActorDiedError=ActorDiedError
    )
    util = SimpleNamespace(
        scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: node)
    )

    def __init__(self, nodes: list[str], behave: Callable[[str, Any], Any]) -> None:
        self.alive, self.behave = nodes, behave
        self.calls: list[tuple[str, Any]] = []

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"Alive": True, "NodeID": node, "NodeManagerAddress": node, "Resources": {"CPU": 1.0}}
            for node in self.alive
        ]

    def remote(self, *, scheduling_strategy: str, **_: Any) -> Any:
        def call(what: Any) -> object:
            self.calls.append((scheduling_strategy, what))
            return len(self.calls)  # true, and another one each time

        actor = SimpleNamespace(
            numbers=SimpleNamespace(remote=lambda: call("numbers")), run=SimpleNamespace(remote=call)
        )
        return lambda kind: SimpleNamespace(remote=lambda *made: actor)

    def wait(self, calls: list[int], num_returns: int, timeout: float) -> tuple[list[int], list[int]]:
        return [min(calls)], []

    def get(self, call: int) -> Any:
        return self.behave(*self.calls[call - 1])

    def kill(self, actor: Any) -> None:
        pass


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeRay], list[Done | Failed]]:
    monkeypatch.setattr(executor, "_ASK_S", 0.0)
    monkeypatch.setattr(executor, "_LOOK_S", 0.0)

    def made(ray: FakeRay) -> list[Done | Failed]:
        monkeypatch.setattr(executor, "connect", lambda address: ray)
        maker = executor.RayExecutor("x", Path("f"), Path("a"), threads=None, instances=1, say=said.append)
        return list(maker.run(SHARDS, lambda numbers: None))

    said: list[str] = []
    return made


def answer(what: Any) -> Any:
    return {} if what == "numbers" else Done(what, 1, 0, 1)


def numbers_of(outcomes: list[Done | Failed]) -> list[int]:
    return sorted(one.shard for one in outcomes if isinstance(one, Done))


def test_a_node_that_is_dead_before_ray_knows(run: Callable[[FakeRay], list[Done | Failed]]) -> None:
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


def test_a_shard_that_kills_its_worker_is_tried_on_all_nodes_and_not_for_ever(
    run: Callable[[FakeRay], list[Done | Failed]],
) -> None:
    def behave(node: str, what: Any) -> Any:
        if what == 2:
            raise ActorUnavailableError
        return answer(what)

    ray = FakeRay(["a", "b"], behave)
    outcomes = run(ray)
    assert numbers_of(outcomes) == [number for number in range(20) if number != 2]
    (failed,) = [one for one in outcomes if isinstance(one, Failed)]
    assert failed.shard is SHARDS[2]
    tried = [node for node, what in ray.calls if what == 2]
    assert len(tried) >= executor.TRIES
    assert set(tried) == {"a", "b"}


def test_a_node_that_dies_is_no_try_of_its_shards(run: Callable[[FakeRay], list[Done | Failed]]) -> None:
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


def test_an_error_is_the_user_s_and_names_the_node(run: Callable[[FakeRay], list[Done | Failed]]) -> None:
    with pytest.raises(ArtifactError, match=r"it is not there \(on the node a\)"):
        run(FakeRay(["a"], lambda node, what: Said("ArtifactError", "it is not there")))


def test_a_node_on_which_nothing_starts_is_given_up(
    run: Callable[[FakeRay], list[Done | Failed]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "_GIVE_UP_S", 0.2)

    def behave(node: str, what: Any) -> Any:
        raise ActorDiedError("killed")

    with pytest.raises(EncastError, match="no engine can be started on the node a: killed"):
        run(FakeRay(["a"], behave))
