"""What a data set holds."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Dataset", "Labelled", "Pair", "Question", "Sentence", "number_of", "text_of"]

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


@dataclass(frozen=True)
class Labelled:
    """A text (or a pair of texts) with its class, as written, or its score."""

    text: str | tuple[str, str]
    gold: str | float


@dataclass(frozen=True)
class Pair:
    """Two texts that belong together: a query and what answers it, say. Those of other pairs are its negatives."""

    anchor: str
    positive: str


@dataclass(frozen=True)
class Question:
    """A question on a context, with every annotator's answer; none where the context has no answer (SQuAD 2.0).

    ``starts``: the character of ``context`` at which each answer begins, from 0; empty where the file does not say.
    """

    id: str
    question: str
    context: str
    answers: tuple[str, ...]
    starts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sentence:
    """Words and their BIO labels."""

    words: tuple[str, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Dataset:
    """Rows of one kind.

    ``kind``: "classes" (``Labelled`` by class), "scores" (``Labelled`` by score), "pairs" (``Pair``), "answers"
    (``Question``), "entities" (``Sentence``), or "texts", which have no labels: a ``str`` or a pair of them each.
    """

    name: str
    kind: str
    rows: list[Any]

    @property
    def short_name(self) -> str:
        """Its folder and file, without what differs between machines."""
        return "/".join(Path(self.name).resolve().parts[-2:])

    @property
    def digest(self) -> str:
        """SHA-256 of its kind and rows, wherever they came from."""
        digest = hashlib.sha256(self.kind.encode())
        for row in self.rows:
            digest.update(repr(row).encode("utf-8", "surrogatepass") + b"\n")
        return digest.hexdigest()


def text_of(value: object) -> str:
    """The value, if it is a text; else raises ``TypeError``, and ``ValueError`` for one that no UTF-8 can hold."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a text holds a lone surrogate (U+{ord(value[error.start]):04X}) at character {error.start}, which is no "
            "Unicode; write characters beyond U+FFFF with both halves, or drop it"
        ) from None
    return value


def number_of(text: str) -> float | None:
    """The finite number that a text is, as people write one; None for others, and what only Python takes for one."""
    number = float(text) if _NUMBER.fullmatch(text.strip()) else math.nan
    return number if math.isfinite(number) else None
