"""Self-attention of sequences of unlike lengths, without padding, without a mask tensor, scores never in memory.

A program answers ``TILE`` queries of one head of one sequence. It goes through the keys in blocks with a running
maximum and a running sum (Milakov and Gimelshein 2018; Dao et al. 2022, "FlashAttention"): f32, with powers rounded to
the dtype of the products, and their sum taken after rounding, as the table of ops says.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from encast.backends.gpu.kernels.dtypes import product, rounded
from encast.backends.gpu.packed import TILE, Packed

__all__ = ["LARGEST_HEAD", "attend", "form", "options"]

LARGEST_HEAD = 128
"""Columns of a head that a program holds: those of 256 in f32 want more shared memory than most cards have."""


@triton.jit
def _attend(
    qkv, out, offsets, tiles, seen, bias,
    row_stride, hidden, bias_columns, scale, reach,
    SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    HAS_SEEN: tl.constexpr, HAS_BIAS: tl.constexpr, LOCAL: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    begin = tl.load(offsets + sequence)
    length = tl.load(offsets + sequence + 1) - begin
    if first < length:
        last_key = length
        if HAS_SEEN:
            last_key = tl.load(seen + sequence)
        first_key = 0
        if LOCAL:
            # In blocks that are counted from the sequence's first key: the order of sums is the sequence's.
            first_key = tl.maximum(first - reach, 0) // KEYS * KEYS
            last_key = tl.minimum(last_key, first + QUERIES + reach)

        columns = tl.arange(0, SIZE_BLOCK)
        queries = first + tl.arange(0, QUERIES)
        real_queries = queries < length
        of_row = (begin + queries).to(tl.int64) * row_stride + head * SIZE
        q = tl.load(
            qkv + of_row[:, None] + columns[None, :],
            mask=real_queries[:, None] & (columns < SIZE)[None, :],
            other=0.0,
        )
        q = rounded(q.to(tl.float32), DTYPE)
        top = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        mixed = tl.zeros([QUERIES, SIZE_BLOCK], tl.float32)
        for block in range(first_key, last_key, KEYS):
            keys = block + tl.arange(0, KEYS)
            real_keys = keys < last_key
            place = (begin + keys).to(tl.int64)[:, None] * row_stride + hidden + head * SIZE + columns[None, :]
            real = real_keys[:, None] & (columns < SIZE)[None, :]
            k = rounded(tl.load(qkv + place, mask=real, other=0.0).to(tl.float32), DTYPE)
            v = rounded(tl.load(qkv + place + hidden, mask=real, other=0.0).to(tl.float32), DTYPE)
            scores = product(q, tl.trans(k)) * scale
            distance = keys[None, :] - queries[:, None]
            counts = real_keys[None, :] & real_queries[:, None]
            if HAS_BIAS:
                at = head * bias_columns + distance + bias_columns // 2
                scores += tl.load(bias + at, mask=counts, other=0.0)
            if LOCAL:
                counts = counts & (distance <= reach) & (distance >= -reach)
            scores = tl.where(counts, scores, float("-inf"))
            now = tl.maximum(top, tl.max(scores, axis=1))
            # A query that has seen no key yet has none to take away from.
            shift = tl.where(now == float("-inf"), 0.0, now)
            powers = rounded(tl.exp(scores - shift[:, None]), DTYPE)
            decay = tl.exp(top - shift)
            total = total * decay + tl.sum(powers.to(tl.float32), axis=1)
            mixed = mixed * decay[:, None] + product(powers, v)
            top = now
        mixed = mixed / tl.where(real_queries, total, 1.0)[:, None]
        to = (begin + queries).to(tl.int64)[:, None] * hidden + head * SIZE + columns[None, :]
        tl.store(out + to, rounded(mixed, out.dtype.element_ty), mask=real_queries[:, None] & (columns < SIZE)[None, :])


_TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def options(dtype: tl.dtype) -> dict[str, int]:
    """How the kernel is compiled: f32 products, which no tensor core makes, take twice the registers, so twice the
    warps share them."""
    return {"num_warps": 8 if dtype == tl.float32 else 4, "num_stages": 2}


def form(size: int, dtype: tl.dtype, seen: bool, bias: bool, local: bool) -> dict[str, Any]:
    """What the kernel is compiled for: heads of ``size`` columns, products of ``dtype``."""
    block = max(16, triton.next_power_of_2(size))
    # What a program holds must fit a multiprocessor's shared memory, 99 KB on most cards, and its registers: with more
    # keys the compiler spills to memory. tests/gpu/compile_kernels.py shows both.
    keys = 64 if block <= 64 else 32
    if dtype == tl.float32:
        keys //= 2
    return {
        "SIZE": size, "SIZE_BLOCK": block, "QUERIES": TILE, "KEYS": keys,
        "HAS_SEEN": seen, "HAS_BIAS": bias, "LOCAL": local, "DTYPE": dtype,
    }  # fmt: skip


def attend(
    batch: Packed,
    qkv: torch.Tensor,
    heads: int,
    scale: float,
    dtype: torch.dtype,
    *,
    bias: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
    reach: int | None = None,
) -> torch.Tensor:
    """``qkv: [tokens, 3 * hidden]``, rows contiguous, to ``[tokens, hidden]`` of its dtype; products of ``dtype``.

    ``bias: f32[heads, 2n - 1]``, ``seen: i32[seqs]``, ``reach``: as ``attention`` and ``local_attention`` have them.
    Rows of no sequence are left as they are in memory. Raises nothing of its own: the caller has checked the head's
    size.
    """
    hidden = qkv.shape[1] // 3
    size = hidden // heads
    out = torch.empty((qkv.shape[0], hidden), dtype=qkv.dtype, device=qkv.device)
    of = _TRITON_DTYPES[dtype]
    fixed = form(size, of, seen is not None, bias is not None, reach is not None)
    _attend[(batch.tiles.shape[0], heads)](
        qkv, out, batch.offsets, batch.tiles,
        batch.offsets if seen is None else seen,
        qkv if bias is None else bias,
        qkv.stride(0), hidden, 1 if bias is None else bias.shape[1], scale, reach or 0,
        **fixed, **options(of),
    )  # fmt: skip
    return out
