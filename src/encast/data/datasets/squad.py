"""SQuAD's JSON, 1.1 and 2.0."""

from __future__ import annotations

import json
from collections import Counter

from encast.data.datasets.base import Dataset
from encast.data.datasets.questions import check_starts, question_of
from encast.errors import InputError

__all__ = ["read_squad"]


def read_squad(name: str, text: str) -> Dataset:
    """Every question of ``data > paragraphs > qas``, in order.

    Questions that have no answer (SQuAD 2.0) have none here; ``plausible_answers`` are not read. Raises ``InputError``
    when that is not the form, or an answer does not stand at its ``answer_start``.
    """
    try:
        data = json.loads(text)
        rows = [
            question_of(
                asked["id"],
                asked["question"],
                paragraph["context"],
                asked["answers"],
                asked.get("is_impossible"),
            )
            for article in data["data"]
            for paragraph in article["paragraphs"]
            for asked in paragraph["qas"]
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{name}: not SQuAD's JSON ({type(error).__name__}: {error}); its form is data > paragraphs > "
            "context, qas > id, question, answers > text"
        ) from None
    ids = Counter(row.id for row in rows)
    if ids and (common := ids.most_common(1)[0])[1] > 1:
        raise InputError(f"{name}: {common[1]} questions have the id {common[0]!r}; give every question its own")
    for row in rows:
        check_starts(name, row)
    return Dataset(name, "answers", rows)
