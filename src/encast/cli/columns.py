"""The options that name the columns of a table."""

from __future__ import annotations

from collections.abc import Mapping

from encast.errors import InputError

__all__ = ["columns_of"]

_NAMES = {
    "answer": {"text": "question", "pair": "context", "label": "answers"},
    "tag": {"text": "words", "label": "labels"},
}


def columns_of(task: str, named: Mapping[str, str | None]) -> dict[str, str]:
    """The columns that options name, by the names that rows for ``task`` have; ``named``: "text", "pair", "label" and
    "score" to the column, or None. Raises ``InputError``."""
    form = _NAMES.get(task, {name: name for name in named})
    columns: dict[str, str] = {}
    for name, column in named.items():
        if column is None:
            continue
        if name not in form:
            raise InputError(f"--{name}-column is {column!r}; rows for {task!r} have {', '.join(form.values())}")
        if column in columns.values():
            raise InputError(f"two of the columns are {column!r}; name different ones")
        columns[form[name]] = column
    if {"label", "score"} <= columns.keys():
        raise InputError("--label-column and --score-column are both given; a row has a class or a score, name one")
    return columns
