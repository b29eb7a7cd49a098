"""Steps that make each row from the same row: activations, sums, norms."""

from __future__ import annotations

import torch
import torch.nn.functional as functional

from encast.backends.gpu.steps.context import Context, step

__all__ = ["activated", "add_layer_norm", "gated_activation", "layer_norm", "rms_norm"]


def activated(x: torch.Tensor, kind: str) -> torch.Tensor:
    """``x``, of any floating dtype, through an activation of the table of ops, or as it is for "none"."""
    if kind == "gelu":
        return functional.gelu(x)
    if kind == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    if kind == "relu":
        return functional.relu(x)
    if kind == "silu":
        return functional.silu(x)
    return torch.tanh(x) if kind == "tanh" else x


@step("activation")
def activation(context: Context, x: torch.Tensor, *, kind: str) -> torch.Tensor:
    return activated(x, kind)


@step("gated_activation")
def gated_activation(context: Context, x: torch.Tensor, *, kind: str) -> torch.Tensor:
    a, b = x.chunk(2, dim=1)
    return activated(a, kind) * b


@step("add")
def add(context: Context, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b


@step("scale")
def scale(context: Context, x: torch.Tensor, *, factor: float) -> torch.Tensor:
    return x * factor


@step("layer_norm")
def layer_norm(
    context: Context, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, *, eps: float
) -> torch.Tensor:
    return context.store(functional.layer_norm(x.float(), gamma.shape, gamma, beta, eps))


@step("add_layer_norm")
def add_layer_norm(
    context: Context, x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, *, eps: float
) -> torch.Tensor:
    return layer_norm(context, x.float() + residual.float(), gamma, beta, eps=eps)


@step("rms_norm")
def rms_norm(context: Context, x: torch.Tensor, gamma: torch.Tensor, *, eps: float) -> torch.Tensor:
    wide = x.float()
    return context.store(wide * torch.rsqrt((wide * wide).mean(dim=1, keepdim=True) + eps) * gamma)


@step("normalize")
def normalize(context: Context, x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return context.store(wide / wide.square().sum(dim=1, keepdim=True).sqrt().clamp(min=1e-12))


@step("concat")
def concat(context: Context, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None) -> torch.Tensor:
    return torch.cat([a, b, *(() if c is None else (c,))], dim=1)
