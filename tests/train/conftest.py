"""Small models and data sets that can be learned in seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of two layers without a head."""
    return make_checkpoint(
        tmp_path_factory.mktemp("encoder") / "bert", "bert", "features", layers=2, hidden=32, heads=2
    )


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Writes the rows of a folder's train.jsonl and dev.jsonl."""

    def write(name: str, train: list[dict[str, Any]], dev: list[dict[str, Any]]) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for split, rows in (("train", train), ("dev", dev)):
            (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
        return folder

    return write
