"""What runs on Ray clusters; `make test-ray` runs it, other runs pass over it aloud."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

import encast

sys.path.insert(0, str(Path(__file__).parents[1] / "jobs"))  # job_rows and object_store

HOOKS = Path(__file__).with_name("hooks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "ENCAST_TEST_RAY" not in os.environ:
        for item in items:
            if Path(__file__).parent in item.path.parents and "ray" in item.path.stem:
                item.add_marker(pytest.mark.skip(reason="needs Ray clusters: make test-ray"))


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    made = make_checkpoint(folder / "bert", "bert", "embed", layers=1, pooling=("mean",))
    return encast.compile(made, folder / "bert.encast", dtype="int8")


@pytest.fixture(scope="session", autouse=True)
def _hooks() -> Iterator[None]:
    """Ray's processes, which inherit the environment, load what stands in ``hooks``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HOOKS), prepend=os.pathsep)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        yield
