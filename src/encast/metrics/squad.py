"""Exact match and F1 of SQuAD 1.1."""

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


def squad_scores(predicted: Mapping[str, str], answers: Mapping[str, Sequence[str]]) -> tuple[float, float]:
    """``(exact match, F1)``: means over all questions; one without a prediction scores 0.

    ``predicted``: question id to text; ``answers``: question id to the annotators' texts.
    """
    if not answers:
        raise InputError("there are no questions to score")
    asked = [(predicted[key], gold) for key, gold in answers.items() if key in predicted]
    exact = sum(exact_match(text, gold) for text, gold in asked) / len(answers)
    return exact, sum(token_f1(text, gold) for text, gold in asked) / len(answers)
