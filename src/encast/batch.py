"""The packed batch: the only form in which texts reach a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from encast.errors import InputError

__all__ = ["Batch"]

Int32 = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class Batch:
    """Sequences one after the other, without padding.

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
        if token_type_ids is not None and [len(s) for s in token_type_ids] != [len(s) for s in token_ids]:
            raise InputError(
                "token_type_ids and token_ids differ in their lengths; give one token type for every token"
            )
        lengths = [len(sequence) for sequence in token_ids]
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


def _flat(sequences: Sequence[Sequence[int]], name: str) -> Int32:
    flat = [item for sequence in sequences for item in sequence]
    array = np.asarray(flat if flat else np.empty(0, np.int32))
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise InputError(f"{name} holds something other than integers")
    if array.size and (array.min() < -(2**31) or array.max() >= 2**31):
        raise InputError(f"{name} holds an integer outside of int32")
    return array.astype(np.int32)
