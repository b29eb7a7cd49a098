"""Wide numbers to narrow ones: bf16 bits, and s8 weights with a scale a row."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["bf16_bits", "bf16_values", "quantize_rows"]

Array = np.ndarray[Any, Any]

BLOCK = 1 << 22
"""Elements that are worked on at a time, so that temporaries stay small beside the weight."""


def bf16_bits(x: Array) -> Array:
    """``x: f32`` to bf16, to nearest, ties to even, as uint16 bit patterns of the same shape.

    Finite values past the largest bf16 (about 3.39e38) become infinite, as the rounding rule says; NaN stays NaN.
    """
    flat = np.ascontiguousarray(x, np.float32).reshape(-1).view(np.uint32)
    out = np.empty(flat.shape, np.uint16)
    for begin in range(0, flat.size, BLOCK):
        bits = flat[begin : begin + BLOCK]
        rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
        # Rounding would carry a NaN's payload into the sign; keep the top half and make it quiet.
        nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        out[begin : begin + BLOCK] = np.where(nan, (bits >> np.uint32(16)) | np.uint32(0x40), rounded)
    return np.asarray(out.reshape(x.shape))


def bf16_values(bits: Array) -> Array:
    """The f32 values of bf16 bit patterns (uint16), exactly."""
    return np.asarray((bits.astype(np.uint32) << np.uint32(16)).view(np.float32))


def quantize_rows(weight: Array) -> tuple[Array, Array]:
    """``weight: f32[out, in]`` to ``(s8[out, in], scale: f32[out])``, symmetric: ``scale = max|row| / 127``.

    The s8 values are -127 to 127, rounded to nearest, ties to even, against the scale as f32 stores it. A row
    of zeros, or of values too small for a scale that f32 holds, becomes zeros with scale 0.
    """
    rows, columns = weight.shape
    narrow = np.empty((rows, columns), np.int8)
    scale = np.empty(rows, np.float32)
    step = max(1, BLOCK // max(1, columns))
    for begin in range(0, rows, step):
        block = np.asarray(weight[begin : begin + step], np.float32)
        block_scale = (np.abs(block).max(axis=1, initial=0.0).astype(np.float64) / 127).astype(np.float32)
        block_scale[block_scale < np.finfo(np.float32).tiny] = 0
        divisor = np.where(block_scale > 0, block_scale, np.float32(np.inf))
        quotient = block / divisor[:, None]
        narrow[begin : begin + step] = np.clip(np.rint(quotient), -127, 127).astype(np.int8)
        scale[begin : begin + step] = block_scale
    return narrow, scale
