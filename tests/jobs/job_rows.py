"""Rows for jobs: files of every format, some rows bad."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

__all__ = ["answers", "content", "make_rows"]


def text(number: int) -> str:
    return " ".join(chr(ord("a") + (number * step) % 26) for step in (1, 3, 7, 11))


def make_rows(folder: Path, count: int) -> Path:
    """``count`` rows in each of four files: JSONL (every 50th row is bad), CSV, gzipped text and Parquet."""
    inner = folder / "more"
    inner.mkdir(parents=True)
    lines = [json.dumps({"text": 7 if number % 50 == 49 else text(number)}) for number in range(count)]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "b.csv").write_text("id,text\n" + "".join(f'{number},"{text(number)}\n."\n' for number in range(count)))
    (inner / "c.txt.gz").write_bytes(gzip.compress("".join(text(number) + "\n" for number in range(count)).encode()))
    (inner / "_SUCCESS").write_text("")
    table = pyarrow.table({"text": [text(number) for number in range(count)]})
    parquet.write_table(table, inner / "d.parquet", row_group_size=max(1, count // 3))
    return folder


def content(output: Path) -> dict[str, bytes]:
    """Every file that a job wrote, by name, without what it keeps for itself."""
    return {path.name: path.read_bytes() for path in sorted(output.iterdir()) if path.is_file()}


def answers(output: Path, pattern: str = "part-?????.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(output.glob(pattern)) for line in path.read_text().splitlines()]
