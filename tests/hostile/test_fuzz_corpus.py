"""The fuzzing corpora: every input is accepted as it is, and mutations do no harm to the Python targets."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

from encast import _core

FUZZ = Path(__file__).parents[1] / "fuzz"
CORPUS = [path for name in ("artifact", "checkpoint") for path in sorted((FUZZ / "corpus" / name).iterdir())]


def _target(path: Path) -> ModuleType:
    if str(FUZZ) not in sys.path:
        sys.path.append(str(FUZZ))
    return importlib.import_module(f"fuzz_{path.parent.name}")


def _accepts(path: Path, data: bytes) -> bool:
    return bool(importlib.import_module("driver").run_input(_target(path).READERS, data))


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_corpus_is_accepted(path: Path) -> None:
    _target(path)
    assert _accepts(path, path.read_bytes())


def test_files_of_the_input_before_are_gone() -> None:
    path = next(path for path in CORPUS if path.name == "gluon")
    whole = path.read_bytes()
    _target(path)
    assert _accepts(path, whole)
    assert not _accepts(path, whole[: whole.index(b"\0")])


def test_plans_are_accepted() -> None:
    plans = [path.read_text() for path in sorted((FUZZ / "corpus" / "plan").iterdir())]
    assert {line for plan in plans for line in plan.splitlines() if line.startswith("stage ")} == {
        "stage rows",
        "stage sequences",
        "stage heads",
    }
    for plan in plans:
        _core.Plan(plan)


@pytest.mark.parametrize("name", ["artifact", "checkpoint"])
def test_corpus_covers_every_reader(name: str) -> None:
    files = [path for path in CORPUS if path.parent.name == name]
    assert {path.read_bytes()[0] for path in files} == set(range(len(_target(files[0]).READERS)))


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_mutations_do_no_harm(path: Path) -> None:
    _target(path)
    whole = path.read_bytes()
    chooser = random.Random(path.name)
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(chooser.randint(1, 4)):
            data[chooser.randrange(1, len(data))] = chooser.randrange(256)
        _accepts(path, bytes(data))
