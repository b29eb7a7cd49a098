"""A small artifact and rows for jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import make_checkpoint

import encast


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    made = make_checkpoint(folder / "bert", "bert", "embed", layers=1, pooling=("mean",))
    return encast.compile(made, folder / "bert.encast", dtype="f32")
