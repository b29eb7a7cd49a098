"""What TVM's peer says before TVM is asked anything; its graph is tested in ``test_b_interpret``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from encast.bench.peers.base import ModelFiles
from encast.bench.peers.tvm import Tvm
from encast.errors import InputError

MODEL = ModelFiles("none", Path("nowhere"), "sha")


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), True, "long"])
def test_the_search_needs_a_bound(seconds: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"tuning_seconds is {seconds!r}; a number of seconds, at least 0"):
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
