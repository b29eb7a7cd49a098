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

from encast.backends.gpu.kernels.dtypes import TRITON_DTYPES, product, rounded
from encast.backends.gpu.packed import TILE, Packed

__all__ = ["LARGEST_HEAD", "attend", "form", "options"]

LOG2_E = tl.constexpr(1.4426950408889634)
"""Powers are of two: processors have an instruction for those."""

LARGEST_HEAD = 128
"""Columns of a head that a program holds: those of 256 in f32 want more shared memory than most cards have."""


@triton.jit
def _block(
    q, keys, last_key, queries, begin, place, bias, scale, hidden, reach, top, total, mixed,
    row_stride, columns, SIZE: tl.constexpr, HAS_BIAS: tl.constexpr, LOCAL: tl.constexpr, MASKED: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    # ``keys`` of one block into the running maximum, sum and mix; not ``MASKED``: all of them count for every query.
    at = place + (begin + keys).to(tl.int64)[:, None] * row_stride + columns[None, :]
    real = (columns < SIZE)[None, :]
    if MASKED:
        real = real & (keys < last_key)[:, None]
    k = rounded(tl.load(at, mask=real, other=0.0).to(tl.float32), DTYPE)
    v = rounded(tl.load(at + hidden, mask=real, other=0.0).to(tl.float32), DTYPE)
    scores = product(q, tl.trans(k)) * scale
    if MASKED:
        counts = (keys < last_key)[None, :]
        distance = keys[None, :] - queries[:, None]
        if HAS_BIAS:
            scores += tl.load(bias + distance, mask=counts, other=0.0) * LOG2_E
        if LOCAL:
            counts = counts & (distance <= reach) & (distance >= -reach)
        scores = tl.where(counts, scores, float("-inf"))
    now = tl.maximum(top, tl.max(scores, axis=1))
    shift = now
    if LOCAL:
        # A query that has seen no key yet has none to take away from.
        shift = tl.where(now == float("-inf"), 0.0, now)
    powers = rounded(tl.exp2(scores - shift[:, None]), DTYPE)
    decay = tl.exp2(top - shift)
    total = total * decay + tl.sum(powers.to(tl.float32), axis=1)
    mixed = mixed * decay[:, None] + product(powers, v)
    return now, total, mixed


@triton.jit
def _attend(
    qkv, out, offsets, tiles, seen, bias,
    row_stride, hidden, bias_columns, scale, reach,
    SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    HAS_SEEN: tl.constexpr, HAS_BIAS: tl.constexpr, LOCAL: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    # In this order: a grid has room for 65,535 in its second direction.
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
        # Queries behind the last one are made of zeros, and not stored.
        real = (queries < length)[:, None] & (columns < SIZE)[None, :]
        row = (begin + queries).to(tl.int64)[:, None]
        q = tl.load(qkv + row * row_stride + head * SIZE + columns[None, :], mask=real, other=0.0)
        q = rounded(q.to(tl.float32), DTYPE)
        place = qkv + hidden + head * SIZE
        of_bias = bias + head * bias_columns + bias_columns // 2
        top = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        mixed = tl.zeros([QUERIES, SIZE_BLOCK], tl.float32)
        masked = first_key
        if not (LOCAL or HAS_BIAS):
            masked = last_key // KEYS * KEYS
            for block in range(0, masked, KEYS):
                top, total, mixed = _block(
                    q, block + tl.arange(0, KEYS), last_key, queries, begin, place, of_bias, scale, hidden,
                    reach, top, total, mixed, row_stride, columns, SIZE, HAS_BIAS, LOCAL, False, DTYPE,
                )  # fmt: skip
        for block in range(masked, last_key, KEYS):
            top, total, mixed = _block(
                q, block + tl.arange(0, KEYS), last_key, queries, begin, place, of_bias, scale, hidden, reach,
                top, total, mixed, row_stride, columns, SIZE, HAS_BIAS, LOCAL, True, DTYPE,
            )  # fmt: skip
        mixed = rounded(mixed / total[:, None], out.dtype.element_ty)
        tl.store(out + row * hidden + head * SIZE + columns[None, :], mixed, mask=real)


def options(form: dict[str, Any], itemsize: int) -> dict[str, int]:
    """How a form of the kernel is compiled, over values of ``itemsize`` bytes. f32 products, which no tensor core
    makes, take twice the registers, so twice the warps share them; stages are as many as shared memory and registers
    hold."""
    if form["DTYPE"] == tl.float32:
        return {"num_warps": 8, "num_stages": 1 if form["LOCAL"] and form["SIZE_BLOCK"] > 64 else 2}
    return {"num_warps": 4, "num_stages": 3 if itemsize == 2 else 2}


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

    ``bias: f32[heads, columns]``: as ``with_margins`` makes it of the table of ``attention``; ``seen: i32[seqs]``,
    ``reach``: as ``attention`` and ``local_attention`` have them.
    Rows of no sequence are left as they are in memory. Raises nothing of its own: the caller has checked the head's
    size.
    """
    hidden = qkv.shape[1] // 3
    size = hidden // heads
    out = torch.empty((qkv.shape[0], hidden), dtype=qkv.dtype, device=qkv.device)
    of = TRITON_DTYPES[dtype]
    fixed = form(size, of, seen is not None, bias is not None, reach is not None)
    _attend[(batch.tiles.shape[0], heads)](
        qkv, out, batch.offsets, batch.tiles,
        batch.offsets if seen is None else seen,
        qkv if bias is None else bias,
        qkv.stride(0), hidden, 1 if bias is None else bias.shape[1], scale * LOG2_E.value, reach or 0,
        **fixed, **options(fixed, qkv.element_size()),
    )  # fmt: skip
    return out
