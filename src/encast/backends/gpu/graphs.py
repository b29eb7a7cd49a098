"""CUDA graphs of small batches, whose time is that of launching kernels: one for a bucket of tokens and sequences.

A graph runs on the memory that it was captured with. So a batch is padded to its bucket, its numbers are copied into
the bucket's, and the rows of the answer that are real are copied out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from encast.backends.gpu.device import first_line
from encast.backends.gpu.packed import Packed, pack, refill
from encast.backends.gpu.program import Program
from encast.batch import Batch

__all__ = ["MOST_TOKENS", "Capture", "Graphs", "bucket_of"]

LEAST_TOKENS, MOST_TOKENS = 32, 1024
"""Tokens of the smallest bucket, and of the largest: with more a card is busy longer than launches take."""

Replay = Callable[[], torch.Tensor]

_CAPTURING = threading.Lock()
"""PyTorch captures one graph at a time in a process, whatever the model."""


def bucket_of(batch: Batch) -> tuple[int, int] | None:
    """Tokens and sequences of the bucket, powers of two, one sequence at least empty; None for a larger batch."""
    if batch.tokens > MOST_TOKENS:
        return None
    return max(LEAST_TOKENS, 1 << (batch.tokens - 1).bit_length()), 1 << batch.seqs.bit_length()


class Capture:
    """Makes the CUDA graphs of one model. They share one pool of memory, so that it is as large as the largest of them
    needs: no two run at a time, and an answer is copied out before the next graph runs.
    """

    def __init__(self, device: torch.device) -> None:
        # PyTorch's own stream for captures is one for all models and all threads.
        self._stream: Any = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, run: Replay) -> Replay:
        """``run`` as a CUDA graph: each call makes its answer anew, in the same memory."""
        with _CAPTURING:
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                run()  # compiles kernels and fills caches, which no graph may do
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            try:
                # Other models' threads may go on.
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    made = run()
            except BaseException:
                # PyTorch may count the broken pool as still being recorded to, and refuses it from then on.
                self._pool = torch.cuda.graph_pool_handle()
                raise

        def replay() -> torch.Tensor:
            graph.replay()
            return made

        return replay


class Graphs:
    """The graphs of one model, made when a bucket is first asked for. One thread at a time may use them."""

    def __init__(self, device: torch.device, capture: Callable[[Replay], Replay]) -> None:
        self._device, self._capture = device, capture
        self._made: dict[tuple[str, int, int], tuple[Packed, Replay]] = {}
        self._failed: dict[tuple[str, int, int], str] = {}

    def __len__(self) -> int:
        return len(self._made)

    def report(self) -> list[str]:
        """A line for each bucket that has no graph because it could not be captured."""
        return [
            f"without a CUDA graph: {output} of up to {tokens} tokens in fewer than {seqs} texts ({why})"
            for (output, tokens, seqs), why in [*self._failed.items()]
        ]

    def run(self, output: str, program: Program, batch: Batch, rows: int) -> torch.Tensor | None:
        """The first ``rows`` rows of the answer, f32 on the host; None for a batch without a bucket or whose graph
        could not be captured, and for a program that goes by lengths or reads rows that were selected."""
        bucket = bucket_of(batch)
        if bucket is None or program.by_length or program.selects:
            return None
        key = output, *bucket
        if key in self._failed:
            return None
        if key not in self._made:
            tokens, seqs = bucket
            try:
                packed = pack(batch, None, self._device, tokens=tokens, seqs=seqs)
                self._made[key] = packed, self._capture(lambda: program.run(packed))
            except RuntimeError as error:  # out of memory too: without a graph less is held
                self._failed[key] = first_line(error)
                return None
        packed, replay = self._made[key]
        refill(packed, batch)
        return replay()[:rows].float().cpu()
