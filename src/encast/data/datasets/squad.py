"""SQuAD 1.1's JSON."""

from __future__ import annotations

import json

from encast.data.datasets.base import Dataset
from encast.data.datasets.questions import check_starts, question_of
from encast.errors import InputError

__all__ = ["read_squad"]


def read_squad(name: str, text: str) -> Dataset:
    """Every question of ``data > paragraphs > qas``, in order.

    Raises ``InputError`` when that is not the form, or an answer does not stand at its ``answer_start``.

    Questions without an answer (SQuAD 2.0) are refused: a span model for 1.1 has no way to decline.
    """
    try:
        data = json.loads(text)
        rows = [
            question_of(asked["id"], asked["question"], paragraph["context"], asked["answers"])
            for article in data["data"]
            for paragraph in article["paragraphs"]
            for asked in paragraph["qas"]
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{name}: not SQuAD's JSON ({type(error).__name__}: {error}); its form is data > paragraphs > "
            "context, qas > id, question, answers > text"
        ) from None
    for row in rows:
        check_starts(name, row)
        if not row.answers:
            raise InputError(f"{name}: question {row.id!r} has no answer; SQuAD 1.1 is supported, where all have one")
    return Dataset(name, "answers", rows)
