"""``benchmarks/gpu.sh``: to its end at toy size on the CPU, and what it says before it measures."""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-gpu")

from encast.backends.gpu.runnable import GpuRunnable
from encast.batch import Batch

TOY_SHAPES = ("1 x 8", "4 of 1 to 20")
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
    first, second = made.stdout.split("By turns with PyTorch")
    table = [line for line in first.splitlines() if line.startswith("| toy")]
    assert len(table) == 21
    assert not any("WRONG" in line or "no time" in line for line in table)
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())
    rows = found["rows"]
    assert [row["4 of 1 to 20"]["tokens a second"] > 0 for row in rows if row["model"] == "toy"] == [True] * 7
    for shape in TOY_SHAPES:
        assert f"| toy | {shape} | encast f16 |" in second
        assert f"| toy | {shape} | encast f8 |" in second
    assert "Left out: TensorRT: " in second
    assert all(row["right"] and len(row["times"]["encast f8"]) == 7 for row in found["peers"])
    assert {row["model"] for row in rows if row["far"] < 1e-5} == {"toy", "toy modernbert", "toy mpnet"}
    assert rows[0]["texts moved by neighbours"].endswith(" of 13")


def test_what_there_is_no_time_for_is_said(tmp_path: Path) -> None:
    made = run("--dry-run", "--minutes", "0")
    assert made.returncode == 0, made.stderr
    assert made.stdout.count("no time was left") == 22
    assert "Left out: toy, all: no time was left" in made.stdout


def test_a_row_that_fails_says_so_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One in what is compared, one in what is timed: what was found before stays."""
    bench = runpy.run_path(str(SCRIPT.with_suffix(".py")))
    out = tmp_path / "out"
    run_on, written = GpuRunnable.run, []

    def broken(self: GpuRunnable, output: str, batch: Batch, select: Any = None) -> Any:
        written.append(len(json.loads((out / "gpu.json").read_text())["rows"]) if (out / "gpu.json").exists() else 0)
        if self.stored == torch.float16 and batch.tokens == 8 and output == "embedding":
            raise torch.OutOfMemoryError("CUDA out of memory")
        if self.stored == torch.bfloat16:
            raise ValueError("a kernel is broken")
        return run_on(self, output, batch, select)

    monkeypatch.setattr(GpuRunnable, "run", broken)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run", "--out", str(out)])
    monkeypatch.setitem(bench["main"].__globals__, "DRY", dataclasses.replace(bench["DRY"], compared=()))
    assert bench["main"]() == 1
    rows = json.loads((out / "gpu.json").read_text())["rows"]
    full, wrong = "OutOfMemoryError: CUDA out of memory", "ValueError: a kernel is broken"
    assert [row.get("failed", "") for row in rows] == ["", full, full, "", wrong, "", full]
    assert all("far" in row for row in rows if "ValueError" not in row.get("failed", ""))
    assert {*written} == {*range(8)}
    said = capsys.readouterr().out
    first, second = said.split("By turns with PyTorch")
    assert len([line for line in first.splitlines() if line.startswith("| toy |")]) == 7
    assert f"FAILED: toy 1 x 8: {full}" in second
    assert "| toy | 4 of 1 to 20 | encast f16 |" in second
    assert "FAILED: toy bf16 bf16 torch: ValueError: a kernel is broken" in said
    assert [path.name for path in out.iterdir() if path.suffix == ".tmp"] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_nothing_is_begun(tmp_path: Path) -> None:
    made = run("--out", str(tmp_path))
    assert made.returncode == 2
    assert "gpu: " in made.stderr
    assert "Traceback" not in made.stderr
    assert list(tmp_path.iterdir()) == []
