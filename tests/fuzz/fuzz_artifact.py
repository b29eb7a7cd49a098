"""Fuzzes the artifact loader: a file of a good artifact is replaced and sealed with right checksums, as somebody
would who knows how, then opened, verified, lowered and read by the plan loader. driver.py says how to run it.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

from driver import Reader, main

from encast import _core, artifact
from encast.lower import Target, lower

__all__ = ["READERS", "corpus"]


def _maker() -> Any:
    """The tests' module that makes small artifacts and seals changed ones."""
    tests = Path(__file__).parents[1]
    sys.path += [str(tests), str(tests / "artifact")]
    return importlib.import_module("made")


_MADE = _maker()
_SCRATCH = tempfile.TemporaryDirectory()
_GOOD: Path = _MADE.write_artifact(Path(_SCRATCH.name) / "good.encast")
_FILES = {path.name: path.read_bytes() for path in _GOOD.iterdir()}
_HEADER = "weights.safetensors header"
_TARGET = Target.here()


def _open(path: Path) -> None:
    opened = artifact.open(path)
    opened.verify()
    _core.Plan(lower(opened.graph, opened.tensors, _TARGET))


def _with(name: str) -> Reader:
    def read(data: bytes) -> None:
        for file, content in _FILES.items():
            (_GOOD / file).write_bytes(content)
        if name in _FILES:
            (_GOOD / name).write_bytes(data)
        if name != "card.json":
            _MADE.refresh(_GOOD, name, data)
        _open(_GOOD)

    return read


READERS: tuple[Reader, ...] = tuple(map(_with, ("graph.json", _HEADER, "card.json", "tokenizer.json")))


def corpus() -> dict[str, bytes]:
    """One good input for every reader."""
    weights = _FILES["weights.safetensors"]
    return {
        "graph": b"\0" + _FILES["graph.json"],
        "header": b"\1" + weights[: 8 + int.from_bytes(weights[:8], "little")],
        "card": b"\2" + _FILES["card.json"],
        "tokenizer": b"\3" + _FILES["tokenizer.json"],
    }


if __name__ == "__main__":
    main(READERS, corpus)
