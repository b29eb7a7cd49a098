"""A packed batch on the device, with what steps need to know of every token and sequence.

Everything is made on the host and goes over in one copy: nothing that a step does waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from encast.batch import Batch, Int32

__all__ = ["TILE", "Packed", "pack", "refill", "to_host"]

TILE = 64
"""Queries of a sequence that one program of the attention kernel answers."""


@dataclass
class Packed:
    """``tokens`` and ``seqs`` count padding too, which only batches for a CUDA graph have: tokens that belong to the
    last sequence, which is empty, and empty sequences.

    ``token_ids, token_type_ids: i32[tokens]``; ``positions: i32[tokens]``, a token's place in its ``sequence:
    i32[tokens]``; ``offsets: i32[seqs + 1]``, rising; ``tiles: i32[n, 2]``: a sequence and the place of the first of
    ``TILE`` queries in it; ``select: i32[selected]`` or None. All of them lie in ``buffer``, which ``staging`` on the
    host is copied to. ``lengths`` are those of the real sequences, on the host.
    """

    token_ids: torch.Tensor
    token_type_ids: torch.Tensor
    positions: torch.Tensor
    sequence: torch.Tensor
    offsets: torch.Tensor
    tiles: torch.Tensor
    select: torch.Tensor | None
    lengths: Int32
    buffer: torch.Tensor = field(repr=False)
    staging: torch.Tensor = field(repr=False)
    _groups: list[tuple[int, torch.Tensor, torch.Tensor]] | None = field(default=None, repr=False)

    @property
    def tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def starts(self) -> torch.Tensor:
        """The first row of every sequence; of an empty one any row."""
        return self.offsets[:-1].clamp(max=self.tokens - 1)

    @property
    def seq_lengths(self) -> torch.Tensor:
        return self.offsets[1:] - self.offsets[:-1]

    def groups(self) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Sequences of one length together: that length, ``i64[n]`` which they are, ``i64[n, length]`` their rows.

        For steps without a kernel for sequences of unlike lengths: so they need no padding.
        """
        if self._groups is None:
            device = self.token_ids.device
            begins = np.concatenate([[0], np.cumsum(self.lengths)])[:-1]
            self._groups = []
            for length in np.unique(self.lengths):
                members = np.flatnonzero(self.lengths == length)
                rows = begins[members][:, None] + np.arange(length)
                self._groups.append(
                    (int(length), torch.from_numpy(members).to(device), torch.from_numpy(rows).to(device))
                )
        return self._groups


def pack(
    batch: Batch,
    select: Int32 | None,
    device: torch.device,
    *,
    tokens: int | None = None,
    seqs: int | None = None,
) -> Packed:
    """The batch on the device; padded to ``tokens`` and to ``seqs``, more than it has, where they are given."""
    shapes = _shapes(batch, select, tokens or batch.tokens, seqs or batch.seqs)
    size = sum(int(np.prod(shape)) for shape in shapes)
    staging = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
    _fill(staging, shapes, batch, select)
    there = staging.to(device, non_blocking=True, copy=True)
    parts = there.split([int(np.prod(shape)) for shape in shapes])
    ids, types, positions, sequence, offsets, tiles, *chosen = (
        part.view(shape) for part, shape in zip(parts, shapes, strict=True)
    )
    return Packed(
        ids, types, positions, sequence, offsets, tiles, chosen[0] if chosen else None,
        np.diff(batch.cu_seqlens), there, staging,
    )  # fmt: skip


def refill(packed: Packed, batch: Batch) -> None:
    """Another batch in the place of a padded one, whose tokens and sequences it must not exceed, and whose last copy to
    the device is done."""
    _fill(packed.staging, _shapes(batch, None, packed.tokens, len(packed.offsets) - 1), batch, None)
    packed.buffer.copy_(packed.staging, non_blocking=True)
    packed.lengths, packed._groups = np.diff(batch.cu_seqlens), None


def to_host(rows: torch.Tensor) -> torch.Tensor:
    """``rows`` as f32 on the host, once all that makes them is done; of a card in page-locked memory, which it copies
    to several times as fast."""
    wide = rows.float().contiguous()
    if wide.device.type == "cpu":
        return wide
    try:
        there = torch.empty(wide.shape, dtype=torch.float32, pin_memory=True)
    except RuntimeError:  # the system locks no more
        return wide.cpu()
    there.copy_(wide, non_blocking=True)
    torch.cuda.current_stream(wide.device).synchronize()
    return there


def _shapes(batch: Batch, select: Int32 | None, tokens: int, seqs: int) -> list[tuple[int, ...]]:
    """Of the parts of a ``Packed``, in their order in its buffer."""
    padded = tokens > batch.tokens or seqs > batch.seqs
    tiles = tokens // TILE + seqs if padded else int((-(-np.diff(batch.cu_seqlens) // TILE)).sum())
    shapes: list[tuple[int, ...]] = [*[(tokens,)] * 4, (seqs + 1,), (tiles, 2)]
    return shapes if select is None else [*shapes, select.shape]


def _fill(staging: torch.Tensor, shapes: list[tuple[int, ...]], batch: Batch, select: Int32 | None) -> None:
    lengths = np.diff(batch.cu_seqlens)
    blocks = -(-lengths // TILE)
    buffer = staging.numpy()
    buffer[:] = 0
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    views: list[Any] = [part.reshape(shape) for part, shape in zip(np.split(buffer, ends[:-1]), shapes, strict=True)]
    ids, types, positions, sequence, offsets, of_tiles, *chosen = views
    seqs, real = len(offsets) - 1, batch.tokens
    ids[:real] = batch.token_ids
    if batch.token_type_ids is not None:
        types[:real] = batch.token_type_ids
    positions[:real] = np.arange(real) - np.repeat(batch.cu_seqlens[:-1], lengths)
    sequence[:] = seqs - 1
    sequence[:real] = np.repeat(np.arange(batch.seqs), lengths)
    offsets[:] = real
    offsets[: batch.seqs + 1] = batch.cu_seqlens
    of_tiles[:, 0] = seqs - 1
    count = int(blocks.sum())
    of_tiles[:count, 0] = np.repeat(np.arange(batch.seqs), blocks)
    of_tiles[:count, 1] = TILE * (np.arange(count) - np.repeat(np.cumsum(blocks) - blocks, blocks))
    if select is not None:
        chosen[0][:] = select
