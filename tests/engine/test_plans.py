"""Plans as text, an architecture and a target each, committed under tests/plans and reviewed as diffs.

    ENCAST_WRITE_PLANS=1 python -m pytest tests/engine/test_plans.py

writes them anew. Weight offsets are left out: they belong to the artifact, not to the plan's shape.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from cases import open_case
from graphs import META

from encast import _core
from encast.artifact.pack import stored_specs
from encast.crossover import DENSE_ROWS, DenseRows
from encast.errors import UnsupportedModelError
from encast.ir import OPS, Graph, ValueType
from encast.lower import Target, lower
from encast.lower.memory import Lifetime, place_values
from encast.lower.plan import has_steps
from encast.passes import optimise
from encast.quant import QuantSpec

PLANS = Path(__file__).parent.parent / "plans"
TARGETS = {
    "scalar": Target({"f32": "f32", "q8": "s8", "bf16": "bf16_fma"}, 64),
    "avx512bf16": Target(
        {"f32": "f32", "q8": "s8", "bf16": "bf16_dp"},
        1024,
        isa="avx512bf16",
        attention={"f32": "f32", "bf16": "bf16_dp", "int8": "s8"},
    ),
}
CASES = [
    ("bert-embed", "int8", "avx512bf16"),
    ("bert-embed", "f32", "scalar"),
    ("bert-embed", "int8_sparse", "scalar"),
    ("bert-embed", "int8_both", "avx512bf16"),
    ("bert-classify", "bf16", "avx512bf16"),
    ("distilbert-classify", "int8", "avx512bf16"),
    ("roberta-tag", "int8", "avx512bf16"),
    ("electra-answer", "bf16", "scalar"),
    ("mpnet-fill_mask", "int8", "avx512bf16"),
    ("albert-odd", "int8", "scalar"),
    ("modernbert-classify", "int8", "avx512bf16"),
    ("modernbert-mean", "bf16", "scalar"),
    ("nomic_bert-own-classify", "int8", "avx512bf16"),
    ("jina_bert-reglu", "bf16", "avx512bf16"),
    ("deberta-v2-conv", "int8", "avx512bf16"),
    ("deberta-v2-own-keys", "bf16", "scalar"),
    ("bert-relative-two-tasks", "int8", "avx512bf16"),
    ("eurobert-wide", "int8", "avx512bf16"),
]


class _Offset:
    def __init__(self, offset: int) -> None:
        self.offset = offset


def _plan(graph: Graph, dtype: str, target: Target) -> str:
    dtype, _, form = dtype.partition("_")
    # The weights have no zeros, and strict would say that the sparse products leave nothing out.
    sparse = {"": "never", "sparse": "always", "both": "auto"}[form]
    graph, _ = optimise(graph, QuantSpec(dtype), strict=not form, sparse=sparse, isa=target.isa)
    offset, tensors = 0, {}
    for spec in stored_specs(graph):
        tensors[spec.name] = _Offset(offset)
        offset += -(-spec.nbytes // 64) * 64
    return lower(graph, tensors, target)


@pytest.mark.parametrize(("case", "dtype", "target"), CASES, ids=map("-".join, CASES))
def test_plan_is_the_committed_one(
    case: str, dtype: str, target: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DENSE_ROWS, "avx512bf16", (DenseRows(2.0, 24, 12),))  # the weights have no zeros
    plan = _plan(open_case(case, tmp_path_factory).graph, dtype, TARGETS[target])
    _core.Plan(plan)
    shown = re.sub(r"^(weight .*) @\d+$", r"\1", plan, flags=re.MULTILINE)
    path = PLANS / f"{case}-{dtype}-{target}.txt"
    if os.environ.get("ENCAST_WRITE_PLANS"):
        path.write_text(shown)
    assert shown == path.read_text()


def test_every_committed_plan_has_a_case() -> None:
    assert {path.stem for path in PLANS.glob("*.txt")} == {"-".join(case) for case in CASES}


def test_every_op_has_steps_or_is_known_to_have_none() -> None:
    """Those below are computed within a fusion, or, of f8, on a GPU alone."""
    assert {op for op in OPS if not has_steps(op)} == {
        "attention_context",
        "attention_scores",
        "cast_f8",
        "hide_keys",
        "linear_bias",
        "linear_f8",
        "local_mask",
        "position_ids",
        "relative_bias",
        "relative_scores",
        "rotary",
        "softmax",
    }


def test_an_embedding_that_no_fusion_took_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    graph = open_case("eurobert-features", tmp_path_factory).graph.copy()
    graph.add_input("token_type_ids", ValueType("i32", ("tokens",)))
    next(node for node in graph.nodes if node.op == "embedding").inputs[0] = "token_type_ids"
    with pytest.raises(UnsupportedModelError, match="an embedding of 'token_type_ids' has no step of its own"):
        _plan(graph, "f32", TARGETS["scalar"])


def test_a_window_stands_in_no_stage_with_what_makes_its_rows(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Another thread may be making them."""
    graph = open_case("deberta-v2-conv", tmp_path_factory).graph.copy()
    (window,) = [node for node in graph.nodes if node.op == "window_rows"]
    window.inputs = ["encoder.layer.0.output.LayerNorm"]
    plan = _plan(graph, "f32", TARGETS["scalar"])
    _core.Plan(plan)
    assert "stage rows\nstep window" in plan


