"""Buckets for CUDA graphs, with a graph that is a function called again: capturing itself takes a card."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-gpu")
pytest.importorskip("triton", reason="Triton is not installed: make test-gpu")

from models import compiled_graph

from encast.backends.gpu.graphs import MOST_TOKENS, Capture, Graphs, bucket_of
from encast.backends.gpu.kernels import INTERPRETED
from encast.backends.gpu.runnable import GpuRunnable
from encast.batch import Batch


def batch_of(*lengths: int, start: int = 3) -> Batch:
    return Batch.of([[(start + place) % 50 for place in range(length)] for length in lengths])


def test_buckets() -> None:
    assert bucket_of(batch_of(1)) == (32, 2)
    assert bucket_of(batch_of(32)) == (32, 2)
    assert bucket_of(batch_of(30, 3)) == (64, 4)
    assert bucket_of(batch_of(*[1] * 7)) == (32, 8)
    assert bucket_of(batch_of(*[1] * 8)) == (32, 16)
    assert bucket_of(batch_of(513)) == (576, 2)
    assert bucket_of(batch_of(1024)) == (1024, 2)
    assert bucket_of(batch_of(1025)) == (1152, 2)
    assert bucket_of(batch_of(MOST_TOKENS)) == (MOST_TOKENS, 2)
    assert bucket_of(batch_of(MOST_TOKENS, 1)) is None
    for tokens in range(257, MOST_TOKENS, 37):
        bucket, _ = bucket_of(batch_of(tokens)) or (0, 0)
        assert tokens <= bucket < 1.126 * tokens


@pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is 0")
@pytest.mark.parametrize(
    ("name", "output"), [("roberta-pad-5", "last_hidden_state"), ("mpnet-embed-every-mode", "embedding")]
)
def test_a_bucket_answers_every_batch_of_it(name: str, output: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    gpu = GpuRunnable(compiled_graph(name, "f32", tmp_path_factory)[1], "torch-cpu", kernels="triton")
    # Small before large and after, so that what is left of another batch would show.
    batches = [batch_of(2, 5), batch_of(9, 1, 12, start=7), batch_of(40, 3), batch_of(1), batch_of(20, start=11)]
    wanted = [gpu.run(output, batch) for batch in batches]
    gpu._graphs = Graphs(gpu.device, capture=lambda run: run)
    for batch, rows in zip(batches, wanted, strict=True):
        np.testing.assert_allclose(gpu.run(output, batch), rows, rtol=1e-5, atol=1e-5)
    assert len(gpu._graphs) == 3


@pytest.mark.parametrize(("limit", "value"), [("_MOST_GRAPHS", 2), ("_MOST_ANSWERS", 2 * 64 * 4)])
def test_graphs_that_were_not_used_for_longest_go(limit: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"encast.backends.gpu.graphs.{limit}", value)
    ids: Any = SimpleNamespace(by_length=False, selects=False, run=lambda packed: packed.token_ids[:, None].float())
    captured = []

    def capture(run: Any) -> Any:
        captured.append(run)
        return run

    graphs = Graphs(torch.device("cpu"), capture)
    first, second, third = batch_of(33), batch_of(30, 5), batch_of(20, 20, 3, 1)  # all of 64 tokens
    for batch, count in ((first, 1), (second, 2), (first, 2), (third, 3), (first, 3), (second, 4)):
        made = graphs.run("ids", ids, batch, batch.tokens)
        assert made is not None
        assert made[:, 0].tolist() == batch.token_ids.tolist()
        assert (len(captured), len(graphs)) == (count, min(count, 2))


def test_what_goes_by_lengths_or_selects_rows_has_no_graph(tmp_path_factory: pytest.TempPathFactory) -> None:
    gpu = GpuRunnable(compiled_graph("bert-fill_mask", "f32", tmp_path_factory)[1], "torch-cpu")
    gpu._graphs = Graphs(gpu.device, capture=lambda run: run)
    gpu.run("last_hidden_state", batch_of(5))  # PyTorch's attention
    assert len(gpu._graphs) == 0
    assert gpu._programs["logits"].selects
    assert not gpu._programs["last_hidden_state"].selects


@pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is 0")
def test_a_bucket_that_cannot_be_captured_runs_without(tmp_path_factory: pytest.TempPathFactory) -> None:
    gpu = GpuRunnable(compiled_graph("bert-features", "f32", tmp_path_factory)[1], "torch-cpu", kernels="triton")
    small, large = batch_of(3, 5), batch_of(40)
    wanted = gpu.run("last_hidden_state", small)
    tried = []

    def capture(run: Any) -> Any:
        tried.append(run)
        if len(tried) == 1:
            raise RuntimeError("CUDA error: operation not permitted\nmore")
        return run

    gpu._graphs = Graphs(gpu.device, capture)
    for _ in range(3):
        np.testing.assert_array_equal(gpu.run("last_hidden_state", small), wanted)
    assert len(tried) == 1
    assert gpu.report()[-1] == (
        "without a CUDA graph: last_hidden_state of up to 32 tokens in fewer than 4 texts "
        "(CUDA error: operation not permitted)"
    )
    gpu.run("last_hidden_state", large)
    assert (len(tried), len(gpu._graphs)) == (2, 1)


def test_a_bucket_for_which_memory_was_lacking_is_captured_later(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A reload holds two models for a while."""
    gpu = GpuRunnable(compiled_graph("bert-features", "f32", tmp_path_factory)[1], "torch-cpu", kernels="triton")
    wanted, tried = gpu.run("last_hidden_state", batch_of(3, 5)), []

    def capture(run: Any) -> Any:
        tried.append(run)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.\nmore")
        return run

    gpu._graphs = Graphs(gpu.device, capture)
    for made in (0, 1, 1):
        np.testing.assert_array_equal(gpu.run("last_hidden_state", batch_of(3, 5)), wanted)
        assert len(gpu._graphs) == made
    assert len(tried) == 2
    assert "without a CUDA graph" not in gpu.report()[-1]


