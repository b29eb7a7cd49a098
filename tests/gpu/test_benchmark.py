"""``benchmarks/gpu.sh``: to its end at toy size on the CPU, and what it says before it measures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-gpu")

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.sh"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "ENCAST_THREADS": "1"},
    )


def test_a_dry_run_goes_to_its_end(tmp_path: Path) -> None:
    made = run("--dry-run", "--out", str(tmp_path / "out"))
    assert made.returncode == 0, made.stderr
    table = [line for line in made.stdout.splitlines() if line.startswith("| toy |")]
    assert len(table) == 6
    assert not any("WRONG" in line or "no time" in line for line in table)
    rows = json.loads((tmp_path / "out" / "gpu.json").read_text())["rows"]
    assert all(row["4 of 1 to 20"]["tokens a second"] > 0 for row in rows)
    assert rows[0]["far"] < 1e-5


def test_what_there_is_no_time_for_is_said(tmp_path: Path) -> None:
    made = run("--dry-run", "--minutes", "0")
    assert made.returncode == 0, made.stderr
    assert made.stdout.count("no time was left") == 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_nothing_is_begun(tmp_path: Path) -> None:
    made = run("--out", str(tmp_path))
    assert made.returncode == 2
    assert "gpu: " in made.stderr
    assert "Traceback" not in made.stderr
    assert list(tmp_path.iterdir()) == []
