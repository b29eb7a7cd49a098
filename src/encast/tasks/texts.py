"""Checks of what callers pass as texts, before any of it reaches the tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from encast.errors import InputError

__all__ = ["Text", "check_text", "check_texts", "check_texts_or_pairs"]

Text = str | tuple[str, str]
"""One row for the tokenizer: a text, or a pair of texts that the model reads together."""


def check_text(text: object, where: str) -> str:
    """The text as a plain ``str``; raises ``InputError`` for other types and for lone surrogates.

    ``where`` names the text in the message. NUL bytes and empty strings are fine.
    """
    if not isinstance(text, str):
        raise InputError(f"{where} is of type {type(text).__name__}; a str is needed")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where} holds a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}, which is no "
            "Unicode text; decode its source as UTF-16 or with errors='replace', or drop the character"
        ) from None
    return str(text)


def check_texts(texts: object, name: str = "texts") -> list[str]:
    """A list of checked texts; raises ``InputError`` naming the index of a bad one."""
    rows = list(_rows(texts, name))
    for index, text in enumerate(rows):
        # What most texts are needs neither a message's place nor a look for surrogates.
        if type(text) is not str or not text.isascii():
            rows[index] = check_text(text, f"{name}[{index}]")
    return rows


def check_texts_or_pairs(rows: object, name: str = "texts") -> list[Text]:
    """Like ``check_texts``, but a row may also be a pair (tuple or list of two texts)."""
    return [_text_or_pair(row, f"{name}[{index}]") for index, row in enumerate(_rows(rows, name))]


def _text_or_pair(row: object, where: str) -> Text:
    if not isinstance(row, Sequence) or isinstance(row, (str, bytes, bytearray)):
        return check_text(row, where)
    if len(row) != 2:
        raise InputError(f"{where} has {len(row)} parts; a row is one text or a pair of texts")
    return check_text(row[0], f"{where}[0]"), check_text(row[1], f"{where}[1]")


def _rows(rows: object, name: str) -> Iterable[Any]:
    if isinstance(rows, (list, tuple)):
        return rows
    if isinstance(rows, (str, bytes, bytearray)):
        raise InputError(f"{name} is a single {type(rows).__name__}; pass a list, [text] for one text")
    if isinstance(rows, (Mapping, Set)) or not isinstance(rows, Iterable):
        raise InputError(f"{name} is of type {type(rows).__name__}; a list of texts is needed")
    return rows
