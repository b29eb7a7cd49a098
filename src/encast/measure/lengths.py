"""Lengths of sequences, as users count them: a histogram in words or in a file."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from encast.errors import InputError

__all__ = ["MOST_SEQUENCES", "read_histogram"]

MOST_SEQUENCES = 1 << 20
_MOST_FILE_BYTES = 1 << 24


def read_histogram(text: str) -> list[int]:
    """Lengths from ``16:100,32:50`` (length:sequences), or from the file of that name: JSON ``{"16": 100}`` or
    ``[[16, 100]]``, CSV or TSV with a length and a count a line, with or without a header.

    Raises ``InputError`` naming the entry that is no pair of counts, and its line.
    """
    if ":" in text and not _is_file(text):
        name = "lengths"
        pairs: list[_Place] = [(name, part.split(":")) for part in text.split(",") if part.strip()]
    else:
        pairs, name = _pairs_of_file(Path(text)), text
    lengths: list[int] = []
    for where, pair in pairs:
        length, count = _counts(where, pair)
        if len(lengths) + count > MOST_SEQUENCES:
            raise InputError(f"{where}: more than {MOST_SEQUENCES} sequences; give smaller counts of the same shape")
        lengths += [length] * count
    if not lengths:
        raise InputError(f"{name}: the histogram holds no sequence; give LENGTH:COUNT pairs such as 16:100,128:10")
    # As texts come, long and short ones in turn, and the same ones every time.
    return [int(length) for length in np.random.default_rng(0).permutation(lengths)]


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:  # longer than any name: a histogram in words
        return False


_Place = tuple[str, Sequence[Any]]
"""Where an entry stands, and its fields."""


def _pairs_of_file(path: Path) -> list[_Place]:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(
            f"{path}: cannot be read as a histogram ({reason}); give LENGTH:COUNT,... or a JSON or CSV file"
        ) from None
    if len(data) > _MOST_FILE_BYTES:
        raise InputError(
            f"{path}: more than {_MOST_FILE_BYTES} bytes are no histogram; give a length and a count a line"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8; give JSON or CSV") from None
    if text.lstrip()[:1] in ("{", "["):
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: malformed JSON: {error}") from None
        rows = list(document.items()) if isinstance(document, dict) else document
        return [
            (f"{path}, entry {n}", row if isinstance(row, (list, tuple)) else [row]) for n, row in enumerate(rows, 1)
        ]
    delimiter = "\t" if "\t" in text.strip().partition("\n")[0] else ","
    reader = csv.reader(text.splitlines(), delimiter=delimiter)
    try:
        records: list[_Place] = [(f"{path}:{reader.line_num}", record) for record in reader if "".join(record).strip()]
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num}: malformed CSV: {error}") from None
    header = bool(records) and not any(field.strip().isdigit() for field in records[0][1])
    return records[header:]


def _counts(where: str, pair: Sequence[Any]) -> tuple[int, int]:
    numbers = []
    for field in pair:
        word = str(field).strip()
        if isinstance(field, bool) or not word.isascii() or not word.isdigit() or len(word) > 9:
            break
        numbers.append(int(word))
    if len(pair) != 2 or len(numbers) != 2:
        shown = ":".join(map(str, pair))
        shown = shown if len(shown) <= 40 else f"{shown[:40]}..."
        raise InputError(f"{where}: {shown!r} is no pair of a length and a count of sequences, such as 16:100")
    return numbers[0], numbers[1]
