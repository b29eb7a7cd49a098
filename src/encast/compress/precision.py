"""f32 or bf16: bf16 pays only where its products are native, and wide enough."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["can_bf16", "choose_precision"]

_LEAST_WIDTH = 128
"""Hidden size from which "auto" takes bf16 on a CPU: a rule and no trial, so that the same run has the same bits.

Forward and gradient in f32 take so many times as long as in bf16, without and with dropout: 64 wide 1.2 and 1.2, 96 1.3
and 1.3, 128 1.5 and 1.4, 192 1.6 and 1.6, 256 1.7 and 1.5, 312 1.8 and 1.7, 384 1.8 and 1.7, 768 1.9 and 1.8 (BERT of
two layers, 32 rows of 32 tokens, a core of an AMD EPYC with AVX-512 BF16); in short rows less.
"""


def can_bf16(device: Any) -> bool:
    """Whether products in bf16 are native; elsewhere torch emulates them."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and bool(torch.cpu._is_avx512_bf16_supported())


def choose_precision(wanted: str, device: Any, width: int) -> str:
    """ "f32" or "bf16"; "auto": bf16 where that is native and, on a CPU, the hidden size ``width`` is 128 at least."""
    if wanted != "auto":
        return wanted
    return "bf16" if can_bf16(device) and (device.type != "cpu" or width >= _LEAST_WIDTH) else "f32"
