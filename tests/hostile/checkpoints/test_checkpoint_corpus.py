"""The fuzzing corpus of the checkpoint readers: every input is accepted as it is, and mutations do no harm."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest

FUZZ = Path(__file__).parents[2] / "fuzz"
CORPUS = sorted((FUZZ / "corpus" / "checkpoint").iterdir())


@pytest.fixture(scope="module")
def target() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_checkpoint", FUZZ / "fuzz_checkpoint.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_corpus_is_accepted(target: ModuleType, path: Path) -> None:
    assert target.run_input(path.read_bytes())


def test_corpus_covers_every_reader(target: ModuleType) -> None:
    assert {path.read_bytes()[0] for path in CORPUS} == set(range(len(target.READERS)))


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_mutations_do_no_harm(target: ModuleType, path: Path) -> None:
    whole = path.read_bytes()
    chooser = random.Random(path.name)
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(chooser.randint(1, 4)):
            data[chooser.randrange(1, len(data))] = chooser.randrange(256)
        target.run_input(bytes(data))
