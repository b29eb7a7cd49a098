"""Buckets for CUDA graphs, with a graph that is a function called again: capturing itself takes a card."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-gpu")
pytest.importorskip("triton", reason="Triton is not installed: make test-gpu")

from models import compiled_graph

from encast.backends.gpu.graphs import MOST_TOKENS, Graphs, bucket_of
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
    assert bucket_of(batch_of(MOST_TOKENS)) == (MOST_TOKENS, 2)
    assert bucket_of(batch_of(MOST_TOKENS, 1)) is None


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


def test_what_goes_by_lengths_or_selects_rows_has_no_graph(tmp_path_factory: pytest.TempPathFactory) -> None:
    gpu = GpuRunnable(compiled_graph("bert-fill_mask", "f32", tmp_path_factory)[1], "torch-cpu")
    gpu._graphs = Graphs(gpu.device, capture=lambda run: run)
    gpu.run("last_hidden_state", batch_of(5))  # PyTorch's attention
    assert len(gpu._graphs) == 0
    assert gpu._programs["logits"].selects
    assert not gpu._programs["last_hidden_state"].selects
