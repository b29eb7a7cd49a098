"""Extractive question answering over contexts of any length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from encast.errors import InputError
from encast.tasks.classify import softmax
from encast.tasks.session import Runs, Session, Steps, need_finite
from encast.tasks.texts import check_text, check_texts
from encast.tasks.tokenize import Encoding

__all__ = ["Answer", "answer"]

F64 = np.ndarray[Any, np.dtype[np.float64]]

_GROUP_QUESTIONS = 64


@dataclass(frozen=True)
class Answer:
    """``text == context[start:end]``; ``score`` is the span's share among the best candidates.

    No answer is "" from 0 to 0, and its score the share of "there is none"; see ``Engine.answer``.
    """

    text: str
    start: int
    end: int
    score: float


@dataclass(frozen=True)
class _Options:
    stride: int | None
    at_most_half: bool
    max_answer_len: int
    n_best: int
    null_threshold: float | None


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
    null_threshold: float | None = None,
    at_most_half: bool = False,
) -> Steps[Answer | list[Answer]]:
    """What ``Engine.answer`` says. Raises ``InputError``. ``at_most_half``: see ``Tokenizer.windows``."""
    session.need("answer", "answer")
    for name, value in (("max_answer_len", max_answer_len), ("n_best", n_best)):
        if value < 1:
            raise InputError(f"{name} is {value}; 1 or more is needed")
    if null_threshold is not None and not _is_number(null_threshold):
        raise InputError(f"null_threshold is {null_threshold!r}; a finite number is needed, 0 say, or None")
    options = _Options(stride, at_most_half, max_answer_len, n_best, null_threshold)
    if isinstance(question, str) and isinstance(context, str):
        pair = (check_text(question, "question"), check_text(context, "context"))
        (found,) = yield from _answers(session, [pair], options)
        return found
    if isinstance(question, str) or isinstance(context, str):
        raise InputError("question and context are a text and a list; give two texts or two lists of equal length")
    questions, contexts = check_texts(question, "question"), check_texts(context, "context")
    if len(questions) != len(contexts):
        raise InputError(f"there are {len(questions)} questions and {len(contexts)} contexts; give one context each")
    pairs = list(zip(questions, contexts, strict=True))
    return (yield from _answers(session, pairs, options))


def _answers(session: Session, pairs: list[tuple[str, str]], options: _Options) -> Steps[list[Answer]]:
    answers: list[Answer] = []
    for begin in range(0, len(pairs), _GROUP_QUESTIONS):
        group = pairs[begin : begin + _GROUP_QUESTIONS]
        windows: list[Encoding] = []
        owners: list[int] = []
        for owner, (question, context) in enumerate(group):
            made = session.tokenizer.windows(question, context, options.stride, at_most_half=options.at_most_half)
            windows += made
            owners += [owner] * len(made)
        if options.null_threshold is not None:
            _need_first_token(windows)
        found: list[list[_Span]] = [[] for _ in group]
        nulls = [math.inf] * len(group)
        for run in Runs("logits", session.pieces(windows)):
            logits, piece = need_finite((yield run)).astype(np.float64), run.piece
            for index, window in enumerate(piece.encodings):
                begin_row, end_row = piece.batch.cu_seqlens[index : index + 2]
                owner = owners[piece.first + index]
                found[owner] += _best_spans(window, logits[begin_row:end_row], options.max_answer_len, options.n_best)
                nulls[owner] = min(nulls[owner], float(logits[begin_row].sum()))
        answers += [
            _choose(context, spans, null, options)
            for (_, context), spans, null in zip(group, found, nulls, strict=True)
        ]
    return answers


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _need_first_token(windows: list[Encoding]) -> None:
    """Raises ``InputError`` when a window begins with a token of the question or the context."""
    if any(window.sequence_ids[:1] != [None] for window in windows):
        raise InputError(
            "null_threshold compares with the logits of the first special token ([CLS]), and this tokenizer adds "
            "none; leave null_threshold out"
        )


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


def _choose(context: str, spans: list[_Span], null: float, options: _Options) -> Answer:
    """The best span, or no answer; ``null``: the score of there being none."""
    best: dict[tuple[int, int], _Span] = {}
    for span in sorted(spans):
        best.setdefault((span.start, span.end), span)  # windows overlap: the same span may occur twice
    ranked = list(best.values())[: options.n_best]
    if not ranked:
        return Answer("", 0, 0, 0.0 if options.null_threshold is None else 1.0)
    scores = [-span.loss for span in ranked]
    if options.null_threshold is not None:
        scores.append(null)
    shares = softmax(np.array(scores))
    if options.null_threshold is not None and null - scores[0] > options.null_threshold:
        return Answer("", 0, 0, float(shares[-1]))
    score = float(shares[0])
    start, end = ranked[0].start, ranked[0].end
    text = context[start:end]
    start += len(text) - len(text.lstrip())  # some tokenizers count the space before a word to the word
    text = text.strip()
    return Answer(text, start, start + len(text), score)
