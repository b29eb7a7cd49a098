"""CUDA graphs of small batches, whose time is that of launching kernels: one for a bucket of tokens and sequences.

A graph runs on the memory that it was captured with. So a batch is padded to its bucket, its numbers are copied into
the bucket's, and the rows of the answer that are real are copied out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from encast.backends.gpu.packed import Packed, pack, refill
from encast.backends.gpu.program import Program
from encast.batch import Batch

__all__ = ["MOST_TOKENS", "Graphs", "bucket_of", "capture"]

LEAST_TOKENS, MOST_TOKENS = 32, 1024
"""Tokens of the smallest bucket, and of the largest: with more a card is busy longer than launches take."""

Replay = Callable[[], torch.Tensor]


def bucket_of(batch: Batch) -> tuple[int, int] | None:
    """Tokens and sequences of the bucket, powers of two, one sequence at least empty; None for a larger batch."""
    if batch.tokens > MOST_TOKENS:
        return None
    return max(LEAST_TOKENS, 1 << (batch.tokens - 1).bit_length()), 1 << batch.seqs.bit_length()


def capture(run: Replay) -> Replay:
    """``run`` as a CUDA graph: each call makes its answer anew, in the same memory."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        run()  # compiles kernels and fills caches, which no graph may do
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other models' threads may go on
        made = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return made

    return replay


class Graphs:
    """The graphs of one model, made when a bucket is first asked for. One thread at a time may use them."""

    def __init__(self, device: torch.device, capture: Callable[[Replay], Replay] = capture) -> None:
        self._device, self._capture = device, capture
        self._made: dict[tuple[str, int, int], tuple[Packed, Replay]] = {}

    def __len__(self) -> int:
        return len(self._made)

    def run(self, output: str, program: Program, batch: Batch, rows: int) -> torch.Tensor | None:
        """The first ``rows`` rows of the answer, f32 on the host; None for a batch without a bucket, and for a program
        that goes by lengths or reads rows that were selected."""
        bucket = bucket_of(batch)
        if bucket is None or program.by_length or program.selects:
            return None
        tokens, seqs = bucket
        if (output, *bucket) not in self._made:
            packed = pack(batch, None, self._device, tokens=tokens, seqs=seqs)
            self._made[output, tokens, seqs] = packed, self._capture(lambda: program.run(packed))
        packed, replay = self._made[output, tokens, seqs]
        refill(packed, batch)
        return replay()[:rows].float().cpu()
