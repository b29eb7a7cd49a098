"""Row readers: one row after the other, in bounded memory; what cannot be read comes as a ``BadRow``."""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, islice
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

from encast.data.csv_records import CsvRecord, parse_records
from encast.data.remote import is_url, random_access, reason_of, shown
from encast.data.rows import BadRow, Row, Span
from encast.data.source import MAX_ROW_BYTES, Line, Source
from encast.errors import InputError

__all__ = ["FORMATS", "CsvReader", "JsonlReader", "RowReader", "TextReader", "format_of", "need_columns", "open_rows"]


R = TypeVar("R", Line, CsvRecord)

_QUOTED, _INNER_CR = re.compile(rb'"[^"]*"'), re.compile(rb"\r(?=[^\r\n])")
_BATCH_ROWS = 1024
"""Of Parquet, unpacked at once."""


def _nothing() -> None:
    pass


class RowReader(ABC):
    """Iterates over ``Row`` and ``BadRow`` in the order of the input; a context manager. One is asked for all rows, for
    ``spans``, or for any number of spans ``at`` which it reads."""

    @abstractmethod
    def __iter__(self) -> Iterator[Row | BadRow]: ...

    @abstractmethod
    def at(self, span: Span, passed: Callable[[], None] = _nothing) -> Iterator[Row | BadRow]:
        """The rows of a span, which ``spans`` found. One behind the last that was read is read on to: nothing between
        them is fetched or unpacked twice. ``passed`` is called now and then while what lies before it is unpacked; what
        it raises ends that."""

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

    def __init__(self, path: str | os.PathLike[str], columns: Sequence[str]) -> None:
        self._source = Source(path)
        self._columns = list(columns)

    def _begin(self, lines: Iterator[Line]) -> Iterator[R]:
        """The records of the whole file."""
        return self._records(lines)

    @abstractmethod
    def _records(self, lines: Iterator[Line]) -> Iterator[R]:
        """The records of lines, the first of which begins one."""

    @abstractmethod
    def _row(self, record: R) -> Row | BadRow: ...

    def __iter__(self) -> Iterator[Row | BadRow]:
        return map(self._row, self._begin(self._source.lines()))

    def at(self, span: Span, passed: Callable[[], None] = _nothing) -> Iterator[Row | BadRow]:
        self._source.seek(span.offset, span.first, passed)
        return map(self._row, islice(self._records(self._source.lines()), span.rows))

    def spans(self, rows: int) -> Iterator[Span]:
        records = self._begin(self._source.lines())
        for first in records:
            yield Span(first.offset, first.number, 1 + sum(1 for _ in islice(records, rows - 1)))

    def fraction(self) -> float | None:
        return self._source.fraction()

    def close(self) -> None:
        self._source.close()


class TextReader(_LineReader[Line]):
    """A row a line, the line being its only column; an empty line is an empty text."""

    def __init__(self, path: str | os.PathLike[str], columns: Sequence[str]) -> None:
        if len(columns) != 1:
            raise InputError(
                f"{shown(path)}: lines of text have one column, {', '.join(columns)} are needed; give JSONL, CSV or "
                "Parquet, with --input-format if the file's name does not tell"
            )
        super().__init__(path, columns)

    def _records(self, lines: Iterator[Line]) -> Iterator[Line]:
        return lines

    def _row(self, record: Line) -> Row | BadRow:
        text = _decoded(record)
        return text if isinstance(text, BadRow) else Row(record.number, {self._columns[0]: text}, text)


class JsonlReader(_LineReader[Line]):
    """A JSON object a line; blank lines are passed over."""

    def _records(self, lines: Iterator[Line]) -> Iterator[Line]:
        for line in lines:
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

    _header: list[str] | None = None

    def _begin(self, lines: Iterator[Line]) -> Iterator[CsvRecord]:
        records = self._records(lines)
        for head in islice(records, 1):
            self._header = self._names(head)
        return records

    def _records(self, lines: Iterator[Line]) -> Iterator[CsvRecord]:
        return parse_records(lines, MAX_ROW_BYTES)

    def at(self, span: Span, passed: Callable[[], None] = _nothing) -> Iterator[Row | BadRow]:
        if self._header is None:
            self._begin(self._source.lines())
        return super().at(span, passed)

    def _row(self, record: CsvRecord) -> Row | BadRow:
        number, raw, fields, reason, _ = record
        text = raw.decode("utf-8", "backslashreplace")
        assert self._header is not None
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
        if _INNER_CR.search(_QUOTED.sub(b"", head.raw)):
            raise InputError(
                f"{self._source.name}: the header line holds CR, with which lines of old Macs end; LF and CRLF are "
                "line ends here: convert the file"
            )
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


class _Unreadable(NamedTuple):
    """In the place of a value; see ``BadRow``."""

    reason: str
    raw: str


