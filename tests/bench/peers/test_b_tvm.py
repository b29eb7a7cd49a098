"""What TVM's peer says before TVM is asked anything, and how its search ends; the graph: ``test_b_interpret``."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from encast.bench.peers.base import ModelFiles
from encast.bench.peers.tvm import Clock, Tvm, until
from encast.errors import InputError

MODEL = ModelFiles("none", Path("nowhere"), "sha")


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), True, "long"])
def test_the_search_needs_a_bound(seconds: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"tuning_seconds is {seconds!r}; a number of at least 0 is needed"):
        Tvm(MODEL, "f32", 1, tmp_path, tuning_seconds=seconds)


def test_threads_are_not_bound_to_processors_that_were_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr("os.environ", environment)
    Tvm(MODEL, "f32", 3, tmp_path)
    assert (environment["TVM_NUM_THREADS"], environment["TVM_BIND_THREADS"]) == ("3", "0")


def test_a_compiler_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    assert Tvm.missing() == (
        "no C++ compiler (g++, gcc, clang++, clang, c++, cc), with which it links what it makes: install one of them"
    )
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/clang" if name == "clang" else None)
    assert Tvm.missing() is None


class _Kernel:
    """A kernel's strategy as TVM's scheduler sees it; ``turns`` of candidates are all that it has."""

    def __init__(self, turns: int) -> None:
        self.turns, self.told = turns, 0

    def generate_measure_candidates(self) -> list[str] | None:
        self.turns -= 1
        return ["good", "bad"] if self.turns >= 0 else None

    def notify_runner_results(self, candidates: Any, results: Any) -> None:
        self.told += len(results)

    def clone(self) -> _Kernel:
        return _Kernel(self.turns)


def _search(strategies: list[Any], clock: Any) -> None:
    """The order in which MetaSchedule's scheduler goes about: a turn of each, then those that are not closed."""
    closed: set[int] = set()
    order = list(range(len(strategies)))
    while order:
        kernel = order.pop(0)
        assert kernel not in closed, "Check failed: (!task->is_terminated)"
        candidates = strategies[kernel].generate_measure_candidates()
        if candidates is None:
            closed.add(kernel)
        else:
            clock.now += 1
            results = [SimpleNamespace(run_secs=None if one == "bad" else [1.0]) for one in candidates]
            strategies[kernel].notify_runner_results(candidates, results)
        order = order or [one for one in range(len(strategies)) if one not in closed]


@pytest.mark.parametrize(
    ("seconds", "turns", "trials"),
    [
        (0, [9, 9, 9], 6),  # each kernel has one turn
        (4, [9, 9, 9], 8),
        (5, [9, 9, 9], 10),  # in the middle of a round
        (9, [9, 1, 9], 18),  # one has no candidates left, and the others go on
        (9, [9, 0, 9], 18),  # one never had any
        (99, [2, 1, 3], 12),  # all are tried before the end
    ],
)
def test_a_search_ends_in_order(seconds: float, turns: list[int], trials: int, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, utils = ModuleType("search_strategy"), ModuleType("utils")
    strategy.PySearchStrategy = object  # type: ignore[attr-defined]
    utils.derived_object = lambda kind: kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tvm.s_tir.meta_schedule.search_strategy", strategy)
    monkeypatch.setitem(sys.modules, "tvm.ir.utils", utils)
    time = SimpleNamespace(now=0.0)
    monkeypatch.setattr("encast.bench.peers.tvm.time.monotonic", lambda: time.now)
    clock = Clock(end=seconds)
    # TVM clones the one that it is given for each of its kernels.
    kernels = [until(clock, _Kernel(count)).clone() for count in turns]
    _search(kernels, time)
    assert (clock.trials, clock.failed) == (trials, trials // 2)
    assert sum(kernel.inner.told for kernel in kernels) == trials
