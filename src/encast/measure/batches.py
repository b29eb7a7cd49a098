"""Batches made of some sequences of another one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from encast.batch import Batch
from encast.errors import InputError

__all__ = ["pick", "portions"]


def pick(batch: Batch, sequences: Sequence[int]) -> Batch:
    """The sequences of these indices, in this order, as a batch of their own."""
    starts, ends = batch.cu_seqlens[:-1], batch.cu_seqlens[1:]
    rows = np.concatenate([np.arange(starts[index], ends[index]) for index in sequences])
    cu_seqlens = np.zeros(len(sequences) + 1, np.int32)
    np.cumsum([ends[index] - starts[index] for index in sequences], out=cu_seqlens[1:])
    types = batch.token_type_ids
    return Batch(
        np.ascontiguousarray(batch.token_ids[rows]),
        cu_seqlens,
        None if types is None else np.ascontiguousarray(types[rows]),
    )


def portions(batch: Batch, count: int) -> list[Batch]:
    """The batch in ``count`` parts of whole sequences, whose numbers differ by one at most. Raises ``InputError``."""
    if batch.seqs < count:
        raise InputError(f"a batch of {batch.seqs} sequences cannot be divided over {count} instances")
    ends = [round(part * batch.seqs / count) for part in range(count + 1)]
    return [pick(batch, range(begin, end)) for begin, end in itertools.pairwise(ends)]
