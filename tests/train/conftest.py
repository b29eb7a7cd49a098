"""Small models and data sets that can be learned in seconds."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="make test-train installs torch and transformers")
pytest.importorskip("transformers", reason="make test-train installs torch and transformers")

from checkpoints import make_checkpoint

WORDS = ["the", "of", "and", "to", "in", "is", "was", "for", "on", "that", "with", "as", "it", "by", "he", "at", "from"]


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of two layers without a head."""
    return make_checkpoint(
        tmp_path_factory.mktemp("encoder") / "bert", "bert", "features", layers=2, hidden=32, heads=2
    )


def sentences(count: int, seed: int, least: int = 3, most: int = 10) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(least, most))) for _ in range(count)]


def classes(count: int, seed: int) -> list[dict[str, Any]]:
    """The first word decides."""
    return [{"text": text, "label": _class(text)} for text in sentences(count, seed)]


def _class(text: str) -> str:
    return "early" if WORDS.index(text.split()[0]) < 8 else "late"


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
