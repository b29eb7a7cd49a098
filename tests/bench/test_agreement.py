"""Agreement with the float64 reference, which is computed once."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from lab import TINY

from encast.backends.reference import Reference as Evaluator
from encast.batch import Batch
from encast.bench import agreement
from encast.bench.agreement import LEAST_COSINE, Reference, plain_graph
from encast.bench.config import load_jobs
from encast.bench.models import make_model
from encast.bench.peers.base import DTYPES, ModelFiles
from encast.errors import ResourceError

BATCHES = [Batch.of([[5, 6, 7], [8, 9]]), Batch.of([[1, 2, 3], [4, 5]])]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def model(cache: Path) -> ModelFiles:
    (job,) = load_jobs(TINY)
    return make_model(job.model, cache)


@pytest.fixture(scope="module")
def reference(model: ModelFiles, cache: Path) -> Reference:
    made = Reference(model, cache)
    made.prepare(BATCHES)
    return made


@pytest.fixture(scope="module")
def outputs(model: ModelFiles) -> list[tuple[Batch, Any]]:
    evaluator = Evaluator(plain_graph(model.checkpoint))
    return [(batch, evaluator.run("last_hidden_state", batch)) for batch in BATCHES]


def test_the_reference_agrees_with_itself(reference: Reference, outputs: list[tuple[Batch, Any]]) -> None:
    found = reference.compare(outputs, "f32")
    assert found.ok
    assert found.tokens == 10
    assert found.cosine_least > 1 - 1e-12
    assert found.sequence_least > 1 - 1e-12
    assert found.largest_difference < 1e-6
    assert found.record()["bound"] == LEAST_COSINE["f32"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bound_is_the_dtype_s(reference: Reference, outputs: list[tuple[Batch, Any]], dtype: str) -> None:
    """Noise that turns every state by a known angle, just within the bound and just beyond it."""

    def turned(cosine: float) -> list[tuple[Batch, Any]]:
        rng = np.random.default_rng(0)
        found = []
        for batch, states in outputs:
            other = rng.standard_normal(states.shape)
            other -= states * ((other * states).sum(1) / (states * states).sum(1))[:, None]
            other *= (np.linalg.norm(states, axis=1) / np.linalg.norm(other, axis=1))[:, None]
            found.append((batch, cosine * states + np.sqrt(1 - cosine**2) * other))
        return found

    slack = (1 - LEAST_COSINE[dtype]) / 10
    within = reference.compare(turned(LEAST_COSINE[dtype] + slack), dtype)
    beyond = reference.compare(turned(LEAST_COSINE[dtype] - slack), dtype)
    assert within.ok
    assert not beyond.ok
    assert abs(beyond.cosine_mean - (LEAST_COSINE[dtype] - slack)) < slack / 10


def test_what_is_no_state_does_not_agree(reference: Reference, outputs: list[tuple[Batch, Any]]) -> None:
    for wrong in (np.nan, 0.0, np.inf):
        found = reference.compare([(batch, np.full_like(states, wrong)) for batch, states in outputs], "int8")
        assert not found.ok
        assert found.cosine_least == 0
    assert (
        reference.compare([(BATCHES[0], np.full_like(outputs[0][1], np.nan))], "int8").record()["largest_difference"]
        is None
    )
    assert not reference.compare([], "int8").ok


@pytest.mark.parametrize(("dtype", "right"), [("int8", 100), ("bf16", 5000)])
def test_one_wrong_sequence_among_many_does_not_agree(
    reference: Reference, outputs: list[tuple[Batch, Any]], dtype: str, right: int
) -> None:
    batch, states = outputs[0]
    wrong = states.copy()
    wrong[3:] = np.random.default_rng(0).standard_normal(wrong[3:].shape)
    found = reference.compare([*[(batch, states)] * right, (batch, wrong)], dtype)
    assert found.cosine_mean > LEAST_COSINE[dtype], "the mean does not show it"
    assert found.sequence_least < 0.5
    assert not found.ok
    assert f"has a sequence of mean cosine {found.sequence_least:.6f}" in found.reason
    assert reference.compare([(batch, states)] * right, dtype).ok


def test_the_worst_of_each_figure_is_kept(reference: Reference, outputs: list[tuple[Batch, Any]]) -> None:
    batch, states = outputs[0]
    right, swapped = reference.compare([(batch, states)], "int8"), states.copy()
    swapped[3:] = states[4:2:-1]
    wrong = reference.compare([(batch, swapped), (batch, states), (batch, states)], "int8")
    assert wrong.sequence_least < right.sequence_least
    for merged in (right.worst(wrong), wrong.worst(right)):
        assert merged == dataclasses.replace(wrong, tokens=15)


def test_the_reference_is_computed_once(model: ModelFiles, cache: Path, reference: Reference) -> None:
    with mock.patch.object(agreement.subprocess, "run", side_effect=AssertionError("computed again")):
        again = Reference(model, cache)
        again.prepare(BATCHES)
        again.prepare([Batch.of([[4, 5], [5, 6, 7]])])  # the same sequences, in another batch
        with pytest.raises(AssertionError, match="computed again"):
            again.prepare([Batch.of([[4, 5, 6]])])


def test_a_reference_that_fails_says_why(cache: Path, model: ModelFiles) -> None:
    gone = ModelFiles("gone", cache / "nowhere", "no-sha")
    with pytest.raises(ResourceError, match=r"the float64 reference of gone could not be computed: .*nowhere"):
        Reference(gone, cache).prepare(BATCHES)


def test_large_batches_are_checked_in_part(model: ModelFiles, cache: Path) -> None:
    large = [Batch.of([[1 + number % 400, 2, 3, 4] for number in range(2000)]) for _ in range(2)]
    chosen = list(agreement._chosen(large))
    assert sum(len(ids) for ids, _ in chosen) == agreement.CHECKED_TOKENS
    assert chosen == list(agreement._chosen(large)), "another run would check others"


def test_a_sequence_of_every_batch_is_checked(model: ModelFiles, cache: Path) -> None:
    """However long those before it are: each shape may be computed by a program of its own."""
    long = [Batch.of([[number + 1] * 600, [number + 1] * (500 - number)]) for number in range(8)]
    chosen = list(agreement._chosen(long))
    assert sorted(len(ids) for ids, _ in chosen) == [500 - number for number in range(7, -1, -1)]


def test_which_sequences_it_knows(reference: Reference) -> None:
    known = BATCHES[0].token_ids[: BATCHES[0].cu_seqlens[1]].tolist()
    assert reference.sequences(Batch.of([[9, 9, 9], known])) == [1]
    assert reference.sequences(BATCHES[0]) == list(range(BATCHES[0].seqs))
