"""Killed at random moments, a run goes on to the same bits."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="make test-train installs torch and transformers")
pytest.importorskip("transformers", reason="make test-train installs torch and transformers")

from small_rows import classes

# Each precision is named: "auto" of so small a model is f32.
RECIPE = """
stages:
  - fine-tune: {epochs: 2, learning-rate: 3.0e-3, batch-size: 16, evaluations: 2, precision: f32}
  - prune: {name: half, sparsity: 0.5, epochs: 1, batch-size: 16, score: obs, schedule: one-shot, precision: f32,
            distil: {teacher: fine-tune}}
  - prune: {sparsity: 0.7, epochs: 3, learning-rate: 3.0e-3, batch-size: 16, score: snip-momentum, every: 2,
            precision: f32, distil: {teacher: fine-tune, hard: 0.5}}
  - distil: {teacher: fine-tune, epochs: 1, hidden: 0.5, batch-size: 16, layers: 1, precision: bf16}
  - quantise: {sparse: always}
"""
KILLS = 20


def digests(out: Path) -> dict[str, str]:
    """Of all that a run makes, but for times."""
    files = [*out.glob("*/model.safetensors"), *out.glob("*.encast/weights.safetensors")]
    return {str(file.relative_to(out)): hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)}


def test_twenty_kills_change_no_bit(tmp_path: Path, encoder: Path, write_rows: Callable[..., Path]) -> None:
    data = write_rows("data", classes(240, 1), classes(60, 2))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    runs = tmp_path / "runs"
    runs.mkdir()
    script = str(Path(__file__).parent / "kill_run.py")
    command = [sys.executable, script, *map(str, (encoder, data, recipe, runs, KILLS))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("killed after") == KILLS
    expected = digests(runs / "whole")
    assert [name.split("/")[0] for name in expected] == ["1-fine-tune", "2-half", "3-prune", "4-distil", "whole.encast"]
    for out in runs.iterdir():
        assert list(digests(out).values()) == list(expected.values()), done.stdout
        assert not (out / ".work").exists()
