"""Exact match and F1 of SQuAD 1.1 and 2.0."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

from encast.errors import InputError

__all__ = ["exact_match", "normalize_answer", "squad_scores", "token_f1"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation and the articles a, an, the; white space as single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(predicted: str, answers: Sequence[str]) -> float:
    """1 when the normalised prediction equals a normalised answer, else 0."""
    return float(normalize_answer(predicted) in {normalize_answer(answer) for answer in answers})


def token_f1(predicted: str, answers: Sequence[str]) -> float:
    """The highest F1 of the bags of normalised words, over the answers; 0 when they share no word."""
    words = Counter(normalize_answer(predicted).split())
    best = 0.0
    for answer in answers:
        gold = Counter(normalize_answer(answer).split())
        shared = (words & gold).total()
        if shared:
            best = max(best, 2 * shared / (words.total() + gold.total()))
    return best


def squad_scores(predicted: Mapping[str, str], answers: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """``exact_match`` and ``f1``: means over all questions; one without a prediction scores 0.

    ``predicted``: question id to text; ``answers``: question id to the annotators' texts, none where the context has
    no answer. When that is so anywhere, the rules are those of ``evaluate-v2.0.py``, which differ from 1.1's where
    normalising leaves nothing of a text: such answers do not count, and a question without others scores 1 when
    nothing is left of the prediction, else 0. Then there are also the means over the questions with answers,
    ``has_ans_exact_match`` and ``has_ans_f1``, and over those without, ``no_ans_exact_match`` and ``no_ans_f1``.

    Raises ``InputError`` when there are no questions.
    """
    if not answers:
        raise InputError("there are no questions to score")
    if all(answers.values()):
        return _means("", [_score(predicted.get(key), gold) for key, gold in answers.items()])
    by_kind: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for key, gold in answers.items():
        kept = [answer for answer in gold if normalize_answer(answer)]
        by_kind[bool(gold)].append(_score(predicted.get(key), kept))
    scores = _means("", by_kind[True] + by_kind[False]) | _means("no_ans_", by_kind[False])
    return scores | (_means("has_ans_", by_kind[True]) if by_kind[True] else {})


def _score(text: str | None, answers: Sequence[str]) -> tuple[float, float]:
    """Exact match and F1 of one question."""
    if text is None:
        return 0.0, 0.0
    if not answers:
        silent = float(not normalize_answer(text))
        return silent, silent
    return exact_match(text, answers), token_f1(text, answers)


def _means(prefix: str, scores: Sequence[tuple[float, float]]) -> dict[str, float]:
    return {
        f"{prefix}{name}": sum(values) / len(scores)
        for name, values in zip(("exact_match", "f1"), zip(*scores, strict=True), strict=True)
    }
