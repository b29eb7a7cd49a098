"""Runs joined to batches and spread again, against a model whose rows say where they come from."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import encast.serve.join as module
from encast.batch import Batch, Int32
from encast.errors import InputError
from encast.serve.join import Arrays, RowKind, join, spread

F32 = np.ndarray[Any, np.dtype[np.float32]]


def run(batch: Batch, select: Int32 | None, kind: RowKind) -> F32:
    """Rows that depend on all of their own sequence and on nothing else."""
    rows = []
    for begin, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        types = 0 if batch.token_type_ids is None else int(batch.token_type_ids[begin:end].sum())
        total = int(batch.token_ids[begin:end].sum())
        rows += [(total, types, int(batch.token_ids[at]), at - begin) for at in range(begin, end)]
    tokens = np.array(rows, np.float32)
    if kind == "seqs":
        return tokens[batch.cu_seqlens[:-1]][:, :2]
    return tokens if select is None else tokens[select]


@given(st.data())
def test_every_run_gets_what_it_would_get_alone(data: st.DataObject) -> None:
    kind = cast(RowKind, data.draw(st.sampled_from(["seqs", "tokens", "selected"])))
    runs, waiting = [], []
    for index in range(data.draw(st.integers(1, 4))):
        lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
        tokens = sum(lengths)
        ids = [data.draw(st.integers(0, 99)) for _ in range(tokens)]
        types = np.arange(tokens, dtype=np.int32) % 2 if data.draw(st.booleans()) else None
        select = None
        if kind == "selected":
            select = np.array(data.draw(st.lists(st.integers(0, tokens - 1), max_size=6)), np.int32)
        cu_seqlens = np.array([0, *np.cumsum(lengths)], np.int32)
        runs.append(Arrays(Batch(np.array(ids, np.int32), cu_seqlens, types), select, kind))
        waiting += [(index, row) for row in range(len(lengths))]
    waiting = data.draw(st.permutations(waiting))
    while waiting:
        size = data.draw(st.integers(1, len(waiting)))
        rows: dict[int, list[int]] = {}
        for index, row in sorted(waiting[:size]):
            rows.setdefault(index, []).append(row)
        waiting = waiting[size:]
        parts = [(runs[index], own) for index, own in rows.items()]
        batch, select = join(parts)
        spread(parts, run(batch, select, kind))
    for arrays in runs:
        assert arrays.result is not None
        assert np.array_equal(arrays.result, run(arrays.batch, arrays.select, kind))


def test_a_run_that_is_a_batch_is_not_copied() -> None:
    whole = Arrays(Batch.of([[1, 2], [3]]), None, "tokens")
    batch, _ = join([(whole, [0, 1])])
    assert batch is whole.batch
    rows = run(batch, None, "tokens")
    spread([(whole, [0, 1])], rows)
    assert whole.result is not None
    assert whole.result.base is rows


def vector(*values: int) -> Int32:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("batch", "select", "kind", "message"),
    [
        (Batch(vector(1, 2), vector(0, 1)), None, "seqs", "must rise from 0 to the number of tokens"),
        (Batch(vector(1, 2), vector(1, 2)), None, "seqs", "must rise"),
        (Batch(vector(1, 2), vector(0, 2, 2)), None, "seqs", "must rise"),
        (Batch(vector(1, 2), vector(0, 5, 2)), None, "seqs", "must rise"),
        (Batch(vector(), vector(0)), None, "seqs", "must rise"),
        (Batch(vector(), vector()), None, "seqs", "must rise"),
        (Batch(vector(1, 2), vector(0, 2), vector(0)), None, "seqs", "1 token_type_ids for 2"),
        (Batch(vector(1, 2), vector(0, 2)), vector(0), "seqs", "select is needed for"),
        (Batch(vector(1, 2), vector(0, 2)), None, "selected", "select is needed for"),
        (Batch(vector(1, 2), vector(0, 2)), vector(2), "selected", "outside of the run's tokens, 0 to 1"),
        (Batch(vector(1, 2), vector(0, 2)), vector(-1), "selected", "outside"),
    ],
)
def test_what_cannot_be_cut_into_rows(batch: Batch, select: Int32 | None, kind: RowKind, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Arrays(batch, select, kind)


def test_two_instances_at_once_give_one_run_all_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = Arrays(Batch.of([[1], [2]]), None, "seqs")
    both = threading.Barrier(2)

    def rows(given: Arrays) -> int:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # the other thread is here too, if it can be
        return len(given.lengths)

    monkeypatch.setattr(module, "_rows", rows)
    threads = [
        threading.Thread(target=spread, args=([(arrays, [row])], np.full((1, 1), row + 7, np.float32)))
        for row in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert arrays.result is not None
    assert arrays.result.ravel().tolist() == [7, 8]
