"""What a plan is made for: the arithmetic classes that the machine's kernels offer, and the chunk size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from encast.errors import ResourceError

__all__ = ["DEFAULT_CHUNK_TOKENS", "GEMM_CLASSES", "Target"]

DEFAULT_CHUNK_TOKENS = 1024
"""Tokens that go through all layers together: enough to keep weights from being the bound, few enough
that the activations of one step stay in a last-level cache of some tens of MB."""

GEMM_CLASSES = {
    "f32": ("gemm_f32", ("f32",)),
    "q8": ("gemm_q8s8", ("s8",)),
    "bf16": ("gemm_bf16", ("bf16_tile", "bf16_dp", "bf16_fma")),
}
"""For each operand dtype the op of the catalog and its arithmetic classes, fastest first."""


@dataclass(frozen=True)
class Target:
    """``gemm``: operand dtype to arithmetic class. ``chunk_tokens``: raised to the model's longest text."""

    gemm: dict[str, str]
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS

    @staticmethod
    def here(chunk_tokens: int | None = None) -> Target:
        """This machine, at the ISA level that ``ENCAST_ISA`` allows; raises ``ResourceError``."""
        from encast import _core

        return Target.choose(_core.select_kernel, chunk_tokens)

    @staticmethod
    def choose(select_kernel: Callable[[str, str, int], str | None], chunk_tokens: int | None = None) -> Target:
        """The fastest class of every operand dtype for which ``select_kernel(op, class, rows)`` finds a kernel."""
        gemm = {}
        for dtype, (op, classes) in GEMM_CLASSES.items():
            usable = [name for name in classes if select_kernel(op, name, 1) is not None]
            if not usable:
                raise ResourceError(f"no kernel of {op} may run on this machine; {classes} exist, see: encast kernels")
            gemm[dtype] = usable[0]
        return Target(gemm, DEFAULT_CHUNK_TOKENS if chunk_tokens is None else chunk_tokens)
