"""The steps that run on Triton's kernels, and when those of PyTorch stand in."""

from __future__ import annotations

from typing import Any

import torch

from encast.backends.gpu.kernels.attention import LARGEST_HEAD, attend
from encast.backends.gpu.kernels.epilogue import float_epilogue, int8_epilogue
from encast.backends.gpu.kernels.norm import LARGEST_ROW, norm
from encast.backends.gpu.steps import STEPS as PLAIN
from encast.backends.gpu.steps.attention import attention_dtype
from encast.backends.gpu.steps.context import Context, Step, step
from encast.backends.gpu.steps.narrow import Quantized
from encast.backends.gpu.steps.products import Int8Weight, integer_product, wide_product
from encast.ir.graph import Graph

__all__ = ["STEPS", "steps_for"]

STEPS: dict[str, Step] = dict(PLAIN)


@step("attention", table=STEPS)
def attention(
    context: Context,
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    seen: torch.Tensor | None = None,
    *,
    heads: int,
    scale: float,
    products: str,
) -> torch.Tensor:
    dtype = attention_dtype(context, products)
    return attend(context.batch, qkv, heads, scale, dtype, bias=bias, seen=seen)


@step("local_attention", table=STEPS)
def local_attention(
    context: Context,
    qkv: torch.Tensor,
    seen: torch.Tensor | None = None,
    *,
    heads: int,
    scale: float,
    products: str,
    reach: int,
) -> torch.Tensor:
    dtype = attention_dtype(context, products)
    return attend(context.batch, qkv, heads, scale, dtype, seen=seen, reach=reach)


@step("layer_norm", "layer_norm_narrow", table=STEPS)
def layer_norm(
    context: Context, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, *, eps: float, also: Any = None
) -> Any:
    made = norm(x, None, gamma, beta, eps=eps, stored=context.stored, also=also)
    return made if also is not None else made[0]


@step("add_layer_norm", "add_layer_norm_narrow", table=STEPS)
def add_layer_norm(
    context: Context,
    x: torch.Tensor,
    residual: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    *,
    eps: float,
    also: Any = None,
) -> Any:
    made = norm(x, residual, gamma, beta, eps=eps, stored=context.stored, also=also)
    return made if also is not None else made[0]


@step("rms_norm", "rms_norm_narrow", table=STEPS)
def rms_norm(context: Context, x: torch.Tensor, gamma: torch.Tensor, *, eps: float, also: Any = None) -> Any:
    made = norm(x, None, gamma, None, eps=eps, stored=context.stored, also=also)
    return made if also is not None else made[0]


@step("linear_bf16", table=STEPS)
def linear_bf16(
    context: Context, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, activation: str
) -> Any:
    if x.dtype == context.stored:  # the product stores it, and adds the bias
        return PLAIN["linear_bf16"](context, x, weight, bias, activation=activation)
    if bias is None and activation == "none" and context.stored == torch.float32:
        return wide_product(x, weight)
    return float_epilogue(wide_product(x, weight), bias, activation, context.stored)


@step("linear_int8", table=STEPS)
def linear_int8(
    context: Context,
    x: Quantized,
    weight: Int8Weight,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: str,
) -> torch.Tensor:
    return int8_epilogue(integer_product(x, weight), x, weight, weight_scale, bias, activation, context.stored)


def steps_for(graph: Graph) -> dict[str, Step]:
    """The table for this graph: without the kernels that hold no row or head of such a size."""
    steps = dict(STEPS)
    for node in graph.nodes:
        step_of, columns = steps.get(node.op), graph.type_of(node.outputs[0]).shape[-1]
        large = (
            (step_of in (attention, local_attention) and int(columns) // node.attrs["heads"] > LARGEST_HEAD)
            or (step_of in (layer_norm, add_layer_norm, rms_norm) and int(columns) > LARGEST_ROW)
        )  # fmt: skip
        if large:
            steps[node.op] = PLAIN[node.op]
    return steps
