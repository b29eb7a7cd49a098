"""Extractive question answering over contexts of any length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from encast.errors import InputError
from encast.tasks.classify import softmax
from encast.tasks.session import Run, Session, Steps, need_finite
from encast.tasks.texts import check_text, check_texts
from encast.tasks.tokenize import Encoding

__all__ = ["Answer", "answer"]

F64 = np.ndarray[Any, np.dtype[np.float64]]

_GROUP_QUESTIONS = 64


@dataclass(frozen=True)
class Answer:
    """``text == context[start:end]``; ``score`` is the span's share among the best candidates."""

    text: str
    start: int
    end: int
    score: float


@dataclass(frozen=True, order=True)
class _Span:
    loss: float  # minus the sum of both logits, so that the natural order is the order of preference
    start: int
    end: int


def answer(
    session: Session,
    question: object,
    context: object,
    *,
    stride: int | None = None,
    max_answer_len: int = 30,
    n_best: int = 20,
) -> Steps[Answer | list[Answer]]:
    """What ``Engine.answer`` says. Raises ``InputError``."""
    session.need("answer", "answer")
    for name, value in (("max_answer_len", max_answer_len), ("n_best", n_best)):
        if value < 1:
            raise InputError(f"{name} is {value}; 1 or more is needed")
    if isinstance(question, str) and isinstance(context, str):
        pair = (check_text(question, "question"), check_text(context, "context"))
        (found,) = yield from _answers(session, [pair], stride, max_answer_len, n_best)
        return found
    if isinstance(question, str) or isinstance(context, str):
        raise InputError("question and context are a text and a list; give two texts or two lists of equal length")
    questions, contexts = check_texts(question, "question"), check_texts(context, "context")
    if len(questions) != len(contexts):
        raise InputError(f"there are {len(questions)} questions and {len(contexts)} contexts; give one context each")
    pairs = list(zip(questions, contexts, strict=True))
    return (yield from _answers(session, pairs, stride, max_answer_len, n_best))


def _answers(
    session: Session, pairs: list[tuple[str, str]], stride: int | None, max_answer_len: int, n_best: int
) -> Steps[list[Answer]]:
    answers: list[Answer] = []
    for begin in range(0, len(pairs), _GROUP_QUESTIONS):
        group = pairs[begin : begin + _GROUP_QUESTIONS]
        windows: list[Encoding] = []
        owners: list[int] = []
        for owner, (question, context) in enumerate(group):
            made = session.tokenizer.windows(question, context, stride)
            windows += made
            owners += [owner] * len(made)
        found: list[list[_Span]] = [[] for _ in group]
        for piece in session.pieces(windows):
            logits = need_finite((yield Run("logits", piece))).astype(np.float64)
            for index, window in enumerate(piece.encodings):
                begin_row, end_row = piece.batch.cu_seqlens[index : index + 2]
                spans = _best_spans(window, logits[begin_row:end_row], max_answer_len, n_best)
                found[owners[piece.first + index]] += spans
        answers += [_choose(context, spans, n_best) for (_, context), spans in zip(group, found, strict=True)]
    return answers


def _best_spans(window: Encoding, logits: F64, max_answer_len: int, n_best: int) -> list[_Span]:
    """The ``n_best`` spans of one window, every span of the context considered, best first."""
    inside = np.flatnonzero([part == 1 for part in window.sequence_ids])
    if inside.size == 0:
        return []
    first, count = int(inside[0]), inside.size
    width = min(max_answer_len, count)
    starts = logits[first : first + count, 0]
    ends = np.concatenate([logits[first : first + count, 1], np.full(width - 1, -np.inf)])
    sums = (starts[:, None] + np.lib.stride_tricks.sliding_window_view(ends, width)).ravel()
    keep = min(n_best, sums.size)
    # Everything that ties with the last one kept is sorted too, or a tie would be decided by chance.
    least = np.partition(sums, sums.size - keep)[sums.size - keep]
    places = np.flatnonzero((sums >= least) & np.isfinite(sums))
    places = places[np.argsort(-sums[places], kind="stable")][:keep]
    offsets = window.offsets
    return [
        _Span(-float(sums[at]), offsets[first + at // width][0], offsets[first + at // width + at % width][1])
        for at in places.tolist()
    ]


def _choose(context: str, spans: list[_Span], n_best: int) -> Answer:
    best: dict[tuple[int, int], _Span] = {}
    for span in sorted(spans):
        best.setdefault((span.start, span.end), span)  # windows overlap: the same span may occur twice
    ranked = list(best.values())[:n_best]
    if not ranked:
        return Answer("", 0, 0, 0.0)
    score = float(softmax(-np.array([span.loss for span in ranked]))[0])
    start, end = ranked[0].start, ranked[0].end
    text = context[start:end]
    start += len(text) - len(text.lstrip())  # some tokenizers count the space before a word to the word
    text = text.strip()
    return Answer(text, start, start + len(text), score)
