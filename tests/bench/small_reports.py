"""A small experiment's rows, and the report of a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from synthetic_rows import Experiment

from encast.bench.report.build import Options, build_document
from encast.bench.report.load import load
from encast.pages.document import Document, Table

__all__ = ["FEW", "Rows", "cell", "document", "few", "tables"]

FEW = ("encast-int8", "openvino-int8", "pytorch-f32")
Rows = list[dict[str, Any]]


def document(folder: Path, **options: Any) -> Document:
    return build_document(load([folder]), Options(**options))


def few(seed: int = 0, **options: Any) -> Rows:
    """A small experiment with every kind of plot that two points can have."""
    made = Experiment("few", seed, backends=FEW, **options)
    rows = [row for length in (16, 32, 64) for row in made.point("latency", {"length": length, "batch": 1}, noisy=0)]
    for instances in (1, 2):
        rows += made.point("instance_scaling", {"length": 16, "instances": instances, "threads": 1}, noisy=0)
    return rows


def tables(made: Document) -> Iterator[Table]:
    return (block for section in made.sections for block in section.blocks if isinstance(block, Table))


def cell(made: Document, caption: str, line: str, column: str) -> str:
    """A cell's text with its note."""
    for table in tables(made):
        titles = [one.title for one in table.columns]
        if table.caption == caption and column in titles:
            for cells in table.lines:
                if cells[0].text == line:
                    found = cells[titles.index(column)]
                    return f"{found.text} {found.note}".strip()
    raise AssertionError(f"no {line!r} with {column!r} in a table {caption!r}")
