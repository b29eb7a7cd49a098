"""Metrics against their definitions, known values and published scores."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encast import metrics
from encast.errors import InputError
from encast.metrics.squad import normalize_answer

SQUAD = Path(__file__).resolve().parents[3] / "shared" / "data" / "squad-v1.1"


def test_pearson_and_spearman_of_known_data() -> None:
    # Anscombe's first set: the correlation is 0.81642 by its construction.
    x = [10, 8, 13, 9, 11, 14, 6, 4, 12, 7, 5]
    y = [8.04, 6.95, 7.58, 8.81, 8.33, 9.96, 7.24, 4.26, 10.84, 4.82, 5.68]
    assert metrics.pearson(x, y) == pytest.approx(0.81642, abs=5e-6)
    # Without ties it is 1 - 6 sum d^2 / (n (n^2 - 1)), and the squares of the ranks' differences sum to 40.
    assert metrics.spearman(x, y) == pytest.approx(1 - 6 * 40 / (11 * 120), abs=1e-12)
    assert metrics.spearman([1, 2, 3], [10, 100, 1000]) == pytest.approx(1.0)


def test_spearman_gives_ties_their_average_rank() -> None:
    # Ranks (1, 2.5, 2.5, 4) and (1, 2, 3, 4): 4.5 / sqrt(4.5 * 5).
    assert metrics.spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=30))
def test_spearman_is_pearson_of_counted_ranks(pairs: list[tuple[int, int]]) -> None:
    def ranks(values: list[int]) -> list[float]:
        return [sum(v < value for v in values) + (values.count(value) + 1) / 2 for value in values]

    x, y = [a for a, _ in pairs], [b for _, b in pairs]
    expected = metrics.pearson(ranks(x), ranks(y))
    found = metrics.spearman(x, y)
    assert (math.isnan(found) and math.isnan(expected)) or found == pytest.approx(expected, abs=1e-12)


def test_a_constant_has_no_correlation() -> None:
    assert math.isnan(metrics.spearman([1, 1, 1], [1, 2, 3]))


@pytest.mark.parametrize(("x", "y"), [([1], [1]), ([], []), ([1, 2], [1, 2, 3]), ([[1, 2]], [[1, 2]])])
def test_correlation_refuses(x: list[float], y: list[float]) -> None:
    with pytest.raises(InputError):
        metrics.pearson(x, y)


def test_classification_of_a_known_table() -> None:
    # tp 4, fn 1, fp 2, tn 3
    gold = [1] * 5 + [0] * 5
    predicted = [1, 1, 1, 1, 0, 1, 1, 0, 0, 0]
    assert metrics.accuracy(predicted, gold) == 0.7
    assert metrics.f1_binary(predicted, gold) == pytest.approx(8 / 11)
    assert metrics.f1_binary(predicted, gold, positive=0) == pytest.approx(6 / 9)
    assert metrics.f1_macro(predicted, gold) == pytest.approx((8 / 11 + 6 / 9) / 2)
    assert metrics.matthews(predicted, gold) == pytest.approx((4 * 3 - 2 * 1) / math.sqrt(6 * 5 * 5 * 4))


def test_matthews_of_three_classes() -> None:
    # Covariances of one-hot codes, as the definition has it.
    predicted, gold = np.array([0, 1, 2, 2, 1, 0, 0]), np.array([0, 1, 2, 1, 1, 2, 0])
    a, b = np.eye(3)[predicted], np.eye(3)[gold]
    a, b = a - a.mean(0), b - b.mean(0)
    expected = (a * b).sum() / math.sqrt((a * a).sum() * (b * b).sum())
    assert metrics.matthews(predicted, gold) == pytest.approx(expected)


def test_degenerate_classes() -> None:
    assert metrics.matthews([1, 1], [0, 1]) == 0.0
    assert metrics.f1_binary([0, 0], [0, 0]) == 0.0
    with pytest.raises(InputError):
        metrics.accuracy([], [])
    with pytest.raises(InputError):
        metrics.accuracy([1], [1, 0])


@pytest.mark.parametrize(
    ("labels", "spans"),
    [
        ("B-X I-X O B-Y", {(0, 2, "X"), (3, 4, "Y")}),
        ("I-X I-X", {(0, 2, "X")}),
        ("B-X B-X I-X", {(0, 1, "X"), (1, 3, "X")}),
        ("B-X I-Y I-Y", {(0, 1, "X"), (1, 3, "Y")}),
        ("O I-X O I-X", {(1, 2, "X"), (3, 4, "X")}),
        ("B-creative-work I-creative-work", {(0, 2, "creative-work")}),
        ("", set()),
    ],
)
def test_entity_spans(labels: str, spans: set[tuple[int, int, str]]) -> None:
    assert metrics.entity_spans(labels.split()) == spans


@pytest.mark.parametrize(
    ("label", "known"),
    [
        *((label, True) for label in ("O", "B-X", "I-X", "B-creative-work", "I-I")),
        *(
            (label, False)
            for label in ("NOUN", "S-X", "E-X", "L-X", "U-X", "B", "I-", "b-X", "o", "O-X", "", "LABEL_0")
        ),
    ],
)
def test_labels_of_bio(label: str, known: bool) -> None:
    assert metrics.is_bio(label) is known


def test_entity_f1_counts_exact_spans_of_the_right_type() -> None:
    gold = [["B-X", "I-X", "O", "B-Y"], ["B-X", "O"]]
    predicted = [["B-X", "I-X", "O", "B-X"], ["B-X", "I-X"]]
    found = metrics.entity_f1(predicted, gold)
    assert (found.precision, found.recall, found.f1) == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert metrics.entity_f1(gold, gold).f1 == 1.0
    assert metrics.entity_f1([["O"]], [["O"]]).f1 == 0.0
    with pytest.raises(InputError, match="sentence 0"):
        metrics.entity_f1([["O"]], [["O", "O"]])
    with pytest.raises(InputError, match="1 sentences"):
        metrics.entity_f1([["O"]], [])


def test_squad_normalisation() -> None:
    assert normalize_answer("  The  U.S. (an Apple)\tand a_b ") == "us apple and ab"
    assert normalize_answer("theatre another") == "theatre another"


def test_squad_scores_take_the_best_answer_and_miss_what_is_missing() -> None:
    answers = {"a": ["the cat sat", "dog"], "b": ["x y"], "c": ["z"]}
    found = metrics.squad_scores({"a": "Cat!", "b": "x y.", "d": "?"}, answers)
    assert found == {"exact_match": pytest.approx(1 / 3), "f1": pytest.approx((2 / 3 + 1 + 0) / 3)}
    with pytest.raises(InputError):
        metrics.squad_scores({}, {})


@pytest.mark.skipif(not SQUAD.is_dir(), reason=f"{SQUAD} is not there")
@pytest.mark.parametrize(
    ("name", "exact", "f1"), [("bert-ensemble", 86.206, 92.196), ("match-lstm-ensemble", 67.635, 76.756)]
)
def test_squad_scores_equal_the_published_ones(name: str, exact: float, f1: float) -> None:
    from encast.data.datasets import open_dataset

    with gzip.open(SQUAD / f"dev-predictions.{name}.json.gz") as file:
        predicted = json.load(file)
    data = open_dataset(SQUAD / "dev-v1.1.rebuilt.json.gz")
    assert len(data.rows) == 10_570
    found = metrics.squad_scores(predicted, {row.id: row.answers for row in data.rows})
    assert {key: round(100 * value, 3) for key, value in found.items()} == {"exact_match": exact, "f1": f1}


def test_squad_scores_of_questions_without_answers() -> None:
    answers: dict[str, list[str]] = {"a": [], "b": [], "c": [], "d": ["the cat"], "e": ["the dog"], "f": ["x y"]}
    predicted = {"a": "", "b": "The!", "c": "cat", "d": "cat", "e": "", "f": "x"}
    assert metrics.squad_scores(predicted, answers) == {
        "exact_match": pytest.approx(3 / 6),
        "f1": pytest.approx((3 + 2 / 3) / 6),
        "has_ans_exact_match": pytest.approx(1 / 3),
        "has_ans_f1": pytest.approx((1 + 2 / 3) / 3),
        "no_ans_exact_match": pytest.approx(2 / 3),
        "no_ans_f1": pytest.approx(2 / 3),
    }
    assert metrics.squad_scores({"a": ""}, {"a": [], "b": []}) == {
        "exact_match": 0.5, "f1": 0.5, "no_ans_exact_match": 0.5, "no_ans_f1": 0.5
    }  # fmt: skip


def test_texts_of_which_normalising_leaves_nothing() -> None:
    # 1.1 takes them as they are: the same text is an exact match without words in common.
    assert metrics.squad_scores({"a": "."}, {"a": ["the", "x"]}) == {"exact_match": 1.0, "f1": 0.0}
    # 2.0 has them as no answers.
    found = metrics.squad_scores({"a": ".", "b": ".", "c": ""}, {"a": ["the", "x"], "b": ["the"], "c": []})
    assert (found["has_ans_exact_match"], found["has_ans_f1"]) == (0.5, 0.5)


_WORDS = st.sampled_from(["cat", "dog", "the", ".", "x"])
_TEXTS = st.lists(_WORDS, max_size=3).map(" ".join)


@given(st.lists(st.tuples(_TEXTS, st.lists(_TEXTS, max_size=3)), min_size=1, max_size=8))
def test_squad_scores_are_those_of_the_rules_of_2_0(rows: list[tuple[str, list[str]]]) -> None:
    """The rules as ``evaluate-v2.0.py`` states them: an empty side of F1 agrees with an empty side alone."""
    rows = [*rows, ("cat", [])]

    def words(text: str) -> list[str]:
        return [word for word in text.replace(".", "").split() if word != "the"]

    def score(text: str, answers: list[str]) -> tuple[float, float]:
        exact = f1 = 0.0
        for gold in [words(answer) for answer in answers if words(answer)] or [[]]:
            exact = max(exact, float(words(text) == gold))
            rest = list(gold)
            for word in words(text):
                if word in rest:
                    rest.remove(word)
            shared = len(gold) - len(rest)
            if not gold or not words(text):
                f1 = max(f1, float(gold == words(text)))
            elif shared:
                precision, recall = shared / len(words(text)), shared / len(gold)
                f1 = max(f1, 2 * precision * recall / (precision + recall))
        return exact, f1

    scores = {bool(kind): [score(*row) for row in rows if bool(row[1]) == kind] for kind in (True, False)}
    expected = {}
    for prefix, part in ("", scores[True] + scores[False]), ("has_ans_", scores[True]), ("no_ans_", scores[False]):
        if part:
            exact, f1 = np.mean(part, axis=0)
            expected |= {prefix + "exact_match": pytest.approx(exact), prefix + "f1": pytest.approx(f1)}
    predicted, answers = zip(*rows, strict=True)
    assert metrics.squad_scores(dict(enumerate(predicted)), dict(enumerate(answers))) == expected  # type: ignore[arg-type]


def test_ranks_and_scores_of_a_retrieval() -> None:
    scores = [[3, 2, 1], [3, 2, 1], [1, 2, 3], [5, 5, 5], [1, 1, 0]]
    ranks = metrics.first_ranks(scores, [[0], [2], [0, 1], [1], [0, 1, 1]])
    assert ranks.tolist() == [1, 3, 2, 3, 1]  # of equal ones the wrong documents first
    assert metrics.retrieval_scores(ranks) == {
        "accuracy_at_1": pytest.approx(2 / 5),
        "mrr_at_10": pytest.approx((1 + 1 / 3 + 1 / 2 + 1 / 3 + 1) / 5),
    }
    assert metrics.retrieval_scores([10, 11]) == {"accuracy_at_1": 0.0, "mrr_at_10": pytest.approx(0.05)}
    for wrong in ([], [[1]]):
        with pytest.raises(InputError):
            metrics.retrieval_scores(wrong)
    with pytest.raises(InputError, match="for 2 queries"):
        metrics.first_ranks(scores, [[0], [1]])


def test_cosines() -> None:
    found = metrics.cosines([[1, 0], [1, 1], [0, 0], [2, 0]], [[2, 0], [1, 0], [1, 1], [-1, 0]])
    np.testing.assert_allclose(found, [1, math.sqrt(0.5), 0, -1], atol=1e-15)
    with pytest.raises(InputError):
        metrics.cosines([[1]], [[1, 2]])


def test_kl_divergence() -> None:
    assert metrics.kl_divergence([[0.25, 0.75], [1, 0]], [[0.25, 0.75], [1, 0]]) == 0
    assert metrics.kl_divergence([[1, 0], [0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]]) == pytest.approx(math.log(2) / 2)
    assert 700 < metrics.kl_divergence([[1, 0]], [[0, 1]]) < math.inf
    # Of sums in another order; "-0.000000" would be shown.
    assert metrics.kl_divergence([[0.1 + 0.2, 0.7]], [[0.3, 0.7 + 1e-16]]) == 0
    assert math.isnan(metrics.kl_divergence([[math.nan, 1]], [[0.5, 0.5]]))
    for p, q in (([[1, 0]], [[1]]), ([1], [1]), (np.zeros((0, 2)), np.zeros((0, 2)))):
        with pytest.raises(InputError, match="two matrices"):
            metrics.kl_divergence(p, q)


def test_spearman_of_nan_is_nan() -> None:
    assert math.isnan(metrics.spearman([1, 2, math.nan, 3], [1, 2, 3, 4]))
