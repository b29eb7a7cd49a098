"""Row writers. Rows are plain records of columns.

A column's shape is "int", "float", "f32", "str", ``[shape]`` or ``{name: shape}``.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from encast.data.arrow import arrow_type, pyarrow, pyarrow_parquet
from encast.data.output import OutputFile
from encast.data.readers import format_of
from encast.errors import InputError, ResourceError

__all__ = [
    "OUTPUT_FORMATS",
    "CsvWriter",
    "JsonlWriter",
    "NpyWriter",
    "ParquetWriter",
    "Record",
    "Writer",
    "open_writer",
    "vector_column",
]

Record = Mapping[str, Any]


class Writer(ABC):
    """Writes records in blocks; ends with ``finish``, or with ``keep`` when a run breaks off."""

    def __init__(self, output: OutputFile, columns: Mapping[str, Any]) -> None:
        self.output = output
        self.columns = columns

    @abstractmethod
    def write(self, records: Sequence[Record]) -> None:
        """Writes records as one block: after a failure all of them are kept or none is."""

    def complete(self) -> None:
        """Ends the file, which still has a temporary name; what is left is ``output.place``."""
        self.output.complete()

    def finish(self) -> None:
        """Completes the file under its final name."""
        self.complete()
        self.output.place()

    def keep(self) -> Path | None:
        """Completes what was written as ``NAME.partial``, a valid file; None when there is nothing to keep."""
        return self.output.keep()


class _BytesWriter(Writer):
    """Formats that are one record after the other; gzipped, every block is a member of its own."""

    def _append(self, block: bytes) -> None:
        if self.output.path.suffix == ".gz":
            block = gzip.compress(block, mtime=0)
        self.output.append(block)


class JsonlWriter(_BytesWriter):
    """A JSON object a line, UTF-8; f32 arrays with the nine digits that tell every f32 apart."""

    def write(self, records: Sequence[Record]) -> None:
        if records:
            self._append("".join(_json(record) + "\n" for record in records).encode())


class CsvWriter(_BytesWriter):
    """CSV (RFC 4180) with a header line; cells that are no plain value hold JSON."""

    def __init__(self, output: OutputFile, columns: Mapping[str, Any]) -> None:
        super().__init__(output, columns)
        self._append(self._lines([list(columns)]))

    def write(self, records: Sequence[Record]) -> None:
        rows = [[self._cell(record[column], shape) for column, shape in self.columns.items()] for record in records]
        if rows:
            self._append(self._lines(rows))

    @staticmethod
    def _lines(rows: Sequence[Sequence[Any]]) -> bytes:
        text = io.StringIO(newline="")
        csv.writer(text).writerows(rows)
        return text.getvalue().encode()

    @staticmethod
    def _cell(value: Any, shape: Any) -> Any:
        return value if isinstance(shape, str) else _json(value)


def _lists(value: Any) -> Any:
    """An array of more than one axis as a list of its rows: Arrow takes no other."""
    return list(value) if isinstance(value, np.ndarray) and value.ndim > 1 else value


class ParquetWriter(Writer):
    """Parquet, a row group a block; needs pyarrow and a regular file."""

    def __init__(self, output: OutputFile, columns: Mapping[str, Any]) -> None:
        super().__init__(output, columns)
        if not output.regular:
            output.discard()
            raise InputError(f"Parquet cannot be written to {output.name}; give a file with --output")
        self._arrow = pyarrow()
        self._schema = self._arrow.schema([(name, arrow_type(shape)) for name, shape in columns.items()])
        # A file object over our descriptor: pyarrow must not open the temporary name a second time.
        self._stream = os.fdopen(os.dup(output.fd), "wb")
        self._writer: Any = pyarrow_parquet().ParquetWriter(self._stream, self._schema)

    def write(self, records: Sequence[Record]) -> None:
        if not records:
            return
        arrays = [
            self._arrow.array([_lists(record[name]) for record in records], self._schema.field(name).type)
            for name in self.columns
        ]
        try:
            self._writer.write_table(self._arrow.Table.from_arrays(arrays, schema=self._schema))
        except OSError as error:
            raise ResourceError(self.output.describe(error)) from None
        self.output.size = self._stream.tell()

    def complete(self) -> None:
        self._close()
        self.output.complete()

    def keep(self) -> Path | None:
        try:
            self._close()
        except ResourceError:
            self.output.discard()  # without its index at the end a Parquet file cannot be read
            return None
        return self.output.keep(cut=False)

    def _close(self) -> None:
        try:
            self._writer.close()
            self._stream.close()
        except OSError as error:
            raise ResourceError(self.output.describe(error)) from None


def vector_column(columns: Mapping[str, Any]) -> str:
    """The column that npy holds: the only one that is a list, of f32; raises ``InputError`` when there is none."""
    vectors = [name for name, shape in columns.items() if isinstance(shape, list)]
    if [columns[name] for name in vectors] != [["f32"]]:
        raise _no_npy("only embeddings are one vector a row")
    return vectors[0]


def _no_npy(why: str) -> InputError:
    return InputError(f"npy cannot be written here: {why}; choose --format jsonl, csv or parquet")


class NpyWriter(Writer):
    """One f32 matrix, a row a record, from the only column that is a list; needs a regular file."""

    _HEADER = 128

    def __init__(self, output: OutputFile, columns: Mapping[str, Any], width: int | None) -> None:
        super().__init__(output, columns)
        try:
            self._column = vector_column(columns)
            if width is None or not output.regular:
                raise _no_npy(f"{output.name} is no regular file")
        except InputError:
            output.discard()
            raise
        self._width, self._rows = width, 0
        output.append(self._header())

    def _header(self) -> bytes:
        # NPY format 1.0: magic, version, length of the header, a dict as text, spaces, a line feed.
        text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({self._rows}, {self._width}), }}"
        return (
            b"\x93NUMPY\x01\x00"
            + (self._HEADER - 10).to_bytes(2, "little")
            + text.ljust(self._HEADER - 11).encode()
            + b"\n"
        )

    def write(self, records: Sequence[Record]) -> None:
        if records:
            block = np.stack([record[self._column] for record in records]).astype("<f4", copy=False)
            self.output.append(block.tobytes())
            self._rows += len(records)

    def complete(self) -> None:
        self.output.patch(self._header())
        self.output.complete()

    def keep(self) -> Path | None:
        if self._rows == 0:
            self.output.discard()
            return None
        # An interrupt may fall between a block and its count: the size is what counts.
        self._rows = (self.output.size - self._HEADER) // (4 * self._width)
        self.output.patch(self._header())
        return self.output.keep()


_WRITERS: dict[str, type[JsonlWriter] | type[CsvWriter] | type[ParquetWriter]] = {
    "jsonl": JsonlWriter,
    "csv": CsvWriter,
    "parquet": ParquetWriter,
}
OUTPUT_FORMATS = (*_WRITERS, "npy")


def open_writer(
    path: str | os.PathLike[str],
    columns: Mapping[str, Any],
    format: str = "auto",
    *,
    width: int | None = None,
    scratch: Path | None = None,
) -> Writer:
    """A writer to a file, or to standard output (``"-"``).

    ``columns``: name to shape. ``width`` is the length of the vectors, which npy needs; ``scratch``: see
    ``OutputFile``. "auto" goes by the file's suffix, and writes JSONL where that says nothing. Raises ``InputError``
    for an unknown format or one that cannot hold the columns, ``ResourceError`` when the file cannot be written.
    """
    if format == "auto":
        found = format_of(path)
        format = found if found in OUTPUT_FORMATS else "jsonl"
    if format not in OUTPUT_FORMATS:
        raise InputError(f"output format {format!r} is unknown; {', '.join(OUTPUT_FORMATS)} are known")
    if format == "parquet":
        pyarrow_parquet()  # before anything is made
    output = OutputFile(path, scratch=scratch)
    return NpyWriter(output, columns, width) if format == "npy" else _WRITERS[format](output, columns)


def _json(value: Any) -> str:
    if isinstance(value, np.ndarray):
        if value.ndim > 1:
            return f"[{', '.join(map(_json, value))}]"
        # One format string for the row takes a third of the time of json.dumps, and half of the bytes.
        return f"[{', '.join(['%.9g'] * len(value)) % tuple(value.tolist())}]"
    if isinstance(value, Mapping):
        return (
            f"{{{', '.join(f'{json.dumps(name, ensure_ascii=False)}: {_json(part)}' for name, part in value.items())}}}"
        )
    if isinstance(value, (list, tuple)) and any(isinstance(part, (np.ndarray, Mapping, list, tuple)) for part in value):
        return f"[{', '.join(map(_json, value))}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
