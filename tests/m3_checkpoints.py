"""A random checkpoint in the layout of BGE-M3: an encoder with the files of two linear layers beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_files import torch_zip
from checkpoints import make_checkpoint

__all__ = ["make_m3_checkpoint"]


def make_m3_checkpoint(
    folder: Path, arch: str = "xlm-roberta", *, hidden: int = 32, **options: Any
) -> dict[str, dict[str, Any]]:
    """Writes the folder, of texts up to 40 tokens; returns the weight and the bias of ``sparse`` and ``colbert``.

    ``arch``: BGE-M3 is an XLM-RoBERTa. ``options``: of ``make_checkpoint``.
    """
    options = {"layers": 2, "heads": 2, "pooling": ("cls",), "normalize": True, **options}
    make_checkpoint(folder, arch, "embed", hidden=hidden, **options)
    source = np.random.RandomState(3)
    heads = {
        name: {
            "weight": (source.randn(rows, hidden) / hidden**0.5).astype(np.float32),
            "bias": source.randn(rows).astype(np.float32) * np.float32(0.3),
        }
        for name, rows in (("sparse", 1), ("colbert", hidden))
    }
    for name, arrays in heads.items():
        (folder / f"{name}_linear.pt").write_bytes(torch_zip(arrays))
    return heads
