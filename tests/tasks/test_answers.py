"""Question answering: the best span over all windows, by brute force and by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_engine import VOCAB, fake_engine, tokenizer_json
from hypothesis import given, settings
from hypothesis import strategies as st

from encast.errors import InputError
from encast.tasks.tokenize import Encoding, Tokenizer

WORDS = ["cat", "sat", "mat", "john", "smith", "paris"]


def _point_at(start: str, end: str) -> Any:
    """Logits that are high where the words stand; elsewhere a little lower with every position."""

    def rule(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        logits = np.repeat(-0.001 * np.arange(len(ids))[:, None], 2, axis=1)
        logits[ids == VOCAB[start], 0] += 5.0
        logits[ids == VOCAB[end], 1] += 5.0
        return logits

    return rule


def test_the_span_is_text_of_the_context() -> None:
    context = "the cat, John  Smith, lives in Paris."
    answer = fake_engine("answer", _point_at("john", "smith")).answer("who lives in paris", context)
    assert (answer.text, context[answer.start : answer.end]) == ("John  Smith", "John  Smith")
    assert 0.5 < answer.score <= 1.0


def test_an_answer_is_found_behind_the_first_window() -> None:
    engine = fake_engine("answer", _point_at("john", "smith"), max_length=16)
    context = "the cat sat on mat " * 20 + "john smith" + " the cat sat on mat" * 20
    answer = engine.answer("who", context, stride=2)
    assert (answer.text, answer.start) == ("john smith", context.index("john"))
    assert len(engine.runnable.batches) > 1  # type: ignore[attr-defined]


def test_the_question_is_no_answer() -> None:
    answer = fake_engine("answer", _point_at("who", "who")).answer("who", "the cat")
    assert answer.text in "the cat"


def test_an_answer_is_at_most_as_long_as_asked() -> None:
    engine = fake_engine("answer", _point_at("john", "paris"))
    context = "john cat cat cat paris"
    assert engine.answer("who", context, max_answer_len=5).text == context
    assert engine.answer("who", context, max_answer_len=4).text != context
    assert len(engine.answer("who", context, max_answer_len=1).text.split()) == 1


def test_an_end_never_lies_before_its_start() -> None:
    answer = fake_engine("answer", _point_at("paris", "john")).answer("who", "john cat paris")
    assert answer.start < answer.end


def test_of_equal_spans_the_first_wins() -> None:
    engine = fake_engine("answer", lambda ids: np.zeros((len(ids), 2)))
    answer = engine.answer("who", "cat sat mat")
    assert (answer.text, answer.score) == ("cat", pytest.approx(1 / 6))


def test_lists_are_answered_one_by_one_and_in_order() -> None:
    engine = fake_engine("answer", _point_at("john", "john"), batch_tokens=20)
    contexts = [f"{'cat ' * i}john {'mat ' * (70 - i)}" for i in range(70)]
    answers = engine.answer(["who"] * 70, contexts)
    assert [answer.start for answer in answers] == [4 * i for i in range(70)]
    assert answers[7] == engine.answer("who", contexts[7])


def _doubtful(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """John with 2 and 2, and [CLS] with 3 and 2, but 1 and 0.5 in a window that has Paris."""
    logits = np.zeros((len(ids), 2))
    logits[ids == VOCAB["john"]] = 2.0
    logits[0] = (1.0, 0.5) if VOCAB["paris"] in ids else (3.0, 2.0)
    return logits


@pytest.mark.parametrize(
    ("threshold", "text"), [(None, "john"), (1.0, "john"), (0.99, ""), (0.0, ""), (-100, ""), (100, "john")]
)
def test_no_answer_wins_by_more_than_the_threshold(threshold: float | None, text: str) -> None:
    found = fake_engine("answer", _doubtful).answer("who", "cat john", null_threshold=threshold)
    assert found.text == text
    spans = np.exp([0.0, 2.0, 4.0])  # cat, cat john, john
    none = 0.0 if threshold is None else np.exp(5.0)
    assert found.score == pytest.approx((spans[2] if text else none) / (spans.sum() + none))
    if not text:
        assert (found.start, found.end) == (0, 0)


def test_the_score_of_no_answer_is_the_least_of_all_windows() -> None:
    engine = fake_engine("answer", _doubtful, max_length=12)
    context = "john " + "cat " * 30
    assert engine.answer("who", context, stride=2, null_threshold=0.0).text == ""
    assert engine.answer("who", context + "paris", stride=2, null_threshold=0.0).text == "john"
    assert engine.answer("who", "paris " + context, stride=2, null_threshold=0.0).text == "john"
    # Of several questions each has its own.
    both = engine.answer(["who", "who"], [context + "paris", context], stride=2, null_threshold=0.0)
    assert [one.text for one in both] == ["john", ""]


def test_a_tokenizer_without_a_first_special_token_cannot_decline() -> None:
    engine = fake_engine("answer", _doubtful, json_text=tokenizer_json(specials=False))
    assert engine.answer("who", "john").text == "john"
    with pytest.raises(InputError, match=r"first special token \(\[CLS\]\), and this tokenizer adds none"):
        engine.answer("who", "john", null_threshold=0.0)


def test_an_empty_context_has_an_empty_answer() -> None:
    answer = fake_engine("answer", _point_at("john", "john")).answer("who", "")
    assert (answer.text, answer.start, answer.end, answer.score) == ("", 0, 0, 0.0)


@pytest.mark.parametrize(
    ("question", "context", "options", "message"),
    [
        ("who", ["cat"], {}, "two texts or two lists"),
        (["who"], "cat", {}, "two texts or two lists"),
        (["who"], ["cat", "mat"], {}, "1 questions and 2 contexts"),
        ("who", "cat", {"max_answer_len": 0}, "max_answer_len"),
        ("who", "cat", {"n_best": 0}, "n_best"),
        ("who", "cat", {"null_threshold": float("nan")}, "null_threshold is nan; a finite number"),
        ("who", "cat", {"null_threshold": True}, "null_threshold is True"),
        ("who", None, {}, "two texts"),
        (["who"], [None], {}, r"context\[0\]"),
    ],
)
def test_refused(question: Any, context: Any, options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fake_engine("answer", _point_at("cat", "cat")).answer(question, context, **options)


def _noise(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Logits that depend on a window's length and every position, with ties."""
    state = np.random.RandomState([len(ids), int(ids.sum())])
    return state.randint(-6, 7, (len(ids), 2)).astype(np.float32)


def _brute(windows: list[Encoding], max_answer_len: int) -> float:
    best = -np.inf
    for window in windows:
        logits = _noise(np.array(window.ids))
        inside = [i for i, part in enumerate(window.sequence_ids) if part == 1]
        for i in inside:
            for j in inside:
                if i <= j < i + max_answer_len:
                    best = max(best, float(logits[i, 0] + logits[j, 1]))
    return best


@settings(max_examples=60)
@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=60), st.integers(1, 8), st.integers(0, 3))
def test_no_allowed_span_scores_higher(words: list[str], max_answer_len: int, stride: int) -> None:
    from encast.tasks.answer import _best_spans

    tokenizer: Tokenizer = fake_engine("answer", max_length=12).session.tokenizer
    windows = tokenizer.windows("who is", " ".join(words), stride)
    best = max(
        -span.loss
        for w in windows
        for span in _best_spans(w, _noise(np.array(w.ids)).astype(np.float64), max_answer_len, 3)
    )
    assert best == _brute(windows, max_answer_len)
