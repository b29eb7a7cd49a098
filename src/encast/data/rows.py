"""A row, a row that could not be read, and the file that the latter go to."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from encast.errors import ResourceError

__all__ = ["BadRow", "BadRows", "Row", "Span", "bad_row_line"]

_RAW_LIMIT = 1 << 16


@dataclass(frozen=True)
class Row:
    """``number``: the line on which the row begins (Parquet: its place), from 1. ``raw``: as it stood there."""

    number: int
    values: Mapping[str, object]
    raw: str

    def bad(self, reason: str) -> BadRow:
        """This row, set aside."""
        return BadRow(self.number, reason, self.raw)


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used; bytes that are not UTF-8 stand in ``raw`` as ``\\xNN``."""

    number: int
    reason: str
    raw: str


@dataclass(frozen=True)
class Span:
    """Rows of a file that lie one after the other: the first has the number ``first`` and begins at ``offset``, in
    bytes of the unpacked file (Parquet: in rows)."""

    offset: int
    first: int
    rows: int


def bad_row_line(bad: BadRow, **more: object) -> bytes:
    """The line of an error file; ``more`` are fields that go before."""
    record: dict[str, object] = {**more, "row": bad.number, "reason": bad.reason, "raw": bad.raw[:_RAW_LIMIT]}
    if len(bad.raw) > _RAW_LIMIT:
        record["cut"] = True
    return json.dumps(record).encode() + b"\n"  # ASCII, so that lone surrogates survive as escapes


class BadRows:
    """Collects bad rows as JSONL: ``{"row": number, "reason": ..., "raw": ...}``.

    With a path, the file is made with the first bad row; without one, the lines go to stderr. A raw
    row is cut at 65,536 characters (``"cut": true``).
    """

    def __init__(self, path: Path | None) -> None:
        """Removes what an earlier run left at ``path``; raises ``ResourceError`` when it cannot."""
        self.path = path
        self.count = 0
        self._file: BinaryIO | None = None
        if path is not None and path.is_file():
            try:
                path.unlink()
            except OSError as error:
                raise ResourceError(
                    f"{path}: cannot be replaced ({error.strerror}); name another file with --errors"
                ) from None

    def add(self, bad: BadRow) -> None:
        line = bad_row_line(bad)
        self.count += 1
        if self.path is None:
            sys.stderr.write(line.decode())
            return
        try:
            if self._file is None:
                self._file = self.path.open("wb")
            self._file.write(line)
        except OSError as error:
            raise ResourceError(
                f"{self.path}: cannot write the bad row {bad.number} ({error.strerror}); make room or name another "
                "file with --errors"
            ) from None

    def close(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                raise ResourceError(f"{self.path}: cannot be finished ({error.strerror}); make room") from None
