"""The variables of an instance: threads for libraries, and the allocator to preload."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from encast.errors import InputError, ResourceError
from encast.launch import ALLOCATORS, Placement, environment
from encast.launch.environment import _library

PAIR = Placement((0, 1), 0, 2)


@pytest.fixture(autouse=True)
def _look_anew() -> Iterator[None]:
    _library.cache_clear()
    yield
    _library.cache_clear()


def a_library() -> Path:
    """Some shared library that this process has loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split()[-1] for line in lines if "/libm.so" in line or "/libm-" in line}
    if not paths:
        pytest.skip("no shared library to stand in for an allocator")
    return Path(paths.pop())


def test_threads_of_openmp() -> None:
    variables = environment(PAIR)
    assert variables["OMP_NUM_THREADS"] == "2"
    assert variables["KMP_BLOCKTIME"] == "1"
    # They would bind the main thread, and with it every pool that it starts.
    assert not {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"} & set(variables)
    assert environment(PAIR, openmp=False) == {}


def test_threads_of_encast_when_they_share_cores() -> None:
    """It would run one a core."""
    assert environment(Placement((0, 1, 4, 5), 0, 4, smt=True), openmp=False) == {"ENCAST_THREADS": "4"}


def test_instances_that_share_cpus_are_bound_to_none_of_them() -> None:
    """Intel's OpenMP would bind its threads to the first, encast run as many as the whole quota pays for."""
    shared = Placement((0, 1, 2, 3), 0, 1, bound=False)
    variables = environment(shared, environ={})
    assert variables == {"ENCAST_THREADS": "1", "OMP_NUM_THREADS": "1", "KMP_BLOCKTIME": "1"}
    assert environment(shared, openmp=False, environ={"ENCAST_THREADS": "2"}) == {}


def test_an_unknown_allocator() -> None:
    with pytest.raises(InputError, match="the allocator is 'malloc2'; system, tcmalloc and jemalloc are known"):
        environment(PAIR, allocator="malloc2")


@pytest.mark.parametrize("name", ALLOCATORS)
def test_an_absent_allocator_says_what_to_install(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By its name the package has the function, not the module.
    monkeypatch.setattr(sys.modules["encast.launch.environment"], "_library_folders", lambda _: [tmp_path])
    with pytest.raises(ResourceError) as caught:
        environment(PAIR, allocator=name)
    assert f"{name} is not installed: there is no {ALLOCATORS[name].libraries[0]}" in str(caught.value)
    assert "apt install lib" in str(caught.value)
    assert "LD_LIBRARY_PATH" in str(caught.value)


def test_an_allocator_is_preloaded_before_what_was(tmp_path: Path) -> None:
    library = tmp_path / "libjemalloc.so.2"
    shutil.copy(a_library(), library)
    variables = environment(
        PAIR, allocator="jemalloc", environ={"LD_LIBRARY_PATH": str(tmp_path), "LD_PRELOAD": "libz.so.1"}
    )
    assert variables["LD_PRELOAD"] == f"{library}:libz.so.1"
    code = "from encast.machine import read_machine; print(read_machine().allocator)"
    alone = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run([sys.executable, "-c", code], env=alone, capture_output=True, text=True, check=True)
    assert done.stdout == "jemalloc\n"


def test_a_library_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    """The linker would say so and go on without it."""
    (tmp_path / "libjemalloc.so.2").write_bytes(b"no library")
    with pytest.raises(ResourceError, match=r"libjemalloc\.so\.2 cannot be preloaded: .*; install it anew"):
        environment(PAIR, allocator="jemalloc", environ={"LD_LIBRARY_PATH": str(tmp_path)})
