"""How alike two sets of vectors are."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from encast.errors import InputError

__all__ = ["cosines"]


def cosines(a: ArrayLike, b: ArrayLike) -> np.ndarray[Any, np.dtype[np.float64]]:
    """``f64[n]``: the cosine of every row of ``a`` with the same row of ``b``, in float64; 0 where a row is zero."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if x.shape != y.shape or x.ndim != 2:
        raise InputError(f"cosines need two matrices of one shape, not {x.shape} and {y.shape}")
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    found: np.ndarray[Any, np.dtype[np.float64]] = np.einsum("ij,ij->i", x, y) / np.where(norms > 0, norms, np.inf)
    return found
