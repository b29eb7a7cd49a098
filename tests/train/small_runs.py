"""Runs of one recipe on the rows of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from encast.compress.pipeline import Result, compress
from encast.compress.recipe import parse_recipe
from encast.data.datasets import open_dataset

__all__ = ["RECIPE", "train"]

RECIPE = "stages: [{fine-tune: {epochs: 12, learning-rate: 4.0e-3, batch-size: 16}}]"


def train(source: Path, data: Path, out: Path, task: str, recipe: str = RECIPE, **options: Any) -> Result:
    suffix = next(data.glob("train.*")).suffix
    return compress(
        source, out, task=task, recipe=parse_recipe(recipe, "recipe"), device="cpu", threads=1,
        train=open_dataset(data / f"train{suffix}"), dev=open_dataset(data / f"dev{suffix}"), **options,
    )  # fmt: skip