class FakeCuda:
    """Of ``torch.cuda`` what captures ask for; it counts those under way, as PyTorch allows one in a process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.under_way, self.most, self.pools, self.fails = 0, 0, 0, False
        self.captured: list[tuple[Any, Any]] = []
        self.warmed: list[Any] = []
        for name in ("stream", "graph", "graph_pool_handle"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_stream=lambda other: None))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(wait_stream=lambda other: None))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))

    def stream(self, stream: Any) -> Any:
        self.warmed.append(stream)
        return nullcontext()

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    @contextmanager
    def graph(self, graph: Any, pool: Any, stream: Any, *, capture_error_mode: str) -> Any:
        assert capture_error_mode == "thread_local"
        self.captured.append((pool, stream))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        time.sleep(0.02)
        yield
        self.under_way -= 1
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")


def test_models_are_captured_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each on a stream of its own, the run before on another, and all graphs of one in one pool."""
    cuda = FakeCuda(monkeypatch)
    captures = [Capture(torch.device("cuda", 0)) for _ in range(4)]
    threads = [threading.Thread(target=one, args=(lambda: torch.ones(1),)) for one in captures * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert cuda.most == 1
    assert len(cuda.captured) == 8
    assert {pool for pool, _ in cuda.captured} == {1, 2, 3, 4}
    assert len({id(stream) for stream in cuda.warmed}) == 4
    assert {id(stream) for stream in cuda.warmed}.isdisjoint(id(stream) for _, stream in cuda.captured)
    assert len({(pool, id(stream)) for pool, stream in cuda.captured}) == 4


def test_a_pool_whose_capture_failed_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    capture = Capture(torch.device("cuda", 0))
    cuda.fails = True
    with pytest.raises(RuntimeError, match="not permitted"):
        capture(lambda: torch.ones(1))
    cuda.fails = False
    assert capture(lambda: torch.ones(1))().item() == 1
    assert [pool for pool, _ in cuda.captured] == [1, 2]
