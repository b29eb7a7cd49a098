"""What every step is given, and the table of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from encast.backends.gpu.packed import Packed

__all__ = ["STEPS", "Context", "Step", "step"]


class Step(Protocol):
    """``by_length``: it goes by the lengths of the batch on the host, so no CUDA graph holds for another batch."""

    by_length: bool
    __module__: str

    def __call__(self, context: Context, *operands: Any, **attrs: Any) -> Any: ...


STEPS: dict[str, Step] = {}
"""By op."""


@dataclass(frozen=True)
class Context:
    """``stored``: the dtype of floating values between steps: f32, f16 or bf16. ``half_sums``: whether products of f16
    with weights are summed in f16."""

    batch: Packed
    stored: torch.dtype
    half_sums: bool = False

    def store(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.stored)


def step(*names: str, by_length: bool = False, table: dict[str, Step] = STEPS) -> Callable[[Any], Any]:
    """Enters a function for these ops; see ``Step``."""

    def register(function: Any) -> Any:
        function.by_length = by_length
        table.update(dict.fromkeys(names, function))
        return function

    return register
