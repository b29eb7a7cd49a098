"""Residual sum or embeddings, layer norm or norm by the root mean square, and a narrow copy of the result: a row is
read once.

Divisions and square roots are rounded once, and nothing is contracted to a fused multiply-add, so that the bytes of a
copy are those of the table of ops.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from encast.backends.gpu.kernels.dtypes import rounded
from encast.backends.gpu.kernels.narrow import Copy, store_copy, warps_for

__all__ = ["LARGEST_ROW", "embed", "norm"]

LARGEST_ROW = 16384
"""Columns that a program holds."""


@triton.jit
def _normed(value, gamma, beta, at, real, size, eps, CENTRED: tl.constexpr):
    if CENTRED:
        value = tl.where(real, value - tl.div_rn(tl.sum(value, axis=0), size), 0.0)
    variance = tl.div_rn(tl.sum(value * value, axis=0), size)
    value = value * tl.div_rn(1.0, tl.sqrt_rn(variance + eps)) * tl.load(gamma + at, mask=real, other=0.0)
    if CENTRED:
        value += tl.load(beta + at, mask=real, other=0.0)
    return value


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
    value = _normed(value, gamma, beta, at, real, size, eps, CENTRED)
    tl.store(out + row * columns + at, rounded(value, out.dtype.element_ty), mask=real)
    store_copy(value, row, at, real, columns, codes, scales, shifts, fixed_scale, fixed_inverse, fixed_zero, COPY)


@triton.jit
def _embed(
    ids, types, places, word, token_type, position, gamma, beta, out, codes, scales, shifts,
    columns, size, offset, eps, fixed_scale, fixed_inverse, fixed_zero,
    BLOCK: tl.constexpr, HAS_TYPE: tl.constexpr, HAS_POSITION: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    real = at < columns
    value = tl.load(word + tl.load(ids + row).to(tl.int64) * columns + at, mask=real, other=0.0).to(tl.float32)
    if HAS_TYPE:
        type_of = token_type + tl.load(types + row).to(tl.int64) * columns
        value += tl.load(type_of + at, mask=real, other=0.0).to(tl.float32)
    if HAS_POSITION:
        place = position + (tl.load(places + row) + offset).to(tl.int64) * columns
        value += tl.load(place + at, mask=real, other=0.0).to(tl.float32)
    value = _normed(value, gamma, beta, at, real, size, eps, True)
    tl.store(out + row * columns + at, rounded(value, out.dtype.element_ty), mask=real)
    store_copy(value, row, at, real, columns, codes, scales, shifts, fixed_scale, fixed_inverse, fixed_zero, COPY)


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

    The second is the narrow copy that ``also`` asks for, see ``Copy``, or None. Rows of ``x`` and ``residual`` are
    contiguous.
    """
    rows, columns = x.shape
    out = torch.empty((rows, columns), dtype=stored, device=x.device)
    copy = Copy.of(also, out)
    _norm[(rows,)](
        x, x if residual is None else residual, gamma, gamma if beta is None else beta,
        out, copy.codes, copy.scales, copy.shifts,
        columns, float(columns), x.stride(0), x.stride(0) if residual is None else residual.stride(0), eps, *copy.fixed,
        BLOCK=triton.next_power_of_2(columns), HAS_RESIDUAL=residual is not None, CENTRED=beta is not None,
        COPY=copy.kind, num_warps=warps_for(columns), enable_fp_fusion=False,
    )  # fmt: skip
    return out, copy.made


def embed(
    ids: torch.Tensor,
    types: torch.Tensor | None,
    places: torch.Tensor,
    word: torch.Tensor,
    token_type: torch.Tensor | None,
    position: torch.Tensor | None,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    *,
    offset: int,
    eps: float,
    stored: torch.dtype,
    also: Any = None,
) -> tuple[torch.Tensor, Any]:
    """``layer_norm(word[ids] + token_type[types] + position[places + offset])``, and its copy, as ``norm`` has it."""
    rows, columns = len(ids), word.shape[1]
    out = torch.empty((rows, columns), dtype=stored, device=ids.device)
    copy = Copy.of(also, out)
    _embed[(rows,)](
        ids, ids if types is None else types, places,
        word, word if token_type is None else token_type, word if position is None else position,
        gamma, beta, out, copy.codes, copy.scales, copy.shifts,
        columns, float(columns), offset, eps, *copy.fixed,
        BLOCK=triton.next_power_of_2(columns), HAS_TYPE=token_type is not None, HAS_POSITION=position is not None,
        COPY=copy.kind, num_warps=warps_for(columns), enable_fp_fusion=False,
    )  # fmt: skip
    return out, copy.made
