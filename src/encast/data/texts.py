"""Texts, or pairs of texts, of a file whose rows must all be good."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from encast.data.datasets.base import text_of
from encast.data.readers import open_rows
from encast.data.rows import BadRow
from encast.errors import InputError

__all__ = ["read_texts"]


def read_texts(
    path: str | os.PathLike[str], columns: Sequence[str], format: str = "auto"
) -> Iterator[str | tuple[str, str]]:
    """The text of one column, or the pair of two, of every row that ``open_rows`` reads. Raises ``InputError`` for a
    file or a row that cannot be read."""
    with open_rows(path, columns, format) as reader:
        for row in reader:
            if isinstance(row, BadRow):
                raise InputError(f"{path}: row {row.number}: {row.reason}; correct or drop it")
            values = [row.values[column] for column in columns]
            for column, value in zip(columns, values, strict=True):
                try:
                    text_of(value)
                except TypeError:
                    raise InputError(f"{path}: row {row.number}: {column!r} is no text; name another column") from None
                except ValueError as error:
                    raise InputError(f"{path}: row {row.number}: {column!r}: {error}") from None
            first, *second = map(str, values)
            yield (first, second[0]) if second else first
