"""The steps that run on Triton's kernels, and when those of PyTorch stand in."""

from __future__ import annotations

from typing import Any

import torch

from encast.backends.gpu.kernels.attention import LARGEST_HEAD, attend
from encast.backends.gpu.kernels.epilogue import float_epilogue, int8_epilogue
from encast.backends.gpu.kernels.narrow import narrow
from encast.backends.gpu.kernels.norm import LARGEST_ROW, embed, norm
from encast.backends.gpu.kernels.product import Scales, can_multiply, multiply
from encast.backends.gpu.steps import STEPS as PLAIN
from encast.backends.gpu.steps.attention import attention_dtype
from encast.backends.gpu.steps.context import Context, Step, step
from encast.backends.gpu.steps.gather import position_ids
from encast.backends.gpu.steps.narrow import F8, Quantized
from encast.backends.gpu.steps.products import Int8Weight, integer_product, wide_product
from encast.ir.graph import Graph, Node

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


@step("embed_layer_norm", "embed_layer_norm_narrow", table=STEPS)
def embed_layer_norm(
    context: Context,
    token_ids: torch.Tensor,
    token_type_ids: torch.Tensor | None,
    word: torch.Tensor,
    position: torch.Tensor | None,
    token_type: torch.Tensor | None,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    *,
    eps: float,
    position_offset: int,
    position_skip_id: int,
    also: Any = None,
) -> Any:
    places, offset = context.batch.positions, position_offset
    if position is not None and position_skip_id >= 0:
        places = position_ids(context, token_ids, offset=position_offset, skip_id=position_skip_id)
        offset = 0
    made = embed(
        token_ids, token_type_ids, places, word, token_type, position, gamma, beta,
        offset=offset, eps=eps, stored=context.stored, also=also,
    )  # fmt: skip
    return made if also is not None else made[0]


@step("quantize", table=STEPS)
def quantize(context: Context, x: torch.Tensor, *, zero_point: bool) -> Any:
    return narrow(x, "q8_zero_point" if zero_point else "q8")


@step("quantize_static", table=STEPS)
def quantize_static(context: Context, x: torch.Tensor, *, scale: float, zero_point: int) -> Any:
    return narrow(x, {"scale": scale, "zero_point": zero_point})


@step("cast_f8", table=STEPS)
def cast_f8(context: Context, x: torch.Tensor) -> Any:
    return narrow(x, "f8")


@step("linear", "linear_bf16", table=STEPS)
def linear(
    context: Context, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, activation: str
) -> torch.Tensor:
    stored = context.stored
    if x.dtype == stored:
        # cuBLAS adds a bias, and is as fast or faster; an activation takes it a second pass.
        # And it alone has sums in f16.
        if stored == torch.float32 or context.half_sums or activation == "none" or not can_multiply(x, weight):
            return PLAIN["linear"](context, x, weight, bias, activation=activation)
        return multiply(x, weight, bias, activation, stored)
    if can_multiply(x, weight):
        return multiply(x, weight, bias, activation, stored)
    if bias is None and activation == "none" and stored == torch.float32:
        return wide_product(x, weight)
    return float_epilogue(wide_product(x, weight), bias, activation, stored)


@step("linear_f8", table=STEPS)
def linear_f8(context: Context, x: F8, weight: F8, bias: torch.Tensor | None, *, activation: str) -> torch.Tensor:
    if not can_multiply(x.codes, weight.codes):
        return PLAIN["linear_f8"](context, x, weight, bias, activation=activation)
    return multiply(x.codes, weight.codes, bias, activation, context.stored, Scales(x.scale, weight.scale))


@step("linear_int8", table=STEPS)
def linear_int8(
    context: Context,
    x: Quantized,
    weight: Int8Weight,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    *_: None,  # the weight without its zeros, which adapt leaves out
    activation: str,
) -> torch.Tensor:
    if can_multiply(x.codes, weight.codes):
        codes = weight.codes[: weight.outputs]
        scales = Scales(x.scale, weight_scale, x.shift, weight.sums)
        return multiply(x.codes, codes, bias, activation, context.stored, scales)
    return int8_epilogue(integer_product(x, weight), x, weight, weight_scale, bias, activation, context.stored)


def steps_for(graph: Graph) -> dict[str, Step]:
    """The table for this graph: without the kernels that take no row or head of such a size."""
    steps = dict(STEPS)
    for node in graph.nodes:
        if not _takes(node, graph):
            steps[node.op] = PLAIN[node.op]
    return steps


_BY_ROW = (layer_norm, add_layer_norm, rms_norm, embed_layer_norm, quantize, quantize_static, cast_f8)


def _takes(node: Node, graph: Graph) -> bool:
    step_of, columns = STEPS.get(node.op), graph.type_of(node.outputs[0]).shape[-1]
    assert isinstance(columns, int)
    if step_of in (attention, local_attention):
        return columns // int(node.attrs["heads"]) <= LARGEST_HEAD
    return step_of not in _BY_ROW or columns <= LARGEST_ROW
