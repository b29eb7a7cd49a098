"""What follows a product, in one pass: the scales of its integers, bias, activation, and the dtype that is stored."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from encast.backends.gpu.kernels.dtypes import rounded
from encast.backends.gpu.steps.narrow import Quantized
from encast.backends.gpu.steps.products import Int8Weight

__all__ = ["activated", "float_epilogue", "int8_epilogue", "kind_of"]

_COLUMNS, _ROWS = 128, 16

_KINDS = {"none": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "silu": 4, "tanh": 5}
_GELU_16 = 6


def kind_of(activation: str, stored: torch.dtype) -> int:
    """The number that ``activated`` knows an activation by, where its result is stored in a dtype."""
    kind = _KINDS[activation]
    return _GELU_16 if kind == _KINDS["gelu"] and stored != torch.float32 else kind


@triton.jit
def activated(x, KIND: tl.constexpr):
    # Gelu is x times the normal distribution, the sigmoid of an odd polynomial p: exp2(p) are its odds. The polynomials
    # are minimax fits up to 6.5, and rise beyond. The distribution is off by 3e-7 in f32, and by 1.6e-6 with the short
    # polynomial. erf takes twice as long, which a product that is stored in 16 bits waits for.
    if KIND == 1:
        s = x * x
        p = 8.281121570181618e-11 * s - 2.272101949660402e-09
        p = ((p * s - 1.8512754360904633e-07) * s + 9.191908093389908e-06) * s - 0.00014763290713691775
        p = ((p * s - 0.00012264911092010373) * s + 0.10486177622874514) * s + 2.302202814439761
        x = x / (1.0 + tl.exp2(0.0 - x * p))
    if KIND == 6:
        s = x * x
        p = (4.093690464835052e-06 * s - 0.00010561101020388791) * s - 0.00025455630675605965
        p = (p * s + 0.10500769560543585) * s + 2.302164554375195
        x = x / (1.0 + tl.exp2(0.0 - x * p))
    if KIND == 2:
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    if KIND == 3:
        x = tl.where(x < 0.0, 0.0, x)  # which keeps a NaN
    if KIND == 4:
        x = x * tl.sigmoid(x)
    if KIND == 5:
        x = 2.0 * tl.sigmoid(2.0 * x) - 1.0
    return x


@triton.jit
def _epilogue(
    sums, out, bias, row_scale, row_shift, column_scale, column_sums, rows, columns, stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTEGERS: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real_row, real_column = row < rows, column < columns
    real = real_row[:, None] & real_column[None, :]
    value = tl.load(sums + row.to(tl.int64)[:, None] * stride + column[None, :], mask=real, other=0)
    if INTEGERS:
        shift = tl.load(row_shift + row, mask=real_row, other=0)
        value += shift[:, None] * tl.load(column_sums + column, mask=real_column, other=0)[None, :]
        scale = tl.load(row_scale + row, mask=real_row, other=0.0)
        scale = scale[:, None] * tl.load(column_scale + column, mask=real_column, other=0.0)[None, :]
        value = value.to(tl.float32) * scale
    value = value.to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + column, mask=real_column, other=0.0).to(tl.float32)[None, :]
    value = activated(value, KIND)
    tl.store(
        out + row.to(tl.int64)[:, None] * columns + column[None, :], rounded(value, out.dtype.element_ty), mask=real
    )


def float_epilogue(
    product: torch.Tensor, bias: torch.Tensor | None, activation: str, stored: torch.dtype
) -> torch.Tensor:
    """``activation(product + bias)`` of ``product: f32[rows, n]``, in ``stored``."""
    return _run(product, product.shape[0], product.shape[1], None, None, None, bias, activation, stored)


def int8_epilogue(
    sums: torch.Tensor,
    x: Quantized,
    weight: Int8Weight,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    stored: torch.dtype,
) -> torch.Tensor:
    """``linear_int8`` from ``sums: i32`` of codes and weight, which may have rows and columns of padding."""
    return _run(sums, x.codes.shape[0], weight.outputs, x, weight, weight_scale, bias, activation, stored)


def _run(
    sums: torch.Tensor,
    rows: int,
    columns: int,
    x: Quantized | None,
    weight: Int8Weight | None,
    weight_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
    stored: torch.dtype,
) -> torch.Tensor:
    out = torch.empty((rows, columns), dtype=stored, device=sums.device)
    _epilogue[(triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS))](
        sums, out, sums if bias is None else bias,
        sums if x is None else x.scale, sums if x is None else x.shift,
        sums if weight_scale is None else weight_scale, sums if weight is None else weight.sums,
        rows, columns, sums.stride(0),
        ROWS=_ROWS, COLUMNS=_COLUMNS, INTEGERS=x is not None, HAS_BIAS=bias is not None,
        KIND=kind_of(activation, stored), num_warps=4,
    )  # fmt: skip
    return out
