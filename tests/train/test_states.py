"""States on the disk: whole or not there, and what a damaged one costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="make test-train installs torch and transformers")
pytest.importorskip("transformers", reason="make test-train installs torch and transformers")

from full_disk import files_of_at_most

from encast.compress.state import StateFolder
from encast.errors import ResourceError


def saved(folder: Path, *steps: int) -> StateFolder:
    states = StateFolder(folder)
    for step in steps:
        states.save(step, {"x": torch.full((1000,), float(step))}, {"step": step, "history": [{"f1": 0.1}]})
    return states


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    states = saved(tmp_path / "s", 1, 2, 30)
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == [
        f"step-{step:09d}.{suffix}" for step in (2, 30) for suffix in ("json", "safetensors")
    ]
    found = states.load()
    assert found is not None
    assert found.facts == {"step": 30, "history": [{"f1": 0.1}]}
    assert torch.equal(found.tensors["x"], torch.full((1000,), 30.0))


def test_nothing_yet(tmp_path: Path) -> None:
    assert StateFolder(tmp_path / "none").load() is None


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "empty", "other"])
def test_a_damaged_one_costs_a_step_back(
    tmp_path: Path, suffix: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    states = saved(tmp_path, 5, 9)
    file = tmp_path / f"step-000000009.{suffix}"
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        middle = len(content) // 2
        changed = content[:middle] + bytes([content[middle] ^ 0x55]) + content[middle + 1 :]
        other = content.replace(b'"step": 9', b'"step": 8').replace(b"\x10A", b"\x11A")
        file.write_bytes({"cut": content[:middle], "flipped": changed, "empty": b"", "other": other}[damage])
        assert file.read_bytes() != content
    found = states.load()
    assert found is not None
    assert found.facts["step"] == 5
    said = capsys.readouterr().err
    assert ("step 9 is damaged" in said) == ((suffix, damage) != ("json", "gone"))


@dataclass
class Facts:
    step: int = 0
    best: float | None = None


@pytest.mark.parametrize("facts", [{"step": 9}, {"step": 9, "best": "x"}, {"step": 9, "best": 0.5, "stalf": 1}])
def test_facts_of_another_kind_cost_a_step_back(
    tmp_path: Path, facts: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    states = StateFolder(tmp_path)
    states.save(5, {"x": torch.ones(1)}, vars(Facts(5, 1.0)))
    states.save(9, {"x": torch.ones(1)}, facts)
    found = states.load(Facts)
    assert found is not None
    assert found.facts == Facts(5, 1.0)
    assert "step 9 is damaged" in capsys.readouterr().err


def test_all_damaged_says_what_to_do(tmp_path: Path) -> None:
    states = saved(tmp_path, 5, 9)
    for file in tmp_path.glob("*.safetensors"):
        file.write_bytes(b"")
    with pytest.raises(ResourceError, match="remove this folder"):
        states.load()


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    states = saved(tmp_path, 5)
    with files_of_at_most(2000), pytest.raises(ResourceError, match="make room"):
        saved(tmp_path, 9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000005.json", "step-000000005.safetensors"]
    found = states.load()
    assert found is not None
    assert found.facts["step"] == 5
