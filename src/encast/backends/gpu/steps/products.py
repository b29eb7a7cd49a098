"""Products with weights."""

from __future__ import annotations

import torch
import torch.nn.functional as functional

from encast.backends.gpu.steps.context import Context, step
from encast.backends.gpu.steps.narrow import F8, Quantized
from encast.backends.gpu.steps.rows import activated

__all__ = [
    "INT8_MULTIPLE",
    "Int8Weight",
    "half_product",
    "integer_product",
    "integer_sums",
    "linear",
    "linear_f8",
    "linear_int8",
    "wide_product",
]

INT8_MULTIPLE = 16
"""cuBLAS wants sizes of int8 products that are multiples of 8, and is at its best with 16."""

_HALF_COLUMNS = 8
"""Columns whose products tensor cores add to an accumulator at a time: those of the A100; Volta and Turing 4. M. Fasi,
N. Higham, M. Mikaitis, S. Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ Computer Science 7:e330, 2021."""

_LEAST_INT8_ROWS = 32
"""``torch._int_mm`` wants more than 16 rows on CUDA."""


class Int8Weight:
    """A weight s8[n, k] on the device, its sizes padded with zeros to ``INT8_MULTIPLE``, and its rows' sums i32[n]."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.outputs, self.inputs = weight.shape
        padding = (0, -self.inputs % INT8_MULTIPLE, 0, -self.outputs % INT8_MULTIPLE)
        self.codes = _padded(weight, padding)
        self.sums = weight.sum(dim=1, dtype=torch.int32)


@step("linear", "linear_bf16")
def linear(
    context: Context, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, activation: str
) -> torch.Tensor:
    """``weight: [n, k]`` in the dtype of ``x``; the bias is f32, or of that dtype where values are stored in it."""
    if x.dtype == context.stored:
        product = half_product if context.half_sums else functional.linear
        return activated(product(x, weight, bias), activation)
    made = wide_product(x, weight)
    return activated(made if bias is None else made + bias, activation)


def half_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias`` of f16 with sums in f16.

    On a card by a setting of PyTorch, which is the process's: ``Program.run`` sees to it that no other program hands
    its products over meanwhile. On the CPU the sums of ``_HALF_COLUMNS`` columns are added to an f16, one after the
    other, rounded each time.
    """
    if x.is_cuda:
        settings = torch.backends.cuda.matmul
        before = settings.allow_fp16_accumulation
        try:
            settings.allow_fp16_accumulation = True  # an interrupt may be raised in it, when it is set
            return functional.linear(x, weight, bias)
        finally:
            settings.allow_fp16_accumulation = before
    sums = x.new_zeros(x.shape[0], weight.shape[0])
    wide, rows = x.float(), weight.t().float().contiguous()
    for columns, part in zip(wide.split(_HALF_COLUMNS, 1), rows.split(_HALF_COLUMNS), strict=True):
        sums = torch.addmm(sums.float(), columns, part).to(x.dtype)
    return sums if bias is None else sums + bias


def wide_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` of bf16 operands with f32 sums, in f32."""
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return x.float() @ weight.float().t()


@step("linear_f8")
def linear_f8(context: Context, x: F8, weight: F8, bias: torch.Tensor | None, *, activation: str) -> torch.Tensor:
    made = (x.codes.float() @ weight.codes.float().t()) * (x.scale[:, None] * weight.scale)
    return context.store(activated(made if bias is None else made + bias, activation))


@step("linear_int8")
def linear_int8(
    context: Context,
    x: Quantized,
    weight: Int8Weight,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    *_: None,  # the weight without its zeros, which adapt leaves out
    activation: str,
) -> torch.Tensor:
    made = integer_sums(x, weight).float() * (x.scale[:, None] * weight_scale)
    return context.store(activated(made if bias is None else made + bias, activation))


def integer_sums(x: Quantized, weight: Int8Weight) -> torch.Tensor:
    """``sum over k of (byte - zero) * weight``, exact, i32[rows, n]."""
    sums = integer_product(x, weight)[: x.codes.shape[0], : weight.outputs]
    return sums + x.shift[:, None] * weight.sums


def integer_product(x: Quantized, weight: Int8Weight) -> torch.Tensor:
    """``sum over k of codes * weight``, exact, i32; rows and columns of padding may follow the real ones."""
    if not x.codes.is_cuda:
        # Products are at most 128 * 127, so float64 sums of them are exact up to 2^39 columns. What int8 products of
        # CPUs do where sums of pairs overflow 16 bits depends on the processor.
        return (x.codes.double() @ weight.codes[:, : weight.inputs].double().t()).to(torch.int32)
    codes = _padded(x.codes, (0, weight.codes.shape[1] - weight.inputs, 0, max(0, _LEAST_INT8_ROWS - len(x.codes))))
    return torch._int_mm(codes, weight.codes.t())


def _padded(x: torch.Tensor, padding: tuple[int, ...]) -> torch.Tensor:
    """``x`` itself where there is nothing to pad: PyTorch would copy it."""
    return functional.pad(x, padding) if any(padding) else x
