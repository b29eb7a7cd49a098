"""CUDA graphs of batches, whose time is that of launching kernels otherwise: one for a bucket of tokens and sequences.

A graph runs on the memory that it was captured with. So a batch is padded to its bucket, its numbers are copied into
the bucket's, and the rows of the answer that are real are copied out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from encast.backends.gpu.device import first_line
from encast.backends.gpu.packed import Packed, pack, refill, to_host
from encast.backends.gpu.program import Program
from encast.batch import Batch

__all__ = ["MOST_TOKENS", "Capture", "Graphs", "bucket", "bucket_of"]

LEAST_TOKENS, MOST_TOKENS = 32, 32768
"""Tokens of the smallest bucket, and of the largest: with more a card is busy longer than launches take."""

_MOST_GRAPHS, _MOST_ANSWERS = 256, 1 << 30
"""Graphs that are kept, and bytes of their answers; those that were not used for longest go first."""

Replay = Callable[[], torch.Tensor]

_CAPTURING = threading.Lock()
"""PyTorch captures one graph at a time in a process, whatever the model."""


def bucket_of(batch: Batch) -> tuple[int, int] | None:
    """Tokens and sequences of the bucket, one sequence at least empty; None for a larger batch. There are eight sizes
    from a power of two of tokens to the next, so that from 256 on at most an eighth is padding, and powers of two of
    sequences."""
    return bucket(batch.tokens, batch.seqs)


def bucket(tokens: int, seqs: int) -> tuple[int, int] | None:
    """See ``bucket_of``: of a batch of so many tokens and sequences."""
    if tokens > MOST_TOKENS:
        return None
    step = max(LEAST_TOKENS, (1 << (tokens - 1).bit_length()) // 16)
    return -(-tokens // step) * step, 1 << seqs.bit_length()


class Capture:
    """Makes the CUDA graphs of one model. They share one pool of memory, so that it is as large as the largest of them
    needs: no two run at a time, and an answer is copied out before the next graph runs.
    """

    def __init__(self, device: torch.device) -> None:
        # PyTorch's own stream for captures is one for all models and all threads. Products have a workspace for each
        # stream: that of a stream which runs outside of captures may be freed by others, with graphs that use it left.
        self._before: Any = torch.cuda.Stream(device)
        self._stream: Any = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, run: Replay) -> Replay:
        """``run`` as a CUDA graph: each call makes its answer anew, in the same memory."""
        with _CAPTURING:
            current = torch.cuda.current_stream()
            self._before.wait_stream(current)
            with torch.cuda.stream(self._before):
                run()  # compiles kernels and fills caches, which no graph may do
            current.wait_stream(self._before)
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
        self._made: dict[tuple[str, int, int], tuple[Packed, Replay, int]] = {}
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
        if key in self._made:
            packed, replay, _ = self._made.pop(key)
        else:
            tokens, seqs = bucket
            try:
                packed = pack(batch, None, self._device, tokens=tokens, seqs=seqs)
                replay = self._capture(lambda: program.run(packed))
            except torch.OutOfMemoryError:
                return None  # without a graph less is held; later there may be more
            except RuntimeError as error:
                self._failed[key] = first_line(error)
                return None
        refill(packed, batch)
        made = replay()
        self._keep(key, packed, replay, made.nbytes)
        return to_host(made[:rows])

    def _keep(self, key: tuple[str, int, int], packed: Packed, replay: Replay, size: int) -> None:
        """As the one used last."""
        while self._made and (
            len(self._made) >= _MOST_GRAPHS or size + sum(kept for _, _, kept in self._made.values()) > _MOST_ANSWERS
        ):
            del self._made[next(iter(self._made))]
        self._made[key] = packed, replay, size
