"""A small experiment's rows, and the report of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from synthetic_rows import Experiment

from encast.bench.report.build import Options, build_document
from encast.bench.report.load import load
from encast.pages.document import Document

__all__ = ["FEW", "Rows", "document", "few"]

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
