"""Rows of a file as requests: every one of them, or an error that says which cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from encast.data.readers import open_rows
from encast.data.rows import BadRow
from encast.errors import InputError
from encast.tasks.texts import Text, check_text

__all__ = ["read_texts", "read_whole"]

_NAMED_BROKEN = 3
"""Of the rows of a file; who has more mends them by one rule."""

_T = TypeVar("_T")


def read_texts(path: str, columns: Sequence[str], format: str = "auto") -> list[Text]:
    """The texts (two columns: pairs) of every row; raises as ``read_whole``."""

    def made(values: Mapping[str, object], where: str) -> Text:
        texts = [check_text(values[column], f"{where}: {column}") for column in columns]
        return texts[0] if len(texts) == 1 else (texts[0], texts[1])

    return read_whole(path, columns, made, format)


def read_whole(
    path: str, columns: Sequence[str], make: Callable[[Mapping[str, object], str], _T], format: str = "auto"
) -> list[_T]:
    """What ``make`` makes of every row's values; its second argument is the row's place, ``FILE:LINE``.

    A row that cannot be read, or of which ``make`` raises ``InputError``, would change what is measured, so none is
    passed over: raises ``InputError`` with the number of such rows, and file, line and reason of the first few.
    """
    rows: list[_T] = []
    broken: list[str] = []
    count = 0
    with open_rows(path, columns, format) as reader:
        for row in reader:
            try:
                if isinstance(row, BadRow):
                    raise InputError(f"{path}:{row.number}: {row.reason}")
                made = make(row.values, f"{path}:{row.number}")
            except InputError as error:
                count += 1
                if count <= _NAMED_BROKEN:
                    broken.append(str(error))
                continue
            rows.append(made)
    if count:
        which = "1 row cannot" if count == 1 else f"{count:,} rows cannot"
        more = f"; and {count - len(broken):,} more" if count > len(broken) else ""
        raise InputError(f"{path}: {which} be read: {'; '.join(broken)}{more}; mend or remove what is broken")
    return rows
