"""Rounding and products of narrow operands, on a card and under the interpreter, which has neither of bf16."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["INTERPRETED", "TRITON_DTYPES", "VERSION", "product", "product_onto", "rounded"]

TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether the kernels run on the CPU; Triton decides when it reads them."""

VERSION: str = triton.__version__
"""Of Triton, which builds of PyTorch install under other names too."""

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """``x``, f32, to the dtype, to nearest, ties to even; the interpreter cuts bf16 off, and loses carries of f8."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    if _INTERPRETED and dtype == tl.float8e4nv:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000
        small = tl.abs(x) < 0.015625  # where steps are of 2^-9
        x = tl.where(small, (x + 24576.0) - 24576.0, bits.to(tl.float32, bitcast=True))
    return x.to(dtype)


@triton.jit
def product(a, b):
    """``a @ b`` with f32 sums; of f32 operands without rounding them to TF32."""
    if _INTERPRETED:  # its bf16 are integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def product_onto(sums, a, b):
    """``sums + a @ b``: f32 sums of floats, i32 of bytes."""
    if _INTERPRETED and sums.dtype == tl.float32:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, sums, out_dtype=sums.dtype)
