"""Rows to records: the one way in which a run over rows asks an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from encast.data import BadRow, Row
from encast.engine import Engine
from encast.errors import InputError
from encast.tasks.session import Session
from encast.tasks.table import FileTask, RunOptions, file_task

__all__ = ["Answers", "columns_of_task", "need_options", "task_name"]

_GROUP_ROWS = 1024
_CHARACTERS_A_TOKEN = 4


class Answers:
    """The answers of one engine to rows with these columns."""

    def __init__(self, engine: Engine, spec: FileTask, columns: Sequence[str], options: RunOptions) -> None:
        self._engine, self._spec, self._columns, self._options = engine, spec, columns, options

    def groups(self, rows: Iterable[Row | BadRow]) -> Iterator[list[Row | BadRow]]:
        """Rows in groups of about one run of the model, bad ones in their places; they depend on the rows alone."""
        limit = self._engine.session.batch_tokens * _CHARACTERS_A_TOKEN
        group: list[Row | BadRow] = []
        characters = 0
        for row in rows:
            group.append(row)
            characters += len(row.raw)
            if characters >= limit or len(group) >= _GROUP_ROWS:
                yield group
                group, characters = [], 0
        if group:
            yield group

    def of(self, group: Sequence[Row | BadRow]) -> list[dict[str, Any] | BadRow]:
        """A record, which begins with the number of its row, or a bad row for each, in their order."""
        good = [row for row in group if not isinstance(row, BadRow)]
        answered = iter(self._of_good(good) if good else ())
        return [row if isinstance(row, BadRow) else next(answered) for row in group]

    def _of_good(self, rows: list[Row]) -> list[dict[str, Any] | BadRow]:
        """Bits do not depend on neighbours, so halving finds the bad ones."""
        values = [tuple(row.values[column] for column in self._columns) for row in rows]
        try:
            records = self._engine.drive(self._spec.run(self._engine.session, values, self._options))
        except InputError as error:
            if len(rows) == 1:
                return [rows[0].bad(str(error).replace("texts[0]", "the text"))]
            half = len(rows) // 2
            return self._of_good(rows[:half]) + self._of_good(rows[half:])
        return [{"row": row.number, **record} for row, record in zip(rows, records, strict=True)]


def task_name(session: Session, asked: str) -> str:
    """The task to run; raises ``InputError`` when the artifact has no head for it."""
    name = session.meta.task if asked == "auto" else asked
    file_task(name)
    if name != "features":
        session.need(f"--task {name}", *(("classify", "embed", "embed_tokens") if name == "rerank" else (name,)))
    return name


def columns_of_task(spec: FileTask, text: str | None, pair: str | None) -> list[str]:
    """The columns that rows are asked for, where the user named some; raises ``InputError``."""
    pair = pair or spec.pair
    columns = [text or spec.text, *([pair] if pair else [])]
    if len(set(columns)) != len(columns):
        raise InputError(f"--text-column and --pair-column are both {columns[0]!r}; name two columns")
    return columns


def need_options(session: Session, task: str, options: RunOptions) -> None:
    """Raises ``InputError`` where the model or the task cannot meet the options, before any row is read."""
    rows = {"answer": ("a", "a"), "rerank": ("a", ["a"]), "fill_mask": (session.tokenizer.mask_token or "a",)}
    row = rows.get(task, ("a",))
    # A task checks its options on its way to the first run of the model, which nobody makes here.
    steps = file_task(task).run(session, [row], options)
    try:
        next(steps)
    except StopIteration:
        pass
    finally:
        steps.close()
