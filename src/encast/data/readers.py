"""Row readers: one row after the other, in bounded memory; what cannot be read comes as a ``BadRow``."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import PurePath
from types import TracebackType
from typing import Any, Generic, TypeVar

from encast.data.csv_records import CsvRecord, parse_records
from encast.data.remote import is_url, random_access
from encast.data.rows import BadRow, Row, Span
from encast.data.source import MAX_ROW_BYTES, Line, Source
from encast.errors import InputError

__all__ = ["FORMATS", "CsvReader", "JsonlReader", "RowReader", "TextReader", "format_of", "need_columns", "open_rows"]


R = TypeVar("R", Line, CsvRecord)


class RowReader(ABC):
    """Iterates over ``Row`` and ``BadRow`` in the order of the input; a context manager."""

    @abstractmethod
    def __iter__(self) -> Iterator[Row | BadRow]: ...

    @abstractmethod
    def spans(self, rows: int) -> Iterator[Span]:
        """The whole input in spans of so many rows, bad ones counted; in place of iterating."""

    @abstractmethod
    def fraction(self) -> float | None:
        """How much has been read, 0 to 1; None when nobody knows."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> RowReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _LineReader(RowReader, Generic[R]):
    """What is a row is told by the lines alone; ``_records`` finds where each begins, ``_row`` reads it."""

    def __init__(self, path: str | os.PathLike[str], columns: Sequence[str], span: Span | None = None) -> None:
        self._source = Source(path)
        self._columns = list(columns)
        self._span = span

    @abstractmethod
    def _records(self) -> Iterator[R]: ...

    @abstractmethod
    def _row(self, record: R) -> Row | BadRow: ...

    def _lines(self) -> Iterator[Line]:
        if self._span:
            self._source.seek(self._span.offset, self._span.first)
        return self._source.lines()

    def __iter__(self) -> Iterator[Row | BadRow]:
        return map(self._row, islice(self._records(), self._span.rows if self._span else None))

    def spans(self, rows: int) -> Iterator[Span]:
        records = self._records()
        for first in records:
            yield Span(first.offset, first.number, 1 + sum(1 for _ in islice(records, rows - 1)))

    def fraction(self) -> float | None:
        return self._source.fraction()

    def close(self) -> None:
        self._source.close()


class TextReader(_LineReader[Line]):
    """A row a line, the line being its only column; an empty line is an empty text."""

    def __init__(self, path: str | os.PathLike[str], columns: Sequence[str], span: Span | None = None) -> None:
        if len(columns) != 1:
            raise InputError(
                f"{path}: lines of text have one column, {', '.join(columns)} are needed; give JSONL, CSV or Parquet, "
                "with --input-format if the file's name does not tell"
            )
        super().__init__(path, columns, span)

    def _records(self) -> Iterator[Line]:
        return self._lines()

    def _row(self, record: Line) -> Row | BadRow:
        text = _decoded(record)
        return text if isinstance(text, BadRow) else Row(record.number, {self._columns[0]: text}, text)


class JsonlReader(_LineReader[Line]):
    """A JSON object a line; blank lines are passed over."""

    def _records(self) -> Iterator[Line]:
        for line in self._lines():
            if line.data[:1] == b"{" or isinstance(text := _decoded(line), BadRow) or text.strip():
                yield line

    def _row(self, record: Line) -> Row | BadRow:
        text = _decoded(record)
        if isinstance(text, BadRow):
            return text
        number = record.number
        try:
            values = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            return BadRow(number, f"malformed JSON: {error}", text)
        if not isinstance(values, dict):
            return BadRow(number, f"a JSON {_kind(values)} stands here; an object is needed", text)
        for column in self._columns:
            if column not in values:
                return BadRow(number, f"no field {column!r}; the fields are {sorted(values)}", text)
        return Row(number, values, text)


