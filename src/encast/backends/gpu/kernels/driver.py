"""The part of Triton that launches kernels."""

from __future__ import annotations

import triton

__all__ = ["start_driver"]


def start_driver() -> None:
    """Builds it, in C, as the first launch would; raises whatever that meets: no compiler, no Python.h, no driver."""
    _ = triton.runtime.driver.active.utils
