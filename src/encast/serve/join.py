"""The arrays of runs: joined to the batch that the model sees, and its rows given back to each."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from operator import sub
from typing import Any, Literal

import numpy as np

from encast.batch import Batch, Int32
from encast.errors import InputError
from encast.tasks.session import F32

__all__ = ["Arrays", "RowKind", "join", "spread"]

RowKind = Literal["seqs", "tokens", "selected"]
"""What an output has rows of."""

_Index = np.ndarray[Any, np.dtype[np.intp]]

_allocating = threading.Lock()
"""Two instances that run parts of one run at once must not each allocate its answer: the rows of one would be lost."""


class Arrays:
    """What one run brings and, once rows are there, its answer.

    Raises ``InputError`` for sequences or a ``select`` that cannot be cut into rows. Everything else about the request
    is checked by the model when it runs.
    """

    __slots__ = ("batch", "kind", "lengths", "result", "select")

    def __init__(self, batch: Batch, select: Int32 | None, kind: RowKind) -> None:
        ends = batch.cu_seqlens.tolist()
        lengths = list(map(sub, ends[1:], ends))
        types = batch.token_type_ids
        if not lengths or ends[0] != 0 or ends[-1] != batch.tokens or min(lengths) < 1:
            raise InputError(
                f"cu_seqlens must rise from 0 to the number of tokens ({batch.tokens}), every sequence with at least "
                "one token"
            )
        if types is not None and types.shape != batch.token_ids.shape:
            raise InputError(f"there are {types.size} token_type_ids for {batch.tokens} token_ids; give one for each")
        if (select is None) == (kind == "selected"):
            raise InputError("select is needed for outputs with a row for each selected token, and for no others")
        if select is not None and select.size and not 0 <= select.min() <= select.max() < batch.tokens:
            raise InputError(f"select holds an index outside of the run's tokens, 0 to {batch.tokens - 1}")
        self.batch, self.select, self.kind = batch, select, kind
        self.lengths: list[int] = lengths
        self.result: F32 | None = None

    def target(self, rows: Sequence[int]) -> tuple[Int32 | None, _Index]:
        """The part of ``select`` that lies in these sequences, and which rows of the run's answer belong to them."""
        cu_seqlens = self.batch.cu_seqlens
        if self.kind == "seqs":
            return None, np.asarray(rows, np.intp)
        if self.kind == "tokens":
            return None, np.concatenate([np.arange(cu_seqlens[row], cu_seqlens[row + 1]) for row in rows])
        assert self.select is not None
        owner = np.searchsorted(cu_seqlens, self.select, side="right") - 1
        index = np.flatnonzero(np.isin(owner, rows))
        return self.select[index], index


def join(parts: Sequence[tuple[Arrays, Sequence[int]]]) -> tuple[Batch, Int32 | None]:
    """The batch of those sequences of those runs, in that order, and the ``select`` that it needs."""
    if len(parts) == 1 and len(parts[0][1]) == len(parts[0][0].lengths):
        whole = parts[0][0]
        return whole.batch, whole.select
    ids: list[Int32] = []
    types: list[Int32] = []
    lengths: list[int] = []
    selects: list[Int32] = []
    typed = any(arrays.batch.token_type_ids is not None for arrays, _ in parts)
    at = 0
    for arrays, rows in parts:
        batch = arrays.batch
        starts = []
        for begin, end in _stretches(rows):
            first, last = int(batch.cu_seqlens[begin]), int(batch.cu_seqlens[end])
            starts.append((first, last, at))
            ids.append(batch.token_ids[first:last])
            if typed:
                given = batch.token_type_ids
                types.append(np.zeros(last - first, np.int32) if given is None else given[first:last])
            lengths += arrays.lengths[begin:end]
            at += last - first
        if arrays.kind == "selected":
            chosen = arrays.target(rows)[0]
            assert chosen is not None
            moved = chosen.copy()
            for first, last, start in starts:
                moved[(chosen >= first) & (chosen < last)] += start - first
            selects.append(moved)
    cu_seqlens = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    joined = Batch(np.concatenate(ids), cu_seqlens, np.concatenate(types) if typed else None)
    return joined, np.concatenate(selects) if selects else None


def spread(parts: Sequence[tuple[Arrays, Sequence[int]]], answer: F32) -> None:
    """Gives the rows of a joined batch back to its runs; a run that is whole in it gets a view."""
    at = 0
    for arrays, rows in parts:
        whole = len(rows) == len(arrays.lengths)
        if whole:
            count = _rows(arrays)
            arrays.result = answer[at : at + count]
        else:
            index = arrays.target(rows)[1]
            count = len(index)
            with _allocating:
                if arrays.result is None:
                    arrays.result = np.empty((_rows(arrays), answer.shape[1]), np.float32)
            arrays.result[index] = answer[at : at + count]
        at += count


def _rows(arrays: Arrays) -> int:
    if arrays.kind == "seqs":
        return len(arrays.lengths)
    return arrays.batch.tokens if arrays.select is None else len(arrays.select)


def _stretches(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Rising rows as ranges of neighbours."""
    found: list[tuple[int, int]] = []
    for row in rows:
        if found and found[-1][1] == row:
            found[-1] = (found[-1][0], row + 1)
        else:
            found.append((row, row + 1))
    return found
