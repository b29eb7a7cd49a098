"""bf16 to f32 precision: the engine passes wherever values stand on an edge, and wrong roundings do not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bounds import UNIT
from cases import open_case
from checkpoints import CASES, Case, inputs_of, make_case
from compiled import compiled_case
from edges import largest_unexplained

import encast
from encast import artifact
from encast.backends.cpu import CpuRunnable
from encast.backends.reference import Reference, ops
from encast.batch import Batch

FAST_ELEMENTARY = 16 * UNIT
"""The polynomials' own error: core/simd/README.md states it."""

Array = np.ndarray[Any, Any]


def _unexplained(path: Path, batch: Batch, select: Array | None, output: str) -> float:
    opened = artifact.open(path)
    cpu = CpuRunnable(opened, threads=2)
    answers = {
        one: cpu.run(one, batch, select if one == output else None)
        for one in dict.fromkeys(("last_hidden_state", output))
    }
    cpu.close()
    return largest_unexplained(opened.load_graph(), answers, batch, select, elementary=FAST_ELEMENTARY)


def test_one_rounding_on_an_edge_is_no_fault_however_far_it_carries(tmp_path: Path) -> None:
    """A normalised embedding lies halfway between two bf16 to the last bit of f32.

    Which of them the engine takes moves a sequence of 40 tokens by more than the dtype costs it.
    """
    case = Case("xlm-roberta-answer", "xlm-roberta", "answer", {"layers": 2, "seed": 30})
    batch = Batch.of(inputs_of(case).token_ids)
    path = encast.compile(make_case(tmp_path, case), tmp_path / "edge.encast", dtype="bf16", strict=True)
    assert _unexplained(path, batch, None, "logits") <= 1


@pytest.mark.parametrize(
    "name",
    [
        "bert-classify",
        "mpnet-features",
        "electra-odd-fill_mask",
        "camembert-tag",
        "distilbert-embed-dense",
        "bert-relu",
        "modernbert-features",
        "nomic_bert-own",
        "deberta-v2-features",
        "bert-relative_key_query",
        "eurobert-features",
    ],
)
def test_every_kind_of_output(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    opened = open_case(name, tmp_path_factory)
    assert _unexplained(compiled_case(name, "bf16", tmp_path_factory), opened.batch, opened.select, opened.output) <= 1


def _truncated(x: Array) -> Array:
    return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def _unrounded(x: Array) -> Array:
    return x


@pytest.mark.parametrize("wrong", [_truncated, _unrounded])
@pytest.mark.parametrize("at", [0, 1, 4], ids=["norm", "query", "powers"])
def test_one_wrong_rounding_is_not_explained(
    at: int, wrong: Callable[[Array], Array], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an engine that rounds one value of the first layer, or one head's, in another way."""
    graph = artifact.open(compiled_case("bert-features", "bf16", tmp_path_factory)).load_graph()
    inputs = inputs_of(CASES["bert-features"])
    assert inputs.token_type_ids is not None
    batch = Batch.of([inputs.token_ids[2][:6]], [inputs.token_type_ids[2][:6]])
    states = "last_hidden_state"
    right = Reference(graph).run(states, batch)
    assert largest_unexplained(graph, {states: right}, batch, elementary=FAST_ELEMENTARY) <= 1

    calls = itertools.count()
    rounded = ops._bf16
    with monkeypatch.context() as patched:
        patched.setattr(ops, "_bf16", lambda x: (wrong if next(calls) == at else rounded)(x))
        answer = Reference(graph).run(states, batch)
    assert largest_unexplained(graph, {states: answer}, batch, elementary=FAST_ELEMENTARY) > 10


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_an_answer_that_is_no_number_ends_the_search(number: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    graph = artifact.open(compiled_case("bert-features", "bf16", tmp_path_factory)).load_graph()
    batch = Batch.of([inputs_of(CASES["bert-features"]).token_ids[2][:6]])
    answer = Reference(graph).run("last_hidden_state", batch)
    answer[3, 5] = number
    assert largest_unexplained(graph, {"last_hidden_state": answer}, batch, elementary=FAST_ELEMENTARY) == np.inf
