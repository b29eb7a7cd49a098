"""Attention of plain PyTorch: sequences of one length together, blocks of queries one after the other, no padding.

It is what runs on the CPU, and on a card for the ops that have no kernel. Softmax is f32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as functional

from encast.backends.gpu.packed import TILE
from encast.backends.gpu.steps.context import Context, step
from encast.ir.relative import distance_origin

__all__ = ["attention", "attention_dtype", "rotary_qkv", "with_margins"]

_QUERIES = 256
"""Queries of a block: their scores with all keys are what is held."""

_MOST_SCORES = 1 << 26
"""Scores that are held at once, where a block of one sequence has no more."""

Added = Callable[[torch.Tensor, torch.Tensor, range, range], torch.Tensor]
"""``added(q, k, queries, keys)``: what is added to the products ``[n, heads, queries, keys]`` before they are scaled;
``q`` and ``k`` are ``[n, heads, rows, head_dim]``, ``queries`` and ``keys`` their places, on the host."""


def attention_dtype(context: Context, products: str) -> torch.dtype:
    """What the operands of the products inside attention are rounded to."""
    if context.stored != torch.float32:
        return context.stored
    return torch.bfloat16 if products == "bf16" else torch.float32


@step("rotary_qkv")
def rotary_qkv(context: Context, qkv: torch.Tensor, table: torch.Tensor, *, heads: int) -> torch.Tensor:
    rows, hidden = qkv.shape[0], qkv.shape[1] // 3
    cos, sin = table.index_select(0, context.batch.positions)[:, None].chunk(2, dim=2)
    a, b = qkv[:, : 2 * hidden].float().view(rows, 2 * heads, -1).chunk(2, dim=2)
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=2).view(rows, -1)
    return torch.cat([context.store(turned), qkv[:, 2 * hidden :]], dim=1)


def with_margins(bias: torch.Tensor) -> torch.Tensor:
    """The table of ``attention`` with ``TILE`` further columns at either end, for the queries behind a sequence's last
    one in a tile: they are further from keys than it goes."""
    return functional.pad(bias, (TILE, TILE))


@step("attention", by_length=True)
def attention(
    context: Context,
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    seen: torch.Tensor | None = None,
    *,
    heads: int,
    scale: float,
    products: str,
) -> torch.Tensor:
    def biased(scores: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        assert bias is not None
        return scores + bias[:, keys - queries[:, None] + bias.shape[1] // 2]

    dtype = attention_dtype(context, products)
    return _attend(context, qkv, heads, scale, dtype, seen=seen, after=None if bias is None else biased)


@step("local_attention", by_length=True)
def local_attention(
    context: Context,
    qkv: torch.Tensor,
    seen: torch.Tensor | None = None,
    *,
    heads: int,
    scale: float,
    products: str,
    reach: int,
) -> torch.Tensor:
    return _attend(context, qkv, heads, scale, attention_dtype(context, products), seen=seen, reach=reach)


@step("disentangled_attention", by_length=True)
def disentangled_attention(
    context: Context,
    qkv: torch.Tensor,
    key_table: torch.Tensor | None,
    query_table: torch.Tensor | None,
    *,
    heads: int,
    scale: float,
    products: str,
    shared: bool,
) -> torch.Tensor:
    """The tables are ``[heads or 1, columns, head_dim]``, as ``unpack_distances`` gives them."""

    def products_of_distances(q: torch.Tensor, k: torch.Tensor, queries: range, keys: range) -> torch.Tensor:
        added = torch.zeros((), device=q.device)
        shape = (*q.shape[:2], len(queries), len(keys))
        low, high = keys[0] - queries[-1], keys[-1] - queries[0]
        distances = _places(keys, q) - _places(queries, q)[:, None]
        if key_table is not None:
            added = added + (q @ _columns(key_table, low, high)).gather(3, (distances - low).expand(shape))
        if query_table is not None:
            at = (-distances + high).t().expand(*shape[:2], len(keys), len(queries))
            added = added + (k @ _columns(query_table, -high, -low)).gather(3, at).transpose(2, 3)
        return added

    dtype = attention_dtype(context, products)
    return _attend(context, qkv, heads, scale, dtype, before=products_of_distances)


def _places(rows: range, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(rows.start, rows.stop, device=like.device)


def _columns(table: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """The vectors of the distances from ``low`` to ``high`` as columns."""
    origin = distance_origin(table.shape[1])
    return table[:, origin + low : origin + high + 1].transpose(1, 2)


def _attend(
    context: Context,
    qkv: torch.Tensor,
    heads: int,
    scale: float,
    dtype: torch.dtype,
    *,
    seen: torch.Tensor | None = None,
    reach: int | None = None,
    before: Added | None = None,
    after: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """``before`` adds to the products, ``after`` to the scaled scores."""
    made = torch.empty_like(qkv[:, : qkv.shape[1] // 3])
    for length, members, rows in _groups(context, heads):
        parts = qkv[rows].to(dtype).float().unflatten(2, (3, heads, -1))  # [n, length, 3, heads, head_dim]
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        for begin in range(0, length, _QUERIES):
            end = min(begin + _QUERIES, length)
            first, last = (0, length) if reach is None else (max(begin - reach, 0), min(end + reach, length))
            of_q, of_k = q[:, :, begin:end], k[:, :, first:last]
            scores = of_q @ of_k.transpose(2, 3)
            if before is not None:
                scores = scores + before(of_q, of_k, range(begin, end), range(first, last))
            scores = scores * scale
            queries, keys = _places(range(begin, end), qkv), _places(range(first, last), qkv)
            if after is not None:
                scores = after(scores, queries, keys)
            if reach is not None:
                scores = scores.masked_fill((keys - queries[:, None]).abs() > reach, -torch.inf)
            if seen is not None:
                scores = scores.masked_fill((keys >= seen[members][:, None])[:, None, None], -torch.inf)
            powers = torch.exp(scores - scores.amax(dim=3, keepdim=True)).to(dtype).float()
            mixed = powers @ v[:, :, first:last] / powers.sum(dim=3, keepdim=True)
            made[rows[:, begin:end]] = mixed.transpose(1, 2).flatten(2).to(made.dtype)
    return made


def _groups(context: Context, heads: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    for length, members, rows in context.batch.groups():
        several = max(1, _MOST_SCORES // (heads * min(length, _QUERIES) * length))
        for part, of_rows in zip(members.split(several), rows.split(several), strict=True):
            yield length, part, of_rows
