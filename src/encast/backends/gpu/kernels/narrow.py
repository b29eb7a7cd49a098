"""Narrow copies of rows: bf16, bytes with a scale and a zero point, f8 with a scale. A row is read once.

Divisions are rounded once, and nothing is contracted to a fused multiply-add, so that the bytes are those of the table
of ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from encast.backends.gpu.kernels.dtypes import INTERPRETED, rounded
from encast.backends.gpu.steps.narrow import F8, Quantized, inverse_of

__all__ = ["Copy", "narrow", "store_copy", "warps_for"]

_INTERPRETED = tl.constexpr(INTERPRETED)

_NO_COPY, _BF16, _SYMMETRIC, _ZERO_POINT, _STATIC, _F8 = range(6)


@triton.jit
def _nearest(x):  # To the nearest integer, ties to even, of numbers below 2^22.
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _larger(a, b):  # NaN where one is: Triton's own maximum passes over it
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(x):  # NaN where one is
    if _INTERPRETED:  # where a reduction by a function takes a call an element
        return tl.max(x, axis=0) + tl.sum(tl.where(x != x, x, 0.0), axis=0)
    return tl.reduce(x, 0, _larger)


@triton.jit
def store_copy(
    value, row, at, real, columns, codes, scales, shifts, fixed_scale, fixed_inverse, fixed_zero, COPY: tl.constexpr
):
    """``value``: a row, f32, 0 where ``real`` is false."""
    if COPY == 1:
        tl.store(codes + row * columns + at, rounded(value, codes.dtype.element_ty), mask=real)
    if COPY > 1:
        low = 0.0
        if COPY == 4:
            zero = fixed_zero
            levels = tl.minimum(tl.maximum(value * fixed_inverse, 0.0 - fixed_zero), 255.0 - fixed_zero)
            largest = _largest(tl.abs(value))
            scale = tl.where(largest == largest, fixed_scale, largest)
        else:
            if COPY == 3:
                low = 0.0 - _larger(_largest(0.0 - value), 0.0)
                extent = _larger(_largest(value), 0.0) - low
                steps = 255.0
            else:
                extent = _largest(tl.abs(value))
                steps = 127.0 if COPY == 2 else 448.0
            inverse = tl.div_rn(steps, extent)
            empty = inverse == float("inf")
            inverse = tl.where(empty, 0.0, inverse)
            scale = tl.where(empty, 0.0, tl.div_rn(extent, steps))
            zero = _nearest((0.0 - low) * inverse) if COPY == 3 else 128.0
            levels = value * inverse
        tl.store(scales + row, scale)
        if COPY == 5:
            tl.store(codes + row * columns + at, rounded(levels, codes.dtype.element_ty), mask=real)
        else:
            levels = tl.minimum(tl.maximum(_nearest(levels) + zero, 0.0), 255.0) - 128.0
            tl.store(codes + row * columns + at, levels.to(tl.int8), mask=real)
            tl.store(shifts + row, 128 - zero.to(tl.int32) if COPY == 3 or COPY == 4 else 0)


@dataclass(frozen=True)
class Copy:
    """What a kernel is given to write a narrow copy, and ``made``, what that copy is to the steps that read it."""

    kind: int
    codes: torch.Tensor
    scales: torch.Tensor
    shifts: torch.Tensor
    fixed: tuple[float, float, float]
    made: Any

    @classmethod
    def of(cls, also: Any, like: torch.Tensor) -> Copy:
        """Of rows as those of ``like``, which the copy is where it would be equal; ``also``: see ``_with_quantized`` of
        ``ir/ops.py``, or None. A kernel that stores 16 bits makes the copy of what it rounds to them."""
        rows, device = like.shape[0], like.device
        if also is None or (also == "bf16" and like.dtype != torch.float32):
            return cls(_NO_COPY, like, like, like, (1.0, 1.0, 0.0), None if also is None else like)
        if also == "bf16":
            codes = torch.empty(like.shape, dtype=torch.bfloat16, device=device)
            return cls(_BF16, codes, codes, codes, (1.0, 1.0, 0.0), codes)
        scales = torch.empty(rows, dtype=torch.float32, device=device)
        if also == "f8":
            codes = torch.empty(like.shape, dtype=torch.float8_e4m3fn, device=device)
            return cls(_F8, codes, scales, scales, (1.0, 1.0, 0.0), F8(codes, scales))
        codes = torch.empty(like.shape, dtype=torch.int8, device=device)
        shifts = torch.empty(rows, dtype=torch.int32, device=device)
        kind = {"q8": _SYMMETRIC, "q8_zero_point": _ZERO_POINT}.get(str(also), _STATIC)
        fixed = (1.0, 1.0, 0.0)
        if kind == _STATIC:
            fixed = (also["scale"], inverse_of(also["scale"]), float(also["zero_point"]))
        return cls(kind, codes, scales, shifts, fixed, Quantized(codes, scales, shifts))


def warps_for(columns: int) -> int:
    """Of a program that holds a row."""
    return 1 if columns <= 1024 else 4 if columns <= 4096 else 8


@triton.jit
def _narrow(
    x, codes, scales, shifts, columns, x_stride, fixed_scale, fixed_inverse, fixed_zero,
    BLOCK: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    real = at < columns
    value = tl.load(x + row * x_stride + at, mask=real, other=0.0).to(tl.float32)
    store_copy(value, row, at, real, columns, codes, scales, shifts, fixed_scale, fixed_inverse, fixed_zero, COPY)


def narrow(x: torch.Tensor, also: Any) -> Any:
    """The copy of ``x: [rows, columns]``, rows contiguous, that ``also`` asks for: bytes or f8."""
    rows, columns = x.shape
    copy = Copy.of(also, x)
    _narrow[(rows,)](
        x, copy.codes, copy.scales, copy.shifts, columns, x.stride(0), *copy.fixed,
        BLOCK=triton.next_power_of_2(columns), COPY=copy.kind, num_warps=warps_for(columns), enable_fp_fusion=False,
    )  # fmt: skip
    return copy.made
