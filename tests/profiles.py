"""What the tests of profiles share: a made-up machine, a plan of every kind of step, compiled cases."""

from __future__ import annotations

import functools
from datetime import datetime, timezone
from pathlib import Path

import pytest
from cases import open_case, task_of
from checkpoints import CASES

import encast
from encast.ceilings import CacheLevel, Ceilings, Fingerprint

__all__ = ["CEILINGS", "PLAN", "compiled"]

LEVELS = ("scalar", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx")

CEILINGS = Ceilings(
    Fingerprint(
        format=1,
        processor="made up",
        isa_levels=LEVELS,
        features=(),
        cores=2,
        threads=2,
        caches=(CacheLevel("L1", 1 << 15, 1), CacheLevel("L2", 1 << 20, 1), CacheLevel("L3", 1 << 24, 2)),
    ),
    datetime(2026, 1, 2, tzinfo=timezone.utc),
    {
        ("f32", "avx2", 1): 50e9,
        ("f32", "avx2", 2): 100e9,
        ("bf16", "avx2", 1): 50e9,
        ("bf16", "avx2", 2): 100e9,
        ("bf16", "avx512bf16", 1): 200e9,
        ("bf16", "avx512bf16", 2): 400e9,
        ("int8", "avx2", 1): 100e9,
        ("int8", "avx2", 2): 200e9,
        ("int8", "avx512vnni", 1): 500e9,
        ("int8", "avx512vnni", 2): 1000e9,
    },
    {
        ("L1", 1): 400e9, ("L1", 2): 800e9, ("L2", 1): 200e9, ("L2", 2): 400e9, ("L3", 1): 100e9, ("L3", 2): 150e9,
        ("memory", 1): 10e9, ("memory", 2): 20e9,
    },
    300.0,
)  # fmt: skip
"""Two threads, numbers that are easy to divide by."""

PLAN = """encast-plan 1
limits vocab=100 types=2 max_len=64 chunk_tokens=64 arena=155648 block_rows=48 stream_rows=48 \
head_tokens=0 block=4096 exact=0
weight w0 f32 dense 100 24 @0
weight w1 f32 dense 64 24 @0
weight w2 f32 dense 1 24 @0
weight w3 f32 dense 1 24 @0
weight w4 s8 panels 72 24 @0
weight w5 f32 padded 1 72 @0
weight w6 i32 padded 1 72 @0
weight w7 f32 padded 1 72 @0
weight w8 bf16 panels 100 25 @0
weight w9 s8 dense 10 16 @0
weight w10 u16 dense 10 4 @0
weight w11 i32 dense 1 33 @0
weight w12 f32 dense 64 12 @0
value v0 f32 tokens 24 @0
value v1 q8 tokens 24 @+0
value v2 f32 tokens 72 @8192
value v3 f32 tokens 24 @32768
value v4 bf16 tokens 24 @+0
value v5 f32 tokens 24 @40960
value v6 f32 seqs 48 @49152
value v7 f32 seqs 48 @-
value v8 f32 selected 24 @65536
value v9 f32 seqs 24 @-
value v10 f32 tokens 24 @73728
value v11 f32 tokens 72 @81920
value v12 q8 tokens 24 @+0
value v13 f32 tokens 72 @98304
value v14 f32 tokens 24 @122880
value v15 f32 tokens 12 @131072
value v16 q8 tokens 12 @+0
value v17 f32 tokens 72 @135168
stage rows
step embed name=embeddings word=w0 position=w1 gamma=w2 beta=w3 eps=1e-12 offset=0 skip=-1 zero_point=1 out=v0 also=v1
step linear name=layer.0.qkv x=v1 w=w4 scale=w5 colsum=w6 bias=w7 act=gelu arithmetic=s8 out=v2
stage sequences
step attention name=layer.0.context x=v2 heads=2 factor=0.5 arithmetic=f32 out=v3
stage rows
step narrow name=layer.0.narrow x=v3 zero_point=0 out=v4
step norm name=layer.0.norm x=v3 other=v0 gamma=w2 beta=w3 eps=1e-5 out=v5
step elementwise name=add x=v5 other=v0 factor=1 act=none out=v10
stage rows
step pool name=pool x=v5 mode=mean column=0 out=v6
step pool name=pool x=v5 mode=max column=24 out=v6
step normalize name=normalize x=v6 out=v7
step first name=first x=v5 out=v9
stage rows
step select name=select x=v5 out=v8
stage rows
step narrow name=last.narrow x=v5 zero_point=1 out=v12
step sparse name=last x=v12 w=w9 columns=w10 starts=w11 scale=w5 colsum=w6 bias=w7 act=gelu arithmetic=s8 out=v11
stage rows
step rotary name=layer.1.rotary x=v11 table=w12 heads=2 out=v11
stage sequences
step attention name=layer.1.context x=v11 heads=2 factor=0.5 reach=2 arithmetic=f32 out=v14
stage rows
step gated name=layer.1.act x=v14 act=gelu zero_point=1 out=v15 also=v16
step window name=window x=v5 out=v17
output last_hidden_state v5
output embedding v7
"""
"""A plan with every kind of step, for sums by hand."""


def compiled(name: str, dtype: str, factory: pytest.TempPathFactory) -> Path:
    """The case compiled to a dtype, once a session."""
    return _compiled(name, dtype, open_case(name, factory).folder)


@functools.cache
def _compiled(name: str, dtype: str, folder: Path) -> Path:
    out = folder.with_name(f"{name}-{dtype}-profile.encast")
    return encast.compile(folder, out, dtype=dtype, task=task_of(CASES[name]), strict=True)
