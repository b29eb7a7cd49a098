"""Steps that narrow what a product reads, in the f32 operations of the table of ops, so that the integers are those."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import encast.backends.gpu.steps.gather
import encast.backends.gpu.steps.rows  # noqa: F401  (enter the steps that are followed by a narrow copy)
from encast.backends.gpu.steps.context import STEPS, Context, Step, step

__all__ = ["F8", "Quantized", "f8_rows", "inverse_of", "quantize", "quantize_static"]


@dataclass(frozen=True)
class Quantized:
    """A q8 value, ``scale * (codes + shift)``: ``codes: s8[rows, cols]``, the bytes minus 128, because products on GPUs
    are of signed bytes; ``scale: f32[rows]``; ``shift: i32[rows]``, 128 minus the zero point.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor


@dataclass(frozen=True)
class F8:
    """An f8 value, ``scale * codes``: ``codes: e4m3[rows, cols]``, ``scale: f32[rows]``."""

    codes: torch.Tensor
    scale: torch.Tensor


@step("quantize")
def quantize(context: Context, x: torch.Tensor, *, zero_point: bool) -> Quantized:
    rows = x.float()
    if zero_point:
        low = rows.amin(dim=1).clamp(max=0)
        extent, steps = rows.amax(dim=1).clamp(min=0) - low, 255.0
    else:
        extent, steps = rows.abs().amax(dim=1), 127.0
    scale, reciprocal = _scales(extent, steps)
    zero = torch.round(-low * reciprocal) if zero_point else torch.full_like(scale, 128.0)
    levels = torch.round(rows * reciprocal[:, None]) + zero[:, None]
    return Quantized((levels.clamp(0, 255) - 128).to(torch.int8), scale, (128 - zero).to(torch.int32))


def _scales(extent: torch.Tensor, steps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``extent / steps`` and its reciprocal, both 0 for a row so small that it is one of zeros."""
    # A division by a number, or of one, is a product with a reciprocal in PyTorch; this one is rounded once.
    whole = torch.full_like(extent, steps)
    reciprocal = whole / extent
    empty = torch.isinf(reciprocal)
    return (extent / whole).masked_fill(empty, 0.0), reciprocal.masked_fill(empty, 0.0)


@step("cast_f8")
def cast_f8(context: Context, x: torch.Tensor) -> F8:
    return f8_rows(x)


def f8_rows(x: torch.Tensor) -> F8:
    """``cast_f8`` of the table of ops, of any floating dtype."""
    rows = x.float()
    scale, reciprocal = _scales(rows.abs().amax(dim=1), torch.finfo(torch.float8_e4m3fn).max)
    return F8((rows * reciprocal[:, None]).to(torch.float8_e4m3fn), scale)


def inverse_of(scale: float) -> float:
    """The f32 reciprocal of an f32."""
    return float(np.float32(1) / np.float32(scale))


@step("quantize_static")
def quantize_static(context: Context, x: torch.Tensor, *, scale: float, zero_point: int) -> Quantized:
    rows = x.float()
    levels = torch.round((rows * inverse_of(scale)).clamp(-zero_point, 255 - zero_point)) + (zero_point - 128)
    # A NaN has no byte; its row has no scale either.
    scales = torch.full_like(rows[:, 0], scale).masked_fill(torch.isnan(rows).any(dim=1), float("nan"))
    return Quantized(levels.to(torch.int8), scales, torch.full_like(scales, 128 - zero_point, dtype=torch.int32))


@step("cast_bf16")
def cast_bf16(context: Context, x: torch.Tensor) -> torch.Tensor:
    """Where values are stored in 16 bits, they are what products read."""
    return x.to(torch.bfloat16) if context.stored == torch.float32 else x


def _narrowed(context: Context, x: torch.Tensor, also: Any) -> Any:
    if also == "bf16":
        return cast_bf16(context, x)
    if also == "f8":
        return f8_rows(x)
    if isinstance(also, dict):
        return quantize_static(context, x, **also)
    return quantize(context, x, zero_point=also == "q8_zero_point")


def with_narrow(wide: Step) -> Callable[..., Any]:
    """The step of ``NAME_narrow`` from that of ``NAME``."""

    def run(context: Context, *operands: Any, also: Any, **attrs: Any) -> tuple[torch.Tensor, Any]:
        made = wide(context, *operands, **attrs)
        return made, _narrowed(context, made, also)

    return run


for _name in ("embed_layer_norm", "add_layer_norm", "layer_norm", "rms_norm", "gated_activation"):
    step(f"{_name}_narrow")(with_narrow(STEPS[_name]))