class CsvReader(_LineReader[CsvRecord]):
    """CSV as RFC 4180 has it, with a header line; empty lines are passed over."""

    _header: list[str]

    def _records(self) -> Iterator[CsvRecord]:
        records = parse_records(self._source.lines(), MAX_ROW_BYTES)
        for head in islice(records, 1):
            self._header = self._names(head)
            yield from parse_records(self._lines(), MAX_ROW_BYTES) if self._span else records

    def _row(self, record: CsvRecord) -> Row | BadRow:
        number, raw, fields, reason, _ = record
        text = raw.decode("utf-8", "backslashreplace")
        if reason:
            return BadRow(number, reason, text)
        if len(fields) != len(self._header):
            return BadRow(number, f"{len(fields)} fields; the header has {len(self._header)}", text)
        try:
            values = [field.decode() for field in fields]
        except UnicodeDecodeError as error:
            return BadRow(number, f"byte {error.object[error.start]:#04x} is not UTF-8", text)
        return Row(number, dict(zip(self._header, values, strict=True)), text)

    def _names(self, head: CsvRecord) -> list[str]:
        names = [field.decode("utf-8", "backslashreplace") for field in head.fields]
        if head.reason:
            raise InputError(f"{self._source.name}: the header line cannot be read: {head.reason}")
        need_columns(self._source.name, self._columns, names)
        return names


def need_columns(name: str, columns: Sequence[str], present: Sequence[str]) -> None:
    """Raises ``InputError`` when one of ``columns`` is not ``present``, or one of these occurs twice."""
    repeated = sorted({column for column in present if list(present).count(column) > 1})
    if repeated:
        raise InputError(f"{name}: the column names {repeated} occur twice; rename one of each")
    missing = [column for column in columns if column not in present]
    if missing:
        raise InputError(
            f"{name}: no column {', '.join(map(repr, missing))}; the columns are {', '.join(map(repr, present))}: name "
            "the right ones with --text-column and --pair-column"
        )


class ParquetReader(RowReader):
    """A row a row; needs pyarrow, and a file that can be read from its end."""

    def __init__(self, path: str | os.PathLike[str], columns: Sequence[str], span: Span | None = None) -> None:
        from encast.data.arrow import pyarrow, pyarrow_parquet

        if str(path) == "-":
            raise InputError("Parquet cannot be read from standard input, its index is at its end; give a file")
        self._arrow, self._name = pyarrow(), str(path)
        with Source(path):  # for the usual messages when it cannot be opened
            pass
        try:
            stored = random_access(str(path)) if is_url(path) else str(path)
            self._file: Any = pyarrow_parquet().ParquetFile(stored)
        except (OSError, self._arrow.ArrowException) as error:
            raise InputError(
                f"{path}: is not a Parquet file, or a damaged one ({error}); give another --input-format"
            ) from None
        self._rows = int(self._file.metadata.num_rows)
        self._span = span or Span(0, 1, self._rows)
        self._read = self._span.offset
        present = self._file.schema_arrow.names
        need_columns(self._name, columns, present)
        self._columns = list(columns) or present

    def spans(self, rows: int) -> Iterator[Span]:
        for begin in range(0, self._rows, rows):
            yield Span(begin, begin + 1, min(rows, self._rows - begin))

    def _batches(self) -> Iterator[Any]:
        """The rows of the span, as batches: of the groups that hold some, without what goes before and behind."""
        begin, end = self._span.offset, self._span.offset + self._span.rows
        groups: list[int] = []
        at = before = 0
        for group in range(self._file.metadata.num_row_groups):
            rows = int(self._file.metadata.row_group(group).num_rows)
            if at < end and at + rows > begin:
                before = before if groups else begin - at
                groups.append(group)
            at += rows
        left = self._span.rows
        for batch in self._file.iter_batches(batch_size=1024, row_groups=groups, columns=self._columns):
            kept = batch.slice(min(before, batch.num_rows), left)
            before, left = max(0, before - batch.num_rows), left - kept.num_rows
            yield kept

    def __iter__(self) -> Iterator[Row | BadRow]:
        batches = self._batches()
        while True:
            try:
                batch = next(batches, None)
            except (OSError, self._arrow.ArrowException) as error:
                raise InputError(
                    f"{self._name}: damaged after row {self._read} ({error}); fetch the file again"
                ) from None
            if batch is None:
                return
            columns = [self._values(batch.column(at)) for at in range(len(self._columns))]
            for values in zip(*columns, strict=True):
                self._read += 1
                bad = next((value for value in values if isinstance(value, bytes)), None)
                if bad is not None:
                    yield BadRow(self._read, "a string that is not UTF-8", bad.decode("utf-8", "backslashreplace"))
                    continue
                fields = dict(zip(self._columns, values, strict=True))
                yield Row(self._read, fields, json.dumps(fields, default=str, ensure_ascii=False))

    def _values(self, column: Any) -> list[Any]:
        try:
            found: list[Any] = column.to_pylist()
        except UnicodeDecodeError:
            found = []
            for value in column.cast(self._arrow.binary()).to_pylist():
                try:
                    found.append(value if value is None else value.decode())
                except UnicodeDecodeError:
                    found.append(value)
        return found

    def fraction(self) -> float | None:
        return self._read / self._rows if self._rows else None

    def close(self) -> None:
        self._file.close()


