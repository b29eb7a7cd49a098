"""The engine's own duties: ids in, packing, splitting, refusing, closing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import HIDDEN, VOCAB, fake_engine

from encast.engine import load
from encast.errors import InputError


def _runnable(engine: Any) -> Any:
    return engine.runnable


def test_forward_gives_every_sequence_its_rows_and_bounds_a_run_by_tokens() -> None:
    engine = fake_engine("features", batch_tokens=8)
    sequences = [[1, 2, 3], [4] * 5, [5], [6] * 20, [7, 8]]
    states = engine.forward(sequences)
    assert [state.shape for state in states] == [(len(sequence), HIDDEN) for sequence in sequences]
    for state, sequence in zip(states, sequences, strict=True):
        np.testing.assert_array_equal(state[:, 0], sequence)
    assert [batch.tokens for batch in _runnable(engine).batches] == [8, 1, 20, 2]
    assert all(batch.cu_seqlens[0] == 0 for batch in _runnable(engine).batches)


def test_forward_passes_token_types_along_when_it_splits() -> None:
    engine = fake_engine("features", batch_tokens=3)
    engine.forward([[1, 2], [3, 4]], [[0, 1], [1, 0]])
    assert [batch.token_type_ids.tolist() for batch in _runnable(engine).batches] == [[0, 1], [1, 0]]


def test_forward_packed_reads_int32_arrays_in_place() -> None:
    engine = fake_engine("features")
    ids, cu, types = np.array([1, 2, 3], np.int32), np.array([0, 1, 3], np.int32), np.array([0, 1, 1], np.int32)
    engine.forward_packed(ids, cu, types)
    batch = _runnable(engine).batches[0]
    assert batch.token_ids is ids
    assert batch.cu_seqlens is cu
    assert batch.token_type_ids is types


@pytest.mark.parametrize("ids", [[1, 2, 3], np.array([1, 2, 3], np.int64), np.array([1, 0, 2, 0, 3, 0], np.int32)[::2]])
def test_forward_packed_converts_other_integers(ids: Any) -> None:
    engine = fake_engine("features")
    np.testing.assert_array_equal(engine.forward_packed(ids, [0, 3])[:, 0], [1, 2, 3])
    assert _runnable(engine).batches[0].token_ids.flags.c_contiguous


def test_nothing_in_is_nothing_out() -> None:
    engine = fake_engine("embed", dim=7)
    assert engine.forward([]) == []
    packed = engine.forward_packed([], [0])
    assert packed.shape == (0, HIDDEN)
    assert packed.dtype == np.float32
    vectors = engine.embed([])
    assert vectors.shape == (0, 7)
    assert vectors.dtype == np.float32
    assert fake_engine("classify").classify([]) == []
    assert fake_engine("tag").tag([]) == []
    assert fake_engine("answer").answer([], []) == []
    assert fake_engine("fill_mask").fill_mask([]) == []
    assert engine.rerank("query", []) == []
    assert _runnable(engine).batches == []


@pytest.mark.parametrize(
    ("ids", "cu", "types", "message"),
    [
        ([0, len(VOCAB)], [0, 2], None, str(len(VOCAB) - 1)),
        ([0, -1], [0, 2], None, "token_ids"),
        ([0, 1], [0, 2], [0, 2], "token_type_ids"),
        ([0, 1], [0, 2], [0], "token_type_ids"),
        ([0, 1], [0, 1], None, "cu_seqlens"),
        ([0, 1], [1, 2], None, "cu_seqlens"),
        ([0, 1], [0, 0, 2], None, "at least one token"),
        ([0, 1], [0, 2, 1, 2], None, "cu_seqlens"),
        ([0, 1], [], None, "cu_seqlens"),
        ([0.0, 1.0], [0, 2], None, "token_ids"),
        ([True, False], [0, 2], None, "token_ids"),
        ([2**40, 1], [0, 2], None, "token_ids"),
        ([[0], [1]], [0, 2], None, "token_ids"),
        ([0] * 33, [0, 33], None, "at most 32"),
        (np.empty((0, 3), np.int64), [0], None, "token_ids is int64"),
        ([[0], [1, 2]], [0, 2], None, "token_ids is no vector"),
        (5, [0, 1], None, "token_ids is int64"),
        (None, [0, 1], None, "token_ids is object"),
    ],
)
def test_forward_packed_refuses(ids: Any, cu: Any, types: Any, message: str) -> None:
    engine = fake_engine("features")
    with pytest.raises(InputError, match=message):
        engine.forward_packed(ids, cu, types)
    assert _runnable(engine).batches == []


@pytest.mark.parametrize(
    ("ids", "types", "message"),
    [
        ([[1], [len(VOCAB)]], None, "1"),
        ([[1], []], None, "sequence 1 is empty"),
        ([[1], [0] * 33], None, "sequence 1 has 33 tokens"),
        ([[1.5]], None, "integers"),
        ([["a"]], None, "integers"),
        ([[1, 2]], [[0]], "token_type_ids"),
        ([1, 2], None, "token_ids holds no sequences"),
        (None, None, "token_ids holds no sequences"),
        ([[1]], [None], "token_type_ids holds no sequences"),
        ([[[1], [2, 3]]], None, "integers"),
        ([[2**31]], None, "fit int32"),
    ],
)
def test_forward_refuses_before_anything_runs(ids: Any, types: Any, message: str) -> None:
    engine = fake_engine("features", batch_tokens=1)
    with pytest.raises(InputError, match=message):
        engine.forward(ids, types)
    assert _runnable(engine).batches == []


def test_a_missing_head_is_named_with_what_to_do() -> None:
    engine = fake_engine("tag")
    calls = {
        "embed": lambda: engine.embed([]),
        "classify": lambda: engine.classify([]),
        "answer": lambda: engine.answer("a", "b"),
        "fill_mask": lambda: engine.fill_mask([]),
    }
    for task, call in calls.items():
        with pytest.raises(InputError, match=f"compiled for 'tag'.*--task {task}"):
            call()
    with pytest.raises(InputError, match="'classify' or 'embed'"):
        engine.rerank("a", ["b"])
    with pytest.raises(InputError, match="'tag'"):
        fake_engine("embed").tag(["a"])


def test_a_closed_engine_says_so_and_closes_its_backend_once() -> None:
    with fake_engine("embed") as engine:
        runnable = _runnable(engine)
    engine.close()
    assert runnable.closed == 1
    for call in (lambda: engine.embed(["a"]), lambda: engine.forward([[1]])):
        with pytest.raises(InputError, match="closed"):
            call()


def test_threads_may_share_an_engine() -> None:
    engine = fake_engine("embed", lambda ids: [ids.sum(), len(ids), ids[1], 0], batch_tokens=16)
    texts = [" ".join(["cat", "sat", "mat"][: 1 + i % 3]) for i in range(60)]
    alone = engine.embed(texts)
    results: list[Any] = [None] * 6

    def work(at: int) -> None:
        results[at] = engine.embed(texts)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        np.testing.assert_array_equal(result, alone)


@pytest.mark.parametrize("wrong", [0, -1, 2**31, 1.5, "5", True, None], ids=repr)
def test_batch_tokens_must_be_a_count(wrong: Any) -> None:
    with pytest.raises(InputError, match=r"batch_tokens is .* a whole number from 1 to"):
        fake_engine("embed", batch_tokens=wrong)


def test_the_largest_run_is_one_run() -> None:
    engine = fake_engine("features", batch_tokens=2**31 - 1)
    engine.forward([[1, 2]] * 3)
    assert [batch.seqs for batch in _runnable(engine).batches] == [3]


@pytest.mark.parametrize(
    "options", [{"threads": 2**40}, {"threads": True}, {"instances": 10**6}, {"threads": 1.5}], ids=str
)
def test_counts_of_threads_and_instances(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a whole number from 1 to 4096"):
        load(tmp_path, **options)
