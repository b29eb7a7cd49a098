"""The stage that compiles a checkpoint to the artifact that is asked for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec

import encast.artifact as artifacts
from encast.compile import compile
from encast.compress.recipe import Quantise
from encast.compress.stages import Context

__all__ = ["quantise_stage"]


def quantise_stage(stage: Quantise, source: Path, out: Path, work: Path, context: Context) -> dict[str, Any]:
    """Compiles the checkpoint ``source`` to the artifact ``out``; returns what was done, with the dev set's metrics."""
    sparse = "never"
    work.mkdir(parents=True, exist_ok=True)
    made = compile(source, work / out.name, dtype=stage.dtype, task=context.task, sparse=sparse)
    opened = artifacts.open(made)
    shutil.rmtree(out, ignore_errors=True)
    made.rename(out)
    return {"stage": msgspec.to_builtins(stage), "sparse": sparse, "sizes": opened.card["sizes"]}
