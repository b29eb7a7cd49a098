"""Answers an evaluation set with an engine and scores the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import encast.metrics as metrics
from encast.data.datasets import Dataset, number_of
from encast.engine import Engine
from encast.errors import InputError, UndefinedError
from encast.tasks.classify import Classification, problem_type
from encast.tasks.embed import similarities, similarity_of
from encast.tasks.session import need_finite
from encast.tasks.tag import label_words

__all__ = ["METRICS", "PRIMARY", "Scored", "compare", "metrics_of", "need_bio", "need_measurable", "score"]

METRICS = {
    "classes": ("accuracy", "f1", "f1_macro", "mcc"),
    "scores": ("spearman", "pearson"),
    "answers": ("f1", "exact_match"),
    "entities": ("entity_f1", "entity_precision", "entity_recall"),
    "pairs": ("mrr_at_10", "accuracy_at_1"),
}
"""What a kind of data set is judged by, the usual one first; "f1" of classes where there are two."""

PRIMARY = {kind: names[0] for kind, names in METRICS.items()}
"""The metric that a kind of data set is judged by, unless another one is asked for."""

_BLOCK = 256
_SCORES_AT_ONCE = 1 << 24
"""Of retrieval: 64 MiB, however many documents there are."""
_SCORE_COLUMN = "; if they are numbers, name their column with --score-column"


@dataclass(frozen=True)
class Scored:
    """``metrics`` in points of 100; ``outputs`` are what two models are compared by, see ``compare``."""

    task: str
    rows: int
    metrics: dict[str, float]
    outputs: Any
    seconds: float = 0.0


@dataclass(frozen=True)
class Classes:
    """The outputs of a model of classes, called as the rows call them, in small letters.

    ``probabilities``: a column ``f64[rows]`` for each class; empty where a row may have several classes.
    """

    answers: list[str]
    probabilities: dict[str, np.ndarray[Any, Any]]


def metrics_of(data: Dataset) -> tuple[str, ...]:
    """Those of ``METRICS`` that a model has which was trained on these rows."""
    names = METRICS[data.kind]
    if data.kind == "classes" and len({str(row.gold) for row in data.rows}) != 2:
        return tuple(name for name in names if name != "f1")
    return names


def score(
    engine: Engine,
    data: Dataset,
    progress: Callable[[int], None] = lambda done: None,
    *,
    null_threshold: float | None = None,
) -> Scored:
    """Answers every row and computes all metrics of the task; ``progress`` gets the number of rows done.

    ``null_threshold``: of ``Engine.answer``, for questions; None takes 0 when some of them have no answer (SQuAD 2.0),
    and else answers all. Raises ``InputError`` when the artifact's task and the data set do not go together, or a row
    cannot be answered.
    """
    scorer = _SCORERS.get((data.kind, engine.task))
    if scorer is None:
        fitting = ", ".join(repr(task) for kind, task in _SCORERS if kind == data.kind)
        raise InputError(
            f"{data.name} holds {data.kind}, which an artifact for {engine.task!r} cannot be measured on; it takes one "
            f"for {fitting}{_SCORE_COLUMN if (data.kind, engine.task) == ('classes', 'embed') else ''}"
        )
    if null_threshold is not None and data.kind != "answers":
        raise InputError(
            f"null_threshold is {null_threshold}, {data.name} holds {data.kind}; it is for questions alone"
        )
    need_measurable(data, engine.task)
    options = {} if null_threshold is None else {"null_threshold": null_threshold}
    found, outputs = scorer(engine, data, progress, **options)
    undefined = [name for name, value in found.items() if not np.isfinite(value)]
    if undefined:
        raise UndefinedError(
            f"{', '.join(undefined)} of {len(data.rows)} rows of {data.name} cannot be computed: the answers, or the "
            "gold values, are all equal or not finite; take more rows"
        )
    return Scored(engine.task, len(data.rows), {name: 100.0 * value for name, value in found.items()}, outputs)


def compare(own: Scored, other: Scored) -> dict[str, Any]:
    """How far two models agree on the same rows.

    Embeddings: mean and minimum of the cosine between both models' vectors; otherwise the share of equal
    answers (regression: the largest difference). Classes of which each row has one: also the divergence of ``own``'s
    probabilities from those of ``other``, which tells losses apart that are less than a row of accuracy.
    """
    a, b = own.outputs, other.outputs
    if own.task == "embed":
        if a.shape != b.shape:
            raise InputError(f"the models embed in {a.shape[1]} and {b.shape[1]} dimensions; nothing can be compared")
        cosines = metrics.cosines(a, b)
        return {"agreement": {"cosine_mean": float(cosines.mean()), "cosine_min": float(cosines.min())}}
    if isinstance(a, np.ndarray):
        return {"agreement": {"largest_difference": float(np.max(np.abs(a - b)))}}
    if isinstance(a, Classes):
        agreement = {"equal_answers": _equal(a.answers, b.answers)}
        if a.probabilities and a.probabilities.keys() == b.probabilities.keys():
            p, q = (np.stack([one.probabilities[name] for name in a.probabilities], axis=1) for one in (b, a))
            agreement["kl_divergence"] = metrics.kl_divergence(p, q)
        return {"agreement": agreement}
    return {"agreement": {"equal_answers": _equal(a, b)}}


def _equal(a: Sequence[Any], b: Sequence[Any]) -> float:
    return float(np.mean([x == y for x, y in zip(a, b, strict=True)]))


Progress = Callable[[int], None]
Found = tuple[dict[str, float], Any]


def _blocks(rows: Sequence[Any], progress: Progress) -> Iterator[Sequence[Any]]:
    for begin in range(0, len(rows), _BLOCK):
        yield rows[begin : begin + _BLOCK]
        progress(min(begin + _BLOCK, len(rows)))


def _correlations(predicted: np.ndarray[Any, Any], gold: list[float]) -> dict[str, float]:
    return {"spearman": metrics.spearman(predicted, gold), "pearson": metrics.pearson(predicted, gold)}


def _embed_scores(engine: Engine, data: Dataset, progress: Progress) -> Found:
    vectors, likeness = [], []
    for block in _blocks(data.rows, progress):
        both = engine.embed([text for row in block for text in row.text])
        vectors.append(both)
        for i in range(0, len(both), 2):
            likeness += similarities(engine.meta.similarity, both[i], both[i + 1 : i + 2]).tolist()
    return _correlations(np.array(likeness), [row.gold for row in data.rows]), np.concatenate(vectors)


def _retrieval_scores(engine: Engine, data: Dataset, progress: Progress) -> Found:
    """Every distinct anchor is a query, every distinct positive a document that it may find."""
    documents = {text: index for index, text in enumerate(dict.fromkeys(row.positive for row in data.rows))}
    relevant: dict[str, list[int]] = {}
    for row in data.rows:
        relevant.setdefault(row.anchor, []).append(documents[row.positive])
    texts = [*relevant, *documents]
    blocks = _blocks(texts, lambda done: progress(done * len(data.rows) // len(texts)))
    vectors = need_finite(np.concatenate([engine.embed(list(block)) for block in blocks]))
    queries, found = vectors[: len(relevant)], vectors[len(relevant) :]
    similarity, wanted = similarity_of(engine.meta), list(relevant.values())
    ranks = []
    step = min(_BLOCK, max(1, _SCORES_AT_ONCE // len(found)))
    for begin in range(0, len(queries), step):
        part = queries[begin : begin + step]
        columns = [similarity(part, found[at : at + _BLOCK]) for at in range(0, len(found), _BLOCK)]
        ranks.append(metrics.first_ranks(np.concatenate(columns, axis=1), wanted[begin : begin + step]))
    return metrics.retrieval_scores(np.concatenate(ranks)), vectors


def _classified(engine: Engine, data: Dataset, progress: Progress) -> list[Classification]:
    return [one for block in _blocks(data.rows, progress) for one in engine.classify([row.text for row in block])]


def _regression_scores(engine: Engine, data: Dataset, progress: Progress) -> Found:
    found = _classified(engine, data, progress)
    if found[0].label is not None:
        raise InputError(
            f"{data.name} has scores, the artifact gives the classes {list(found[0].scores)}; it takes one "
            "for regression"
        )
    values = np.array([one.score for one in found])
    return _correlations(values, [row.gold for row in data.rows]), values


def _class_scores(engine: Engine, data: Dataset, progress: Progress) -> Found:
    found = _classified(engine, data, progress)
    if found[0].label is None:
        raise InputError(f"{data.name} has classes, the artifact is a regression and gives a number{_SCORE_COLUMN}")
    labels = list(found[0].scores)
    values = need_finite(np.array([list(one.scores.values()) for one in found]))
    gold = _classes(data, labels)
    predicted = [labels.index(one.label) for one in found if one.label is not None]
    scores = {"accuracy": metrics.accuracy(predicted, gold)}
    if len(labels) == 2:
        scores["f1"] = metrics.f1_binary(predicted, gold)
    scores["f1_macro"] = metrics.f1_macro(predicted, gold)
    scores["mcc"] = metrics.matthews(predicted, gold)
    # Another model may have the classes in another order: what is compared is called as the rows call it.
    called = {place: str(row.gold) for place, row in zip(gold, data.rows, strict=True)}
    names = [called.get(place, label).casefold() for place, label in enumerate(labels)]
    probabilities = {}
    if problem_type(engine.meta, len(labels)) == "single_label" and len(set(names)) == len(names):
        probabilities = dict(zip(names, values.T, strict=True))
    return scores, Classes([names[place] for place in predicted], probabilities)


def _classes(data: Dataset, labels: list[str]) -> list[int]:
    """The places of the gold labels among the model's: by name, else by number, unless the model's are numbers too."""
    named = all(number_of(label) is None for label in labels)
    places = {str(place): place for place in range(len(labels))} if named else {}
    found: dict[str, int] = {}
    for number, row in enumerate(data.rows, 1):
        text = str(row.gold)
        if text in found:
            continue
        alike = [label for label in labels if label.casefold() == text.casefold()]
        if text in labels or len(alike) == 1:
            found[text] = labels.index(text if text in labels else alike[0])
        elif text in places:
            found[text] = places[text]
        else:
            or_places = f", or their numbers 0 to {len(labels) - 1}" if named else ""
            raise InputError(
                f"{data.name}: row {number} has the label {text!r}; the model's are {labels}{or_places}: give rows "
                "with these labels"
            )
    return [found[str(row.gold)] for row in data.rows]


def _answer_scores(engine: Engine, data: Dataset, progress: Progress, null_threshold: float | None = None) -> Found:
    if null_threshold is None and not all(row.answers for row in data.rows):
        null_threshold = 0.0
    predicted: dict[str, str] = {}
    for block in _blocks(data.rows, progress):
        answers = engine.answer(
            [row.question for row in block], [row.context for row in block], null_threshold=null_threshold
        )
        predicted.update((row.id, answer.text) for row, answer in zip(block, answers, strict=True))
    return metrics.squad_scores(predicted, {row.id: row.answers for row in data.rows}), list(predicted.values())


def need_bio(data: Dataset) -> None:
    """Raises ``InputError`` naming the first label of sentences of which no entity can be read: of parts of speech, or
    of BIOES and BILOU, whose entities would all count as missed."""
    for number, row in enumerate(data.rows, 1):
        for word, label in zip(row.words, row.labels, strict=True):
            if not metrics.is_bio(label):
                raise InputError(
                    f"{data.name}: the word {word!r} of sentence {number} has the label {label!r}; entities are "
                    "measured, by labels O, B-TYPE and I-TYPE: write those of BIOES and BILOU so (S- and U- as B-, E- "
                    "and L- as I-); labels without entities, as parts of speech, are not taken"
                )


def need_measurable(data: Dataset, task: str) -> None:
    """Raises ``InputError`` for rows on which an artifact for ``task`` cannot be measured, whatever it answers."""
    if data.kind == "entities":
        need_bio(data)
    if data.kind == "pairs" and len({row.positive for row in data.rows}) < 2:
        raise InputError(f"{data.name} has a single positive, which every anchor finds; take more rows")
    if (data.kind, task) == ("scores", "embed") and any(isinstance(row.text, str) for row in data.rows):
        raise InputError(f"{data.name} scores single texts; embeddings are measured on pairs of texts")


def _tag_scores(engine: Engine, data: Dataset, progress: Progress) -> Found:
    predicted: list[list[str]] = []
    for block in _blocks(data.rows, progress):
        predicted += engine.drive(label_words(engine.session, [row.words for row in block]))
    found = metrics.entity_f1(predicted, [row.labels for row in data.rows])
    return {"entity_f1": found.f1, "entity_precision": found.precision, "entity_recall": found.recall}, predicted


_SCORERS: dict[tuple[str, str], Callable[..., Found]] = {
    ("scores", "embed"): _embed_scores,
    ("pairs", "embed"): _retrieval_scores,
    ("scores", "classify"): _regression_scores,
    ("classes", "classify"): _class_scores,
    ("answers", "answer"): _answer_scores,
    ("entities", "tag"): _tag_scores,
}