FORMATS: dict[str, type[TextReader] | type[JsonlReader] | type[CsvReader] | type[ParquetReader]] = {
    "text": TextReader,
    "jsonl": JsonlReader,
    "csv": CsvReader,
    "parquet": ParquetReader,
}
_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet", ".txt": "text", ".npy": "npy"}

_NOT_LINES_OF_TEXT = (".tsv", ".json", ".npy", ".xlsx", ".arrow", ".feather")


def format_of(path: str | os.PathLike[str]) -> str | None:
    """The format that a file's name tells, ``.gz`` aside; None when it tells none."""
    return _SUFFIXES.get(_suffix(path))


def _suffix(path: str | os.PathLike[str]) -> str:
    name = PurePath(str(path).partition("?")[0] if is_url(path) else path)
    return (name.with_suffix("") if name.suffix == ".gz" else name).suffix.lower()


def open_rows(
    path: str | os.PathLike[str], columns: Sequence[str], format: str = "auto", span: Span | None = None
) -> RowReader:
    """A reader of the rows of a file (its path or URL, see ``data.remote``), or of standard input (``"-"``).

    ``columns`` are those that every row must have; without any, a row has all of the file's. "auto" goes by
    the file's suffix, and takes lines of text where that says nothing. ``span``: of these rows alone, which
    ``RowReader.spans`` found. Raises ``InputError`` when the file cannot be read, misses a column or the format is
    unknown, or when its suffix says that it holds something else.
    """
    if format == "auto" and _suffix(path) in _NOT_LINES_OF_TEXT:
        raise InputError(
            f"{path}: {_suffix(path)} is no format that rows are read from; {', '.join(FORMATS)} are. Convert the "
            "file, or say --input-format text to take its lines as they stand"
        )
    if format == "auto":
        found = format_of(path)
        format = found if found in FORMATS else "text"
    if format not in FORMATS:
        raise InputError(f"input format {format!r} is unknown; {', '.join(FORMATS)} are known")
    return FORMATS[format](path, columns, span)


def _decoded(line: Line) -> str | BadRow:
    if not line.whole:
        return BadRow(
            line.number,
            f"longer than {MAX_ROW_BYTES} bytes; split the row, or check that the file has line ends",
            line.data[: 1 << 16].decode("utf-8", "backslashreplace"),
        )
    try:
        return line.data.decode()
    except UnicodeDecodeError as error:
        return BadRow(
            line.number,
            f"byte {line.data[error.start]:#04x} at {error.start} is not UTF-8",
            line.data.decode("utf-8", "backslashreplace"),
        )


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _kind(value: object) -> str:
    names = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
