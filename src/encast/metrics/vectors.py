"""How alike two sets of vectors, or of distributions, are."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from encast.errors import InputError

__all__ = ["cosines", "kl_divergence"]


def cosines(a: ArrayLike, b: ArrayLike) -> np.ndarray[Any, np.dtype[np.float64]]:
    """``f64[n]``: the cosine of every row of ``a`` with the same row of ``b``, in float64; 0 where a row is zero."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if x.shape != y.shape or x.ndim != 2:
        raise InputError(f"cosines need two matrices of one shape, not {x.shape} and {y.shape}")
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    found: np.ndarray[Any, np.dtype[np.float64]] = np.einsum("ij,ij->i", x, y) / np.where(norms > 0, norms, np.inf)
    return found


def kl_divergence(p: ArrayLike, q: ArrayLike) -> float:
    """The mean over rows of ``sum p log(p / q)``, in nats: Kullback and Leibler's divergence ("On information and
    sufficiency", 1951) of the distributions in the rows of ``q`` from those of ``p``, in float64.

    A probability of ``q`` below the smallest normal number counts as that, so that the result is finite.
    """
    x, y = np.asarray(p, np.float64), np.asarray(q, np.float64)
    if x.shape != y.shape or x.ndim != 2 or not len(x):
        raise InputError(f"kl_divergence needs two matrices of one shape, with rows, not {x.shape} and {y.shape}")
    tiny = np.finfo(np.float64).tiny
    terms = x * (np.log(np.maximum(x, tiny)) - np.log(np.maximum(y, tiny)))
    return max(float(np.mean(np.sum(terms, axis=1))), 0.0)  # equal ones round to either side of 0
