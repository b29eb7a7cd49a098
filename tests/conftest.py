"""Makes the helpers beside this file (``checkpoints``, ``cases``, ``bounds``) importable by every test below it."""

import fcntl
import json
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from runtime_how import How

# The suites multiply thousands of tiny matrices, on which NumPy's BLAS threads only wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell's job in the background ignores an interrupt, and so would the commands that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test depends on how fast the machine is.
settings.register_profile("encast", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("encast")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For pytest-xdist: a file's tests share a process, and so its fixtures; serial tests come last, in one process."""
    items.sort(key=lambda item: item.get_closest_marker("serial") is not None)
    for item in items:
        group = "serial" if item.get_closest_marker("serial") else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Under pytest-xdist a serial test has the machine for itself; the others share it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    # The base folder of a worker lies in that of the run.
    folder = item.config._tmp_path_factory.getbasetemp().parent  # type: ignore[attr-defined]
    with open(folder / "serial.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if item.get_closest_marker("serial") else fcntl.LOCK_SH)
        return (yield)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> How:
    """Says what those of ``fake_runtime`` do, which take the place of ONNX Runtime and TensorFlow."""
    told = tmp_path_factory.mktemp("told")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent / "fake_runtime"), str(told)]))
    monkeypatch.setattr("encast.verify.original.find_spec", lambda name: name)
    monkeypatch.setattr("encast.errors.find_spec", lambda name: name)

    def how(**options: Any) -> None:
        (told / "fake_how.json").write_text(json.dumps(options))

    how()
    return how
