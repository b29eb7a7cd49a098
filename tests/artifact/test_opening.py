"""Opening verifies checksums beside other work; nothing of it outlives a failed call."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from cases import open_case
from made import refresh

import encast
from encast import artifact
from encast.backends.cpu import CpuRunnable, Opening
from encast.errors import ArtifactError, InputError


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("artifacts") / "m.encast"
    return encast.compile(open_case("bert-embed", tmp_path_factory).folder, out)


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "m.encast"))


def test_a_tokenizer_that_cannot_be_read_ends_what_was_begun(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refresh(copy, "tokenizer.json", json.dumps({"model": "none"}).encode())
    ended: list[int] = []
    leave = Opening.__exit__

    def left(self: Opening, *error: object) -> None:
        leave(self, *error)
        ended.append(threads())

    monkeypatch.setattr(Opening, "__exit__", left)
    before = threads()
    with pytest.raises(ArtifactError, match="tokenizer"):
        encast.load(copy)
    assert ended == [before]


def test_damage_is_found_before_a_step_is_bound(copy: Path) -> None:
    opened = artifact.open(copy)
    data = bytearray(opened.weights_path.read_bytes())
    data[-1] ^= 1
    opened.weights_path.write_bytes(data)
    before = threads()
    with pytest.raises(ArtifactError, match="checksum of tensor"):
        CpuRunnable(artifact.open(copy))
    assert threads() == before


def test_options_are_refused_before_weights_are_touched(copy: Path) -> None:
    opened = artifact.open(copy)
    opened.weights_path.unlink()
    with pytest.raises(InputError, match="threads=0"):
        CpuRunnable(opened, threads=0)


def test_a_child_of_fork_drops_what_its_parent_began(copy: Path) -> None:
    opening = Opening(artifact.open(copy))
    assert mapped(copy)
    child = os.fork()
    if child == 0:
        del opening  # its threads are the parent's
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    with opening:
        pass
    del opening
    assert not mapped(copy)


def test_an_opening_serves_the_runnable(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    opened, batch = artifact.open(copy), open_case("bert-embed", tmp_path_factory).batch
    with Opening(opened) as opening:
        one, other = CpuRunnable(opened, opening=opening), CpuRunnable(opened)
    assert one.run("embedding", batch).tobytes() == other.run("embedding", batch).tobytes()
