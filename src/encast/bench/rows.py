"""The rows of an experiment: JSON lines that are whole or absent, and the same as CSV.

A row is plain JSON, one a (system, point); ``SCHEMA`` is its version, ``STATUSES`` what became of it.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from encast.errors import InputError, ResourceError
from encast.files import LineFile, write_whole

__all__ = ["SCHEMA", "STATUSES", "BusyError", "Row", "RowFile", "flatten", "read_rows"]

SCHEMA = 1

STATUSES = ("ok", "unavailable", "disagrees", "unfair", "crashed", "timed_out", "leaked", "failed")

Row = dict[str, Any]


class BusyError(InputError):
    """The rows of a folder are somebody else's."""


class RowFile:
    """``rows.jsonl`` and ``rows.csv`` of a folder. JSON lines are the truth; the CSV is derived from them.

    As long as it is open, no other process can open it.
    """

    def __init__(self, folder: Path) -> None:
        """Reads what is there already; a last line that was cut off by a crash is removed.

        Raises ``ResourceError``, and ``BusyError`` while another has it open.
        """
        self.folder = folder
        self.path, self.table = folder / "rows.jsonl", folder / "rows.csv"
        busy = f"another `encast bench` writes to {folder}; wait for its end or choose another experiment=NAME"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = LineFile(self.path, BusyError(busy), create=True)
        except OSError as error:
            raise ResourceError(_sentence(self.path, error)) from None
        try:
            self._file.cut()
            self._latest = {str(row["key"]): row for row in read_rows(self.path)}
        except BaseException:
            self.close()
            raise

    @property
    def rows(self) -> list[Row]:
        """Of each key the last that is in the file."""
        return list(self._latest.values())

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds the rows, all or none, and has them on the disk when it returns.

        Raises ``ResourceError`` when the disk is full; rows that were there before stay as they were.
        """
        block = b"".join(json.dumps(row, allow_nan=False).encode() + b"\n" for row in rows)
        try:
            self._file.append(block)
        except OSError as error:
            raise ResourceError(f"{_sentence(self.path, error)}; the {len(self.rows)} finished rows are kept") from None
        self._latest.update({str(row["key"]): dict(row) for row in rows})
        try:
            write_whole(self.table, _csv([flatten(row) for row in self.rows]))
        except OSError as error:
            raise ResourceError(
                f"{_sentence(self.table, error)}; all {len(self.rows)} finished rows are in {self.path.name}"
            ) from None

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_rows(path: Path) -> list[Row]:
    """The rows of a ``rows.jsonl``, or of the folder that holds one. Raises ``InputError`` naming the broken line."""
    file = path / "rows.jsonl" if path.is_dir() else path
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InputError(f"{file}: cannot be read ({reason}); name a folder that `encast bench` has written") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{file}, line {number}: no JSON ({error}); remove the line") from None
        if not isinstance(row, dict) or row.get("schema") != SCHEMA or row.get("status") not in STATUSES:
            raise InputError(
                f"{file}, line {number}: no row of `encast bench` (schema {SCHEMA} and a status of "
                f"{', '.join(STATUSES)} are needed); remove the line, or read it with the version that wrote it"
            )
        rows.append(row)
    return rows


def flatten(row: Mapping[str, Any], prefix: str = "") -> Row:
    """Nested mappings as one, keys joined by dots; lists become JSON text."""
    flat: Row = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        elif isinstance(value, (list, tuple)):
            flat[prefix + name] = json.dumps(value)
        else:
            flat[prefix + name] = value
    return flat


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _sentence(path: Path, error: OSError) -> str:
    return f"{path}: cannot be written ({error.strerror or error}); make room, or name another folder with out=FOLDER"
