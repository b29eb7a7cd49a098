"""Accuracy at 1 and MRR at 10 of a retrieval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from encast.errors import InputError

__all__ = ["first_ranks", "retrieval_scores"]


def first_ranks(scores: ArrayLike, relevant: Sequence[Sequence[int]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """``i64[n]``: for every query the rank, from 1, of the first relevant document when the highest score comes first.

    ``scores``: ``f[n, documents]``; ``relevant``: for every query the documents that answer it, at least one. Of equal
    scores the documents that are not relevant come first, so that a model that gives one score to all ranks last.
    Raises ``InputError`` when the numbers of queries differ.
    """
    table = np.asarray(scores)
    if table.ndim != 2 or len(table) != len(relevant):
        raise InputError(f"the scores are {table.shape}, for {len(relevant)} queries; a row of scores each is needed")
    ranks = np.empty(len(table), np.int64)
    for index, documents in enumerate(relevant):
        row, own = table[index], table[index, list(set(documents))]
        ahead = np.count_nonzero(row >= own.max()) - np.count_nonzero(own == own.max())
        ranks[index] = 1 + ahead
    return ranks


def retrieval_scores(ranks: ArrayLike) -> dict[str, float]:
    """``accuracy_at_1``: the share of queries whose first rank is 1; ``mrr_at_10``: the mean of 1 / rank, 0 beyond 10.

    As sentence-transformers' ``InformationRetrievalEvaluator`` has them. ``ranks``: see ``first_ranks``. Raises
    ``InputError`` when there are none.
    """
    first = np.asarray(ranks, np.float64)
    if first.ndim != 1 or first.size == 0:
        raise InputError(f"ranks must be a vector of at least one, not {first.shape}")
    return {
        "accuracy_at_1": float(np.mean(first == 1)),
        "mrr_at_10": float(np.mean(np.where(first <= 10, 1.0 / first, 0.0))),
    }