class ParquetReader(RowReader):
    """A row a row; needs pyarrow, and a file that can be read from its end."""

    def __init__(self, path: str | os.PathLike[str], columns: Sequence[str]) -> None:
        from encast.data.arrow import pyarrow, pyarrow_parquet

        if str(path) == "-":
            raise InputError("Parquet cannot be read from standard input, its index is at its end; give a file")
        self._arrow, self._path, self._name = pyarrow(), path, shown(path)
        with Source(path) as source:  # for the usual messages when it cannot be opened
            size = source.size
        try:
            self._file: Any = pyarrow_parquet().ParquetFile(_stored(path))
            groups, present = self._file.metadata, self._file.schema_arrow.names
            sizes = [int(groups.row_group(group).num_rows) for group in range(groups.num_row_groups)]
            if min(sizes, default=0) < 0:
                raise self._arrow.ArrowInvalid("it has less than no rows")
        except (OSError, self._arrow.ArrowException) as error:
            raise InputError(
                f"{self._name}: is not a Parquet file, or a damaged one ({reason_of(error, path)}); write it "
                "anew, or name the format that it has"
            ) from None
        self._begins = [0, *accumulate(sizes)]
        """Where each group of rows begins, and the last ends; as the file's index says."""
        self._rows = self._begins[-1]
        self._bytes = size
        self._read = 0
        self._batches: Iterator[Any] = iter(())
        self._batch: Any = None
        self._next, self._end = 0, 0
        """The row that the rest of ``_batch`` begins with, and the end of the group of rows that is open."""
        need_columns(self._name, columns, present)
        self._columns = list(columns) or present

    def spans(self, rows: int) -> Iterator[Span]:
        if self._rows > self._bytes:
            # Rows that are all alike take less than a byte each, and so do rows of an index that lies.
            self._need_rows()
        for begin in range(0, self._rows, rows):
            yield Span(begin, begin + 1, min(rows, self._rows - begin))

    def _need_rows(self) -> None:
        """Reads all rows; raises ``InputError`` where there are fewer than the index says."""
        with self._reading():
            for batch in self._take(0, self._rows):
                self._read += batch.num_rows

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError, RuntimeError, ValueError, self._arrow.ArrowException) as error:
            self._end = 0  # nothing of it is read on from
            raise InputError(
                f"{self._name}: damaged after row {self._read} ({reason_of(error, self._path)}); fetch the file again"
            ) from None

    def _take(self, begin: int, end: int, passed: Callable[[], None] = _nothing) -> Iterator[Any]:
        """The rows as parts of batches. A group of rows stays open: what follows in it is not fetched again."""
        while begin < end:
            if not self._next <= begin < self._end:
                group = bisect_right(self._begins, begin) - 1
                self._next, self._end = self._begins[group], self._begins[group + 1]
                self._batch = None
                self._batches = self._file.iter_batches(
                    batch_size=_BATCH_ROWS, row_groups=[group], columns=self._columns
                )
            while self._batch is None or self._next + self._batch.num_rows <= begin:
                self._next += 0 if self._batch is None else self._batch.num_rows
                passed()
                self._batch = next(self._batches, None)
                if self._batch is None:
                    raise EOFError("its index names more rows")
            skipped = begin - self._next
            part = self._batch.slice(skipped, end - begin)
            self._batch = self._batch.slice(skipped)
            self._next = begin
            begin += part.num_rows
            yield part

    def __iter__(self) -> Iterator[Row | BadRow]:
        return self.at(Span(0, 1, self._rows))

    def at(self, span: Span, passed: Callable[[], None] = _nothing) -> Iterator[Row | BadRow]:
        self._read = span.offset
        batches = self._take(span.offset, span.offset + span.rows, passed)
        while True:
            with self._reading():
                batch = next(batches, None)
            if batch is None:
                return
            columns = [self._values(batch.column(at)) for at in range(len(self._columns))]
            for values in zip(*columns, strict=True):
                self._read += 1
                bad = next((value for value in values if isinstance(value, _Unreadable)), None)
                if bad is not None:
                    yield BadRow(self._read, bad.reason, bad.raw)
                    continue
                fields = dict(zip(self._columns, values, strict=True))
                yield Row(self._read, fields, json.dumps(fields, default=str, ensure_ascii=False))

    def _values(self, column: Any) -> list[Any]:
        """Of a column that holds what Python cannot, that is found by itself."""
        try:
            found: list[Any] = column.to_pylist()
        except Exception:  # whatever it is, the value that it comes from raises it again
            found = list(map(self._value, column))
        return found

    def _value(self, scalar: Any) -> Any:
        try:
            return scalar.as_py()
        except UnicodeDecodeError:
            data = scalar.as_buffer().to_pybytes() if hasattr(scalar, "as_buffer") else b""
            return _Unreadable("a string that is not UTF-8", data.decode("utf-8", "backslashreplace"))
        except MemoryError:
            raise
        except Exception as error:
            return _Unreadable(f"a value that cannot be read ({reason_of(error, self._path)})", "")

    def fraction(self) -> float | None:
        return self._read / self._rows if self._rows else None

    def close(self) -> None:
        self._file.close(force=True)


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


def open_rows(path: str | os.PathLike[str], columns: Sequence[str], format: str = "auto") -> RowReader:
    """A reader of the rows of a file (its path or URL, see ``data.remote``), or of standard input (``"-"``).

    ``columns`` are those that every row must have; without any, a row has all of the file's. "auto" goes by
    the file's suffix, and takes lines of text where that says nothing. Raises ``InputError`` when the file cannot be
    read, misses a column or the format is unknown, or when its suffix says that it holds something else.
    """
    if format == "auto" and _suffix(path) in _NOT_LINES_OF_TEXT:
        raise InputError(
            f"{shown(path)}: {_suffix(path)} is no format that rows are read from; {', '.join(FORMATS)} are. Convert "
            "the file, or say --input-format text to take its lines as they stand"
        )
    if format == "auto":
        found = format_of(path)
        format = found if found in FORMATS else "text"
    if format not in FORMATS:
        raise InputError(f"input format {format!r} is unknown; {', '.join(FORMATS)} are known")
    return FORMATS[format](path, columns)


def _stored(path: str | os.PathLike[str]) -> Any:
    if is_url(path):
        return random_access(str(path))
    # Arrow opens no paths that are not UTF-8.
    return Path(path).open("rb") if any("\ud800" <= letter <= "\udfff" for letter in str(path)) else str(path)


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
