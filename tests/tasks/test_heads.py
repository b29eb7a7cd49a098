"""Classification, reranking and mask filling against hand-made logits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_engine import VOCAB, fake_engine
from graphs import META

from encast.errors import InputError
from encast.ir.meta import SIMILARITIES
from encast.tasks.embed import similarities, similarity_of


def test_single_label_scores_are_a_softmax() -> None:
    engine = fake_engine("classify", lambda ids: [1.0, 3.0, -2.0], labels=["low", "high", "none"])
    (result,) = engine.classify(["cat"])
    powers = np.exp([1.0, 3.0, -2.0])
    assert result.label == "high"
    assert result.scores == pytest.approx(dict(zip(["low", "high", "none"], powers / powers.sum(), strict=True)))
    assert result.score == result.scores["high"]


def test_several_labels_have_a_sigmoid_each() -> None:
    engine = fake_engine("classify", lambda ids: [0.0, 2.0, -800.0], problem_type="multi_label")
    (result,) = engine.classify(["cat"])
    assert result.label == "LABEL_1"
    assert result.scores == pytest.approx({"LABEL_0": 0.5, "LABEL_1": 1 / (1 + np.exp(-2.0)), "LABEL_2": 0.0})


@pytest.mark.parametrize(("problem_type", "logits"), [(None, [3.25]), ("regression", [3.25, -1.0])])
def test_a_regression_gives_its_value(problem_type: str | None, logits: list[float]) -> None:
    (result,) = fake_engine("classify", lambda ids: logits, problem_type=problem_type).classify([("who", "cat")])
    assert result.label is None
    assert result.score == 3.25
    assert list(result.scores.values()) == logits


def test_labels_of_one_name_stay_apart() -> None:
    (result,) = fake_engine("classify", lambda ids: [1, 2, 3], labels=["a", "b", "a"]).classify(["cat"])
    assert list(result.scores) == ["a_0", "b", "a_2"]
    assert result.label == "a_2"


def test_texts_and_pairs_may_mix() -> None:
    engine = fake_engine("classify", lambda ids: [len(ids), 0])
    lengths = [r.scores for r in engine.classify(["cat", ("cat", "sat"), ["the cat", "sat"]])]
    assert len({tuple(scores.values()) for scores in lengths}) == 3


def test_rerank_orders_pairs_by_their_logit_and_ties_by_index() -> None:
    values = {"cat": 0.5, "mat": 2.0, "sat": 0.5, "the": -1.0}
    by_id = {VOCAB[word]: value for word, value in values.items()}
    engine = fake_engine("classify", lambda ids: [by_id[int(ids[-2])]])
    assert engine.rerank("who", ["sat", "the", "cat", "mat"]) == [(3, 2.0), (0, 0.5), (2, 0.5), (1, -1.0)]


def test_rerank_keeps_the_order_of_many_equal_documents() -> None:
    engine = fake_engine("classify", lambda ids: [0.5 if ids[-2] == VOCAB["cat"] else 1.0])
    found = engine.rerank("who", ["cat", "mat"] * 40)
    assert [index for index, _ in found] == [*range(1, 80, 2), *range(0, 80, 2)]


def test_rerank_refuses_several_labels() -> None:
    with pytest.raises(InputError, match="one label, this artifact has 2"):
        fake_engine("classify", lambda ids: [0.0, 1.0]).rerank("who", ["cat"])


@pytest.mark.parametrize(
    ("similarity", "scores"),
    [
        (None, {"cat": 0.8, "mat": 1.0}),
        ("cosine", {"cat": 0.8, "mat": 1.0}),
        ("dot", {"cat": 8.0, "mat": 3.0}),
        ("euclidean", {"cat": -np.sqrt(85.0), "mat": -2.0}),
        ("manhattan", {"cat": -13.0, "mat": -2.0}),
    ],
)
def test_rerank_compares_embeddings_as_the_checkpoint_says(similarity: Any, scores: dict[str, float]) -> None:
    vectors = {"who": [1, 0], "cat": [8, 6], "mat": [3, 0]}
    by_id = {VOCAB[word]: vector for word, vector in vectors.items()}
    engine = fake_engine("embed", lambda ids: by_id[int(ids[1])], similarity=similarity, dim=2)
    found = engine.rerank("who", ["cat", "mat"])
    assert {["cat", "mat"][index]: score for index, score in found} == pytest.approx(scores)
    assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)


@pytest.mark.parametrize("name", [None, *SIMILARITIES])
def test_scores_are_those_of_exact_sums_and_of_each_row_alone(name: str | None) -> None:
    rng = np.random.default_rng(4)
    one, rows = rng.standard_normal(385).astype(np.float32), rng.standard_normal((7, 385)).astype(np.float32)
    found = similarities(name, one, rows)
    assert found.dtype == np.float32
    assert found.tolist() == [float(similarities(name, one, row[None])[0]) for row in rows]
    for row, score in zip(rows, found, strict=True):
        a, b = [float(x) for x in one], [float(x) for x in row]
        pairs = list(zip(a, b, strict=True))
        lengths = math.sqrt(math.fsum(x * x for x in a)) * math.sqrt(math.fsum(y * y for y in b))
        exact = {
            "cosine": math.fsum(x * y for x, y in pairs) / lengths,
            "dot": math.fsum(x * y for x, y in pairs),
            "euclidean": -math.sqrt(math.fsum((x - y) ** 2 for x, y in pairs)),
            "manhattan": -math.fsum(abs(x - y) for x, y in pairs),
        }[name or "cosine"]
        assert score == np.float32(exact)


@pytest.mark.parametrize("name", SIMILARITIES)
def test_every_similarity_is_computed(name: str) -> None:
    vectors = np.eye(2, dtype=np.float32)
    assert similarity_of(replace(META, similarity=name))(vectors, vectors).shape == (2, 2)


def _mask_rule(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """At every position the likeliest token is the next one of the text, then "cat"."""
    logits = np.zeros((len(ids), len(VOCAB)), np.float32)
    logits[np.arange(len(ids)), np.roll(ids, -1)] = 5.0
    logits[:, VOCAB["cat"]] += 2.0
    return logits


def test_fill_mask_answers_every_mask_of_every_text() -> None:
    engine = fake_engine("fill_mask", _mask_rule, batch_tokens=256)
    found = engine.fill_mask(["the [MASK] sat", "[MASK] mat [MASK] john"], top_k=2)
    assert [[[one.token for one in mask] for mask in masks] for masks in found] == [
        [["sat", "cat"]],
        [["mat", "cat"], ["john", "cat"]],
    ]
    powers = np.exp(np.r_[5.0, 2.0, np.zeros(len(VOCAB) - 2)])
    assert found[0][0][0].score == pytest.approx(powers[0] / powers.sum())
    assert found[0][0][0].token_id == VOCAB["sat"]
    selects = [select.tolist() for select in engine.runnable.selects]  # type: ignore[attr-defined]
    assert selects in ([[2, 6, 8]], [[2], [1, 3]])


def test_fill_mask_bounds_the_masks_of_a_run() -> None:
    engine = fake_engine("fill_mask", _mask_rule, batch_tokens=1280)  # 10 tokens' worth a mask
    engine.fill_mask(["[MASK] " * 20] * 20)
    assert max(len(select) for select in engine.runnable.selects) <= 128  # type: ignore[attr-defined]


def test_fill_mask_orders_equal_scores_by_id_and_gives_no_more_than_there_are() -> None:
    engine = fake_engine("fill_mask", lambda ids: np.zeros((len(ids), len(VOCAB))))
    ((mask,),) = engine.fill_mask(["[MASK]"], top_k=3)
    assert [one.token_id for one in mask] == [0, 1, 2]
    ((everything,),) = engine.fill_mask(["[MASK]"], top_k=10_000)
    assert len(everything) == len(VOCAB)


def test_fill_mask_needs_a_mask_in_reach() -> None:
    engine = fake_engine("fill_mask", _mask_rule, max_length=8)
    with pytest.raises(InputError, match=r"texts\[1\] has no \[MASK\] within the first 8 tokens"):
        engine.fill_mask(["[MASK]", "cat"])
    with pytest.raises(InputError, match=r"texts\[0\] has no \[MASK\]"):
        engine.fill_mask(["cat " * 20 + "[MASK]"])
    with pytest.raises(InputError, match="top_k"):
        engine.fill_mask(["[MASK]"], top_k=0)
