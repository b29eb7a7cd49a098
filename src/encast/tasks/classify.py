"""Sequence classification and regression, of single texts and of pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from encast.ir.meta import GraphMeta
from encast.tasks.pooling import F64, Pooling, pool_windows, wants_windows
from encast.tasks.session import F32, Piece, Runs, Session, Steps
from encast.tasks.texts import check_texts_or_pairs
from encast.tasks.tokenize import OnLong

__all__ = ["Classification", "classify", "decide", "label_names", "problem_type", "score_rows", "sigmoid", "softmax"]


@dataclass(frozen=True)
class Classification:
    """``scores`` holds every label's score, in the order of the checkpoint's labels.

    Single label: probabilities by softmax; several labels: an own probability each by sigmoid.
    ``label`` and ``score`` are the best of them (the first of equals). Regression: ``label`` is None and
    ``score`` is the (first) value.
    """

    label: str | None
    score: float
    scores: dict[str, float]


def classify(
    session: Session,
    texts_or_pairs: object,
    *,
    on_long: OnLong = "truncate",
    stride: int | None = None,
    pooling: Pooling | None = None,
) -> Steps[list[Classification]]:
    """One ``Classification`` a row; a row is a text or a pair of texts.

    ``on_long="windows"``: of a row that is longer than the model reads, ``scores`` are the mean of its windows' scores
    (by default, or the largest of each), see ``cut_windows`` and ``pool_windows``. Of a pair the second text is shared
    out among the windows. Scores and no logits, whose mean one window that is very sure would decide.
    """
    session.need("classify", "classify")
    rows = check_texts_or_pairs(texts_or_pairs)
    if wants_windows(on_long, stride, pooling):
        return (yield from _pooled(session, session.windows(rows, stride=stride), pooling or "mean"))
    if not rows:
        return []
    logits = yield from score_rows(session, rows, on_long=on_long)
    names = label_names(session.meta, logits.shape[1])
    return [decide(session.meta, row, names) for row in logits.astype(np.float64)]


def score_rows(session: Session, rows: list[Any], *, on_long: OnLong = "truncate") -> Steps[F32]:
    """The raw ``logits: f32[n, labels]`` of checked rows; ``n`` is at least one."""
    logits: list[F32] = []
    for run in Runs("logits", session.stream(rows, on_long=on_long)):
        logits += [(yield run)]
    return np.concatenate(logits)


def problem_type(meta: GraphMeta, labels: int) -> str:
    """The meta's; when the checkpoint names none, one label means regression.

    That is how ``transformers`` trains such a head.
    """
    return meta.problem_type or ("regression" if labels == 1 else "single_label")


def label_names(meta: GraphMeta, labels: int) -> list[str]:
    """A distinct name for every label: the checkpoint's, else ``LABEL_i``."""
    names = list(meta.labels or [])[:labels]
    names += [f"LABEL_{index}" for index in range(len(names), labels)]
    counts = Counter(names)
    return [name if counts[name] == 1 else f"{name}_{index}" for index, name in enumerate(names)]


def softmax(logits: F64) -> F64:
    """Softmax of one row, ``f64[labels]``."""
    powers = np.exp(logits - logits.max())
    return np.asarray(powers / powers.sum())


def sigmoid(logits: F64) -> F64:
    """The sigmoid of every number, without overflow."""
    return np.asarray(0.5 + 0.5 * np.tanh(0.5 * logits))


def decide(meta: GraphMeta, logits: F64, names: list[str]) -> Classification:
    """What the logits of one row, ``f64[labels]``, say; ``names`` are the labels'."""
    return _named(meta, _scores(meta, logits), names)


def _scores(meta: GraphMeta, logits: F64) -> F64:
    kind = problem_type(meta, logits.size)
    if kind == "regression":
        return logits
    return softmax(logits) if kind == "single_label" else sigmoid(logits)


def _named(meta: GraphMeta, scores: F64, names: list[str]) -> Classification:
    all_scores = dict(zip(names, scores.tolist(), strict=True))
    if problem_type(meta, len(names)) == "regression":
        return Classification(None, float(scores[0]), all_scores)
    best = int(np.argmax(scores))
    return Classification(names[best], float(scores[best]), all_scores)


def _pooled(session: Session, windows: Iterable[Piece], pooling: Pooling) -> Steps[list[Classification]]:
    meta = session.meta
    found: list[Classification] = []

    def take(_index: int, scores: F32 | F64, _windows: int) -> None:
        found.append(_named(meta, scores.astype(np.float64), label_names(meta, scores.size)))

    yield from pool_windows(windows, "logits", pooling, lambda row: _scores(meta, row.astype(np.float64)), take)
    return found