def test_products_add_the_residual(tmp_path_factory: pytest.TempPathFactory) -> None:
    graph = open_case("modernbert-mean", tmp_path_factory).graph
    sums = sum(node.op == "add" for node in graph.nodes)

    def sums_apart(graph: Graph, *without: str) -> int:
        plan = _plan(graph, "f32", replace(TARGETS["scalar"], without=frozenset(without)))
        _core.Plan(plan)
        return len(re.findall(r"^step elementwise .* other=", plan, re.MULTILINE))

    assert sums > 0
    assert sums_apart(graph) == 0
    assert sums_apart(graph, "norm_fusion") == sums
    assert sums_apart(graph, "epilogue_fusion") == sums - 1, "the last one is part of the last norm"
    twice = graph.copy()
    node = next(node for node in twice.nodes if node.op == "add")
    node.inputs = [node.inputs[1]] * 2
    assert sums_apart(twice) == 1, "what is read a second time is written"


def test_what_is_turned_in_place_has_no_other_reader(tmp_path_factory: pytest.TempPathFactory) -> None:
    graph, _ = optimise(open_case("modernbert-mean", tmp_path_factory).graph, QuantSpec("f32"), strict=True)
    rotary = next(node for node in graph.nodes if node.op == "rotary_qkv")
    graph.outputs["embedding"] = rotary.inputs[0]
    tensors = {spec.name: _Offset(0) for spec in stored_specs(graph)}
    with pytest.raises(UnsupportedModelError, match=r"turns .* in place, which others read too"):
        lower(graph, tensors, TARGETS["scalar"])


def test_an_op_without_a_step_is_refused() -> None:
    graph = Graph()
    graph.meta = META
    graph.add_input("token_ids", ValueType("i32", ("tokens",)))
    graph.outputs["last_hidden_state"] = graph.add("position_ids", "token_ids", name="lost", offset=0, skip_id=-1)
    with pytest.raises(UnsupportedModelError, match=r"'lost'.*position_ids.*encast inspect"):
        lower(graph, {}, TARGETS["scalar"])


def test_places_do_not_overlap_while_both_live() -> None:
    sizes = ((640, 3), (65, 1), (1, 7))
    spans = [Lifetime(size, first, first + length) for first in range(12) for size, length in sizes]
    offsets, arena = place_values(spans)
    ends = [offset + span.nbytes for offset, span in zip(offsets, spans, strict=True)]
    assert all(offset % 64 == 0 for offset in offsets)
    assert max(ends) <= arena
    for i, a in enumerate(spans):
        for j, b in enumerate(spans[:i]):
            if a.first <= b.last and b.first <= a.last:
                assert ends[i] <= offsets[j] or ends[j] <= offsets[i]
    # Twelve steps' worth of values reuse the place of four.
    assert arena < sum(span.nbytes for span in spans) / 2


@pytest.mark.parametrize(
    ("weight_bytes", "tiles", "sparse", "rows"),
    [
        (16 << 20, False, False, 24),
        (16 << 20, False, True, 24),
        ((16 << 20) + 1, False, False, 80),
        ((16 << 20) + 1, False, True, _core.SPARSE_TILE_ROWS),
        (1 << 30, True, True, 80),
    ],
)
def test_threads_share_weights_that_no_cache_holds(weight_bytes: int, tiles: bool, sparse: bool, rows: int) -> None:
    target = replace(TARGETS["avx512bf16"], shared_cache_bytes=32 << 20)
    assert target.rows_to_stream(weight_bytes, tiles, sparse) == rows
    assert replace(target, stream_rows=7).rows_to_stream(weight_bytes, tiles, sparse) == 7
