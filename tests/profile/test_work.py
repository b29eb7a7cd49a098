"""Operations and bytes of every kind of step against sums by hand, and what they are divided by."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from profiles import CEILINGS, PLAN

from encast import _core
from encast._core import Plan
from encast.batch import Batch
from encast.ir.ops import ACTIVATIONS, COARSE_ACTIVATIONS
from encast.profile.bounds import Bound, Homes, bound_of, memory_seconds, peak_of
from encast.profile.work import ELEMENT_OPERATIONS, WORK_OF_KIND, Chunk, Work, chunks_of, work_of

STEPS = Plan(PLAN).steps
CHUNK = Chunk(tokens=10, seqs=2, selected=3, squares=4**2 + 6**2, words=7, lengths=(4, 6))


def _work(index: int) -> Work:
    return work_of(STEPS[index], CHUNK)


def test_embed() -> None:
    work = _work(0)
    assert work.products == 0
    # One addition of two tables and a layer norm, then narrowing.
    assert work.elements == 10 * 24 * (1 + 7) + 10 * 24 * 4
    assert work.table_bytes == 10 * 24 * 4 * 2
    assert work.value_bytes == {"arena": 10 * 24 * 4, "block": 10 * (24 + 8)}
    assert work.weight_bytes == 0


def test_int8_product() -> None:
    work = _work(1)
    assert work.products == 2 * 10 * 72 * 24
    assert work.elements == 10 * 72 * ELEMENT_OPERATIONS["gelu"]
    # Two panels of 64 outputs; scale, column sums and bias are padded to 128.
    assert work.weight_bytes == 128 * 24 + 3 * 128 * 4
    assert work.value_bytes == {"block": 10 * (24 + 8), "arena": 10 * 72 * 4}


def test_attention_counts_real_lengths() -> None:
    work = _work(2)
    # Scores and context: a multiplication and an addition each, for every pair of a sequence and every column.
    assert work.products == 2 * 2 * (16 + 36) * 24
    assert work.elements == (16 + 36) * 2 * ELEMENT_OPERATIONS["softmax"]
    assert work.value_bytes == {"arena": 10 * 72 * 4 + 10 * 24 * 4}


def test_what_tasks_of_heads_make_lies_in_a_threads_own_memory() -> None:
    product, attention = (work_of(STEPS[index], CHUNK, heads=True) for index in (1, 2))
    assert product.value_bytes == {"block": 10 * (24 + 8) + 10 * 72 * 4}
    assert attention.value_bytes == {"block": 10 * 72 * 4, "arena": 10 * 24 * 4}
    assert dataclasses.replace(product, value_bytes=_work(1).value_bytes) == _work(1)


@pytest.mark.parametrize(
    ("arithmetic", "operations"), [("s8", 4 * 10 * 72), ("bf16_fma", 0), ("bf16_dp", 0), ("bf16_tile", 0)]
)
def test_int8_attention_narrows_inside(arithmetic: str, operations: int) -> None:
    narrow = Plan(PLAN.replace("factor=0.5 arithmetic=f32", f"factor=0.5 arithmetic={arithmetic}")).steps[2]
    assert work_of(narrow, CHUNK).elements - _work(2).elements == operations


def test_a_product_that_adds_reads_what_it_adds() -> None:
    plan = PLAN.replace("step sparse name=last x=v12", "step sparse name=last x=v12 other=v2", 1)
    sparse, without = (
        next(work_of(step, CHUNK) for step in Plan(text).steps if step.kind == "sparse") for text in (plan, PLAN)
    )
    assert sparse.elements == without.elements + CHUNK.tokens * 72
    assert sparse.value_bytes["arena"] == without.value_bytes["arena"] + CHUNK.tokens * 72 * 4


def test_rows() -> None:
    narrow, norm, add = _work(3), _work(4), _work(5)
    assert (narrow.elements, narrow.value_bytes) == (10 * 24 * 4, {"arena": 960, "block": 480})
    assert (norm.elements, norm.value_bytes) == (10 * 24 * 8, {"arena": 3 * 960})
    assert (add.elements, add.value_bytes) == (10 * 24, {"arena": 3 * 960})


def test_sequences() -> None:
    pool, normalize, first, select = _work(6), _work(8), _work(9), _work(10)
    assert (pool.elements, pool.value_bytes) == (240, {"arena": 960 + 2 * 24 * 4})
    assert _work(7) == pool
    assert (normalize.elements, normalize.value_bytes) == (2 * 48 * 3, {"arena": 2 * 48 * 4, "caller": 2 * 48 * 4})
    assert (first.elements, first.value_bytes) == (0, {"arena": 2 * 24 * 4, "caller": 2 * 24 * 4})
    assert select.value_bytes == {"arena": 2 * 3 * 24 * 4}


def test_a_sparse_product_counts_what_is_left() -> None:
    sparse = next(work_of(step, CHUNK) for step in STEPS if step.kind == "sparse")
    assert sparse.products == 2 * CHUNK.tokens * 10 * 16
    assert sparse.elements == CHUNK.tokens * 72 * ELEMENT_OPERATIONS["gelu"]
    assert sparse.weight_bytes == 10 * 16 + 10 * 4 * 2 + 33 * 4 + 3 * 128 * 4
    assert sparse.value_bytes == {"block": CHUNK.tokens * (24 + 8), "arena": CHUNK.tokens * 72 * 4}


def test_a_product_with_both_forms_reads_one_of_them() -> None:
    plan = PLAN.replace("value v0", "weight w13 s8 panels 72 24 @0\nvalue v0", 1)
    plan = plan.replace("act=gelu arithmetic=s8 out=v11", "act=gelu arithmetic=s8 dense=w13 dense_rows=8 out=v11", 1)
    step = next(step for step in Plan(plan).steps if step.kind == "sparse")
    sparse, dense, mixed = (work_of(step, CHUNK, dense=dense) for dense in (0, 1, 0.25))
    assert sparse == next(work_of(step, CHUNK) for step in STEPS if step.kind == "sparse")
    assert (dense.products, dense.weight_bytes) == (2 * CHUNK.tokens * 72 * 24, 128 * 24 + 3 * 128 * 4)
    assert (dense.elements, dense.value_bytes) == (sparse.elements, sparse.value_bytes)
    assert mixed.products == 0.25 * dense.products + 0.75 * sparse.products
    assert mixed.weight_bytes == dense.weight_bytes + sparse.weight_bytes - 3 * 128 * 4, "it reads both"


def test_rotary_turns_queries_and_keys() -> None:
    rotary = next(work_of(step, CHUNK) for step in STEPS if step.kind == "rotary")
    assert rotary.elements == 10 * 48 * ELEMENT_OPERATIONS["rotary"]
    assert rotary.value_bytes == {"arena": 2 * 10 * 48 * 4}, "read and written where they are"


def test_local_attention_counts_what_it_reaches() -> None:
    local = next(work_of(step, CHUNK) for step in STEPS if step.kind == "attention" and step.keys["reach"])
    # Two to each side, but for the ends: 3 + 4 + 4 + 3 of four tokens, 3 + 4 + 5 + 5 + 4 + 3 of six.
    assert local.products == 2 * 2 * (14 + 24) * 24
    assert local.elements == (14 + 24) * 2 * ELEMENT_OPERATIONS["softmax"]
    assert CHUNK.pairs(5) == CHUNK.pairs(100) == CHUNK.pairs(0) == 16 + 36


def test_tables_of_distances_are_products_too() -> None:
    plan = PLAN.replace("value v0", "weight w13 f32 dense 216 16 @0\nvalue v0", 1)
    plan = plan.replace("x=v2 heads=2 factor", "x=v2 key_table=w13 query_table=w13 heads=2 factor")
    attention = work_of(Plan(plan).steps[2], CHUNK)
    assert attention.products == 2 * _work(2).products
    # The longest of the texts has eleven distances.
    assert attention.table_bytes == 2 * 11 * 24 * 4
    assert (attention.elements, attention.value_bytes) == (_work(2).elements, _work(2).value_bytes)


def test_tables_of_all_heads_are_as_wide_as_one() -> None:
    plan = PLAN.replace("value v0", "weight w13 f32 dense 108 16 @0\nvalue v0", 1)
    plan = plan.replace("x=v2 heads=2 factor", "x=v2 key_table=w13 query_table=w13 shared_tables=1 heads=2 factor")
    attention = work_of(Plan(plan).steps[2], CHUNK)
    assert (attention.products, attention.table_bytes) == (2 * _work(2).products, 2 * 11 * 12 * 4)


def test_windows_are_copied() -> None:
    window = next(work_of(step, CHUNK) for step in STEPS if step.kind == "window")
    assert (window.products, window.elements) == (0, 0)
    assert window.value_bytes == {"arena": 10 * 24 * 4 + 10 * 72 * 4}


def test_gated_activation() -> None:
    gated = next(work_of(step, CHUNK) for step in STEPS if step.kind == "gated")
    assert gated.elements == 10 * 12 * (ELEMENT_OPERATIONS["gelu"] + 1 + ELEMENT_OPERATIONS["narrow"])
    assert gated.value_bytes == {"arena": 10 * 24 * 4 + 10 * 12 * 4, "block": 10 * (12 + 8)}


def test_every_kind_of_step_has_a_cost() -> None:
    assert {step.kind for step in STEPS} == set(WORK_OF_KIND) == set(_core.step_kinds())


def test_every_activation_has_a_cost() -> None:
    for name in (*ACTIVATIONS, *COARSE_ACTIVATIONS.values()):
        assert ELEMENT_OPERATIONS[name.removesuffix("_coarse")] > 0


def test_needed_steps() -> None:
    kinds = [step.kind for step in Plan(PLAN).needed("embedding")]
    assert kinds == ["embed", "linear", "attention", "norm", "pool", "pool", "normalize"]
    assert [step.kind for step in Plan(PLAN).needed("last_hidden_state")] == kinds[:4]


def test_chunks_are_whole_sequences() -> None:
    lengths = [40, 24, 1, 64, 10]
    cu_seqlens = np.r_[0, np.cumsum(lengths)].astype(np.int32)
    batch = Batch(np.arange(139, dtype=np.int32) % 5, cu_seqlens)
    chunks = chunks_of(batch, 64, cu_seqlens[:-1])
    assert [(chunk.tokens, chunk.seqs, chunk.selected) for chunk in chunks] == [
        (64, 2, 2),
        (1, 1, 1),
        (64, 1, 1),
        (10, 1, 1),
    ]
    assert chunks[0].squares == 40**2 + 24**2
    assert chunks[0].lengths == (40, 24)
    assert [chunk.words for chunk in chunks] == [5, 1, 5, 5]
    assert chunks_of(batch, 64)[0].selected == 0


def test_added_work() -> None:
    total = _work(1) + _work(3)
    assert total.products == _work(1).products
    assert total.value_bytes == {"block": 320 + 480, "arena": 2880 + 960}
    assert total.bytes == total.weight_bytes + 4640


HOMES = Homes(weights=1 << 22, tables=1 << 30, block=1 << 14, arena=1 << 21)


def test_bytes_come_from_where_they_live() -> None:
    work = Work(weight_bytes=150, table_bytes=20, value_bytes={"block": 80, "arena": 40, "caller": 4})
    seconds = memory_seconds(work, HOMES, CEILINGS, 2)
    # 4 MiB of weights fit L3, 16 KiB a thread fit L1, 2 MiB fit the two L2.
    assert seconds == pytest.approx({"L3": 1e-9, "memory": 1e-9, "L1": 0.1e-9, "L2": 0.11e-9})


def test_a_bound_is_its_largest_resource() -> None:
    work = Work(products=1000, elements=100, weight_bytes=150)
    bound = bound_of(work, "int8", "avx512vnni", HOMES, CEILINGS, 2)
    assert bound.arithmetic == pytest.approx(1000 / 1000e9 + 100 / 100e9)
    assert (bound.seconds, bound.holds) == (pytest.approx(2e-9), "arithmetic")
    bound = bound_of(dataclasses.replace(work, weight_bytes=600), "int8", "avx512vnni", HOMES, CEILINGS, 2)
    assert (bound.seconds, bound.holds) == (pytest.approx(4e-9), "L3")
    assert Bound(0.0, {}).seconds == 0


@pytest.mark.parametrize(
    ("dtype", "isa", "peak"),
    [
        ("int8", "avx512vnni", 1000e9),
        ("int8", "amx", 1000e9),  # nothing faster was measured
        ("int8", "avx512", 200e9),  # a kernel cannot use what is above its level
        ("bf16", "avx512", 100e9),
        ("f32", "avx512bf16", 100e9),
        ("f32", "scalar", 100e9),  # not measured: the fastest there is
    ],
)
def test_the_peak_is_that_of_the_kernels_level(dtype: str, isa: str, peak: float) -> None:
    assert peak_of(CEILINGS, dtype, isa, 2) == peak
