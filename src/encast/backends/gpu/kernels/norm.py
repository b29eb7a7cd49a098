"""Residual sum, layer norm or norm by the root mean square, and a narrow copy of the result: a row is read once.

Divisions and square roots are rounded once, and nothing is contracted to a fused multiply-add, so that the bytes are
those of the table of ops.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from encast.backends.gpu.kernels.dtypes import rounded
from encast.backends.gpu.steps.narrow import Quantized, inverse_of

__all__ = ["LARGEST_ROW", "norm"]

LARGEST_ROW = 16384
"""Columns that a program holds."""

_NO_COPY, _BF16, _SYMMETRIC, _ZERO_POINT, _STATIC = range(5)


@triton.jit
def _nearest(x):  # To the nearest integer, ties to even, of numbers below 2^22.
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _norm(
    x, residual, gamma, beta, out, codes, scales, shifts,
    columns, size, x_stride, residual_stride, eps, fixed_scale, fixed_inverse, fixed_zero,
    BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, CENTRED: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    real = at < columns
    value = tl.load(x + row * x_stride + at, mask=real, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row * residual_stride + at, mask=real, other=0.0).to(tl.float32)
    if CENTRED:
        value = tl.where(real, value - tl.div_rn(tl.sum(value, axis=0), size), 0.0)
    variance = tl.div_rn(tl.sum(value * value, axis=0), size)
    value = tl.div_rn(value, tl.sqrt_rn(variance + eps)) * tl.load(gamma + at, mask=real, other=0.0)
    if CENTRED:
        value += tl.load(beta + at, mask=real, other=0.0)
    tl.store(out + row * columns + at, rounded(value, out.dtype.element_ty), mask=real)
    if COPY == 1:
        tl.store(codes + row * columns + at, rounded(value, codes.dtype.element_ty), mask=real)
    if COPY > 1:
        nan = float("nan")
        total = tl.sum(value, axis=0)
        lost = total != total  # maxima and minima pass over a NaN
        if COPY == 4:
            zero = fixed_zero
            levels = tl.minimum(tl.maximum(value * fixed_inverse, 0.0 - fixed_zero), 255.0 - fixed_zero)
            scale = fixed_scale
        else:
            if COPY == 3:
                low = tl.minimum(tl.min(value, axis=0), 0.0)
                extent = tl.maximum(tl.max(value, axis=0), 0.0) - low
                steps = 255.0
            else:
                low = 0.0
                extent = tl.max(tl.abs(value), axis=0)
                steps = 127.0
            inverse = tl.div_rn(steps, extent)
            empty = inverse == float("inf")
            inverse = tl.where(empty, 0.0, inverse)
            scale = tl.where(empty, 0.0, tl.div_rn(extent, steps))
            zero = _nearest((0.0 - low) * inverse) if COPY == 3 else 128.0
            levels = value * inverse
        levels = tl.minimum(tl.maximum(_nearest(levels) + zero, 0.0), 255.0) - 128.0
        tl.store(codes + row * columns + at, levels.to(tl.int8), mask=real)
        tl.store(scales + row, tl.where(lost, nan, scale))
        tl.store(shifts + row, 128 - zero.to(tl.int32) if COPY == 3 or COPY == 4 else 0)


def norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    *,
    eps: float,
    stored: torch.dtype,
    also: Any = None,
) -> tuple[torch.Tensor, Any]:
    """``layer_norm(x + residual)`` of ``[rows, columns]``, in ``stored``; without ``beta`` by the root mean square.

    The second is the narrow copy that ``also`` asks for, see ``_with_quantized`` of ``ir/ops.py``, or None. Rows of
    ``x`` and ``residual`` are contiguous.
    """
    rows, columns = x.shape
    out = torch.empty((rows, columns), dtype=stored, device=x.device)
    copy, fixed = _NO_COPY, (1.0, 1.0, 0.0)
    codes, scales, shifts = out, gamma, gamma
    made: Any = None
    if also == "bf16" and stored == torch.float32:
        copy = _BF16
        made = codes = torch.empty((rows, columns), dtype=torch.bfloat16, device=x.device)
    elif also == "bf16":
        made = out
    elif also is not None:
        codes = torch.empty((rows, columns), dtype=torch.int8, device=x.device)
        scales = torch.empty(rows, dtype=torch.float32, device=x.device)
        shifts = torch.empty(rows, dtype=torch.int32, device=x.device)
        made = Quantized(codes, scales, shifts)
        copy = {"q8": _SYMMETRIC, "q8_zero_point": _ZERO_POINT}.get(str(also), _STATIC)
        if copy == _STATIC:
            fixed = (also["scale"], inverse_of(also["scale"]), float(also["zero_point"]))
    _norm[(rows,)](
        x, x if residual is None else residual, gamma, gamma if beta is None else beta, out, codes, scales, shifts,
        columns, float(columns), x.stride(0), x.stride(0) if residual is None else residual.stride(0), eps, *fixed,
        BLOCK=triton.next_power_of_2(columns), HAS_RESIDUAL=residual is not None, CENTRED=beta is not None, COPY=copy,
        num_warps=4 if columns <= 2048 else 8, enable_fp_fusion=False,
    )  # fmt: skip
    return out, made
