"""Steps that pick rows: embeddings, windows, pooling."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from encast.backends.gpu.packed import Packed
from encast.backends.gpu.steps.context import Context, step
from encast.backends.gpu.steps.rows import layer_norm

__all__ = ["embed_layer_norm", "position_ids"]


@step("position_ids")
def position_ids(context: Context, token_ids: torch.Tensor, *, offset: int, skip_id: int) -> torch.Tensor:
    batch = context.batch
    if skip_id < 0:
        return batch.positions + offset
    counted = token_ids != skip_id
    before = counted.cumsum(0) - counted.long()  # in the whole batch
    # A token's place bounds it; so it does for padding, which is of no sequence.
    place = (before - before[batch.starts.long()][batch.sequence.long()]).clamp(max=batch.positions)
    return torch.where(counted, place + offset, offset - 1).to(torch.int32)


@step("embedding")
def embedding(context: Context, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return table.index_select(0, ids)


@step("embed_layer_norm")
def embed_layer_norm(
    context: Context,
    token_ids: torch.Tensor,
    token_type_ids: torch.Tensor | None,
    word: torch.Tensor,
    position: torch.Tensor | None,
    token_type: torch.Tensor | None,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    *,
    eps: float,
    position_offset: int,
    position_skip_id: int,
) -> torch.Tensor:
    total = word.index_select(0, token_ids).float()
    if token_type is not None:
        assert token_type_ids is not None
        total = total + token_type.index_select(0, token_type_ids)
    if position is not None:
        places = position_ids(context, token_ids, offset=position_offset, skip_id=position_skip_id)
        total = total + position.index_select(0, places)
    return layer_norm(context, total, gamma, beta, eps=eps)


@step("seen_tokens")
def seen_tokens(context: Context, token_ids: torch.Tensor, *, token: int, most: int) -> torch.Tensor:
    batch = context.batch
    lengths = batch.seq_lengths
    # One behind the last token that is another one, 0 where there is none.
    ends = torch.where(token_ids != token, batch.positions + 1, 0)
    last = torch.zeros_like(lengths).scatter_reduce_(0, batch.sequence.long(), ends, "amax")
    return torch.maximum(lengths - (lengths - last).clamp(max=most), torch.ones_like(lengths))


@step("window_rows")
def window_rows(context: Context, x: torch.Tensor, *, width: int) -> torch.Tensor:
    batch = context.batch
    rows = torch.arange(len(x), device=x.device)
    lengths = batch.seq_lengths[batch.sequence.long()]
    parts = []
    for shift in range(-(width // 2), width // 2 + 1):
        place = batch.positions + shift
        inside = (place >= 0) & (place < lengths)
        parts.append(x[torch.where(inside, rows + shift, 0)].masked_fill(~inside[:, None], 0.0))
    return torch.cat(parts, dim=1)


@step("first_token")
def first_token(context: Context, x: torch.Tensor) -> torch.Tensor:
    return x.index_select(0, context.batch.starts)


@step("select_rows")
def select_rows(context: Context, x: torch.Tensor, select: torch.Tensor) -> torch.Tensor:
    return x.index_select(0, select)


@step("pooling")
def pooling(context: Context, x: torch.Tensor, *, modes: Sequence[str]) -> torch.Tensor:
    return context.store(torch.cat([_pooled(context.batch, x.float(), mode) for mode in modes], dim=1))


def _pooled(batch: Packed, x: torch.Tensor, mode: str) -> torch.Tensor:
    if mode == "cls":
        return x.index_select(0, batch.starts)
    if mode == "lasttoken":
        return x.index_select(0, (batch.offsets[1:] - 1).clamp(min=0))
    # Sums run over a sequence's rows in their order: the bits do not depend on other sequences.
    offsets = batch.offsets.long()
    if mode == "max":
        return torch.segment_reduce(x, "max", offsets=offsets, unsafe=True)
    lengths = batch.seq_lengths.float()[:, None]
    if mode == "weightedmean":
        weighted = x * (batch.positions + 1).float()[:, None]
        return torch.segment_reduce(weighted, "sum", offsets=offsets, unsafe=True) / (lengths * (lengths + 1) / 2)
    sums = torch.segment_reduce(x, "sum", offsets=offsets, unsafe=True)
    return sums / (lengths if mode == "mean" else lengths.sqrt())
