"""The packed batch: the only form in which texts reach a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from encast.errors import InputError

__all__ = ["Batch", "Int32", "int32_vector"]

Int32 = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class Batch:
    """Sequences one after the other, without padding. Nothing is checked here: the backend that runs it does so.

    ``token_ids: i32[tokens]``; ``cu_seqlens: i32[n+1]``, rising from 0 to ``tokens``;
    ``token_type_ids: i32[tokens]`` or None (all zero).
    """

    token_ids: Int32
    cu_seqlens: Int32
    token_type_ids: Int32 | None = None

    @property
    def tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def seqs(self) -> int:
        return int(self.cu_seqlens.shape[0]) - 1

    @staticmethod
    def of(token_ids: Sequence[Sequence[int]], token_type_ids: Sequence[Sequence[int]] | None = None) -> Batch:
        """Packs lists of ids; raises ``InputError`` on empty sequences, non-integers and unequal lengths."""
        lengths = _lengths(token_ids, "token_ids")
        if token_type_ids is not None and _lengths(token_type_ids, "token_type_ids") != lengths:
            raise InputError(
                "token_type_ids and token_ids differ in their lengths; give one token type for every token"
            )
        for index, length in enumerate(lengths):
            if length == 0:
                raise InputError(f"sequence {index} is empty; every sequence needs at least one token id")
        cu_seqlens = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=cu_seqlens[1:])
        if cu_seqlens[-1] > np.iinfo(np.int32).max:
            raise InputError(f"{cu_seqlens[-1]} tokens do not fit one batch; split it below 2^31 tokens")
        return Batch(
            _flat(token_ids, "token_ids"),
            cu_seqlens.astype(np.int32),
            None if token_type_ids is None else _flat(token_type_ids, "token_type_ids"),
        )


def int32_vector(name: str, values: Any) -> Int32:
    """Integers as ``i32[n]``: contiguous int32 arrays as they are, others converted; raises ``InputError``."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):  # rows of unequal lengths
        raise InputError(f"{name} is no vector of integers, but nested; a vector of int32 is needed") from None
    if array.ndim == 1 and array.size == 0:
        return np.empty(0, np.int32)
    fits = array.dtype.kind in "iu" and array.ndim == 1
    if not fits or array.min() < np.iinfo(np.int32).min or array.max() > np.iinfo(np.int32).max:
        raise InputError(f"{name} is {array.dtype}{list(array.shape)}; a vector of int32 is needed")
    return np.ascontiguousarray(array, np.int32)


def _lengths(sequences: Sequence[Sequence[int]], name: str) -> list[int]:
    try:
        return [len(sequence) for sequence in sequences]
    except TypeError:
        raise InputError(f"{name} holds no sequences; a list of lists of integers is needed, [ids] for one") from None


def _flat(sequences: Sequence[Sequence[int]], name: str) -> Int32:
    try:
        return int32_vector(name, list(chain.from_iterable(sequences)))
    except InputError:
        raise InputError(f"{name} holds something other than integers that fit int32") from None
