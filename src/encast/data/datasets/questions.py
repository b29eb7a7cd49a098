"""Questions on contexts: their answers in the forms that files have them in, and where these begin."""

from __future__ import annotations

from typing import Any

from encast.data.datasets.base import Question, text_of
from encast.errors import InputError

__all__ = ["check_starts", "question_of"]


def question_of(id: object, question: object, context: object, answers: Any, impossible: object = False) -> Question:
    """A question from a file's values.

    ``answers``: one text ("" for no answer), a list of texts or of ``{"text": ..., "answer_start": ...}`` as SQuAD has
    it, or ``{"text": [...], "answer_start": [...]}`` as the hub has it; ``answer_start`` may be absent or null.
    An empty text in a list is no answer either, as in SQuAD 2.0's own script. ``impossible``: SQuAD 2.0's
    ``is_impossible``. Raises ``TypeError`` and ``KeyError`` for other forms, and ``ValueError`` for answers of an
    impossible question.
    """
    starts: list[Any] = []
    if isinstance(answers, str):
        answers = [answers] if answers else []
    elif isinstance(answers, dict):
        answers, starts = answers["text"], answers.get("answer_start") or []
    elif isinstance(answers, list):
        starts = [one.get("answer_start") for one in answers if isinstance(one, dict)]
        answers = [one["text"] if isinstance(one, dict) else one for one in answers]
    if not isinstance(answers, list) or not isinstance(starts, list):
        raise TypeError(f"{answers!r} is no list of answers")
    if "" in answers:
        starts = [start for answer, start in zip(answers, starts, strict=False) if answer != ""]
        answers = [answer for answer in answers if answer != ""]
    if answers and impossible is True:
        raise ValueError(f"question {str(id)!r} has is_impossible and the answers {answers!r}; it is one or the other")
    return Question(
        str(id),
        text_of(question),
        text_of(context),
        tuple(map(text_of, answers)),
        tuple(_whole(start) for start in starts if start is not None),
    )


def check_starts(where: str, row: Question) -> None:
    """Raises ``InputError`` when only some answers have a start, or one does not stand where its start says."""
    if not row.starts:
        return
    if len(row.starts) != len(row.answers):
        raise InputError(
            f"{where}: question {row.id!r} has {len(row.answers)} answers and {len(row.starts)} answer_start; give "
            "one each, or none"
        )
    for answer, start in zip(row.answers, row.starts, strict=True):
        found = row.context[start : start + len(answer)] if start >= 0 else ""
        if found != answer:
            raise InputError(
                f"{where}: question {row.id!r} has the answer {answer!r} at answer_start {start}, where its context "
                f"has {found!r}; answer_start counts characters from 0: mend it, or leave it out of the file"
            )


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"answer_start is {value!r}; a whole number is needed")
    return value
