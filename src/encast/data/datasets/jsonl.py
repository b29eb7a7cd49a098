"""Own evaluation sets as JSONL, a row an object."""

from __future__ import annotations

import json
from typing import Any

from encast.data.datasets.base import Dataset, Labelled, Question, Sentence, text_of
from encast.errors import InputError

__all__ = ["read_jsonl"]

_FORMS = (
    '{"text": ..., "label": ...}, {"text": ..., "score": number} (with "pair" or as "sentence1" and "sentence2" for '
    'pairs), {"question": ..., "context": ..., "answers": [...]} or {"words": [...], "labels": [...]}'
)


def read_jsonl(name: str, text: str) -> Dataset:
    """Rows of one of the forms that the error message lists; the first row decides which.

    Raises ``InputError`` naming the line of a row that does not fit.
    """
    kind = ""
    rows: list[Any] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            own, row = _row(json.loads(line), len(rows))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(
                f"{name}: line {number} does not fit ({type(error).__name__}: {error}); a row is {_FORMS}"
            ) from None
        kind = kind or own
        if own != kind:
            raise InputError(f"{name}: line {number} holds {own}, the lines before {kind}; keep one kind a file")
        rows.append(row)
    return Dataset(name, kind or "classes", rows)


def _row(item: dict[str, Any], index: int) -> tuple[str, Labelled | Question | Sentence]:
    if "words" in item:
        words, labels = tuple(map(text_of, item["words"])), tuple(map(text_of, item["labels"]))
        if len(words) != len(labels):
            raise ValueError(f"{len(words)} words and {len(labels)} labels")
        return "entities", Sentence(words, labels)
    if "context" in item:
        answers = tuple(text_of(answer["text"] if isinstance(answer, dict) else answer) for answer in item["answers"])
        if not answers:
            raise ValueError("no answers")
        question, context = text_of(item["question"]), text_of(item["context"])
        return "answers", Question(str(item.get("id", index)), question, context, answers)
    pair = ("sentence1", "sentence2") if "sentence1" in item else ("text", "pair")
    text = text_of(item[pair[0]])
    both = (text, text_of(item[pair[1]])) if pair[1] in item else text
    if "score" in item:
        return "scores", Labelled(both, float(item["score"]))
    label = item["label"]
    if isinstance(label, float) and not label.is_integer():
        return "scores", Labelled(both, label)
    return "classes", Labelled(both, str(int(label)) if isinstance(label, float) else str(label))
