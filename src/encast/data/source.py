"""Where rows come from: a file or standard input, gzipped or not, as bounded lines."""

from __future__ import annotations

import gzip
import io
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, cast

from encast.data.arrow import pyarrow
from encast.data.remote import is_url, open_url, reason_of, shown
from encast.errors import InputError

__all__ = ["MAX_ROW_BYTES", "Line", "Source", "open_text"]

MAX_ROW_BYTES = 1 << 24
"""A longer row is a bad row, so that a file without line ends cannot fill the memory."""

_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class Line:
    """``data`` without its line end; not ``whole``: only the first bytes of a line beyond the limit. ``offset``: the
    bytes of the stream, unpacked, before the line."""

    number: int
    data: bytes
    whole: bool
    end: bytes = b"\n"
    offset: int = 0


def _nothing() -> None:
    pass


class _Packed:
    """What gzip reads from: seeking in it reads all that lies between, and may take minutes."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self.passed = raw, _nothing

    def read(self, size: int = -1) -> bytes:
        self.passed()
        return self._raw.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


class Source:
    """A binary stream with lines; a context manager. ``name`` stands in messages; ``size``: bytes as they are stored, 0
    where nobody knows."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """``"-"`` is standard input; URLs are those of ``data.remote``. Gzip is told by its first bytes. Raises
        ``InputError``, and ``ResourceError`` where a URL needs pyarrow."""
        self.name = "standard input" if str(path) == "-" else shown(path)
        self._path = str(path)
        self._failures: tuple[type[Exception], ...] = (OSError,)
        if str(path) == "-":
            if sys.stdin is None:
                raise InputError("standard input is closed; give a file")
            self._raw: BinaryIO = sys.stdin.buffer
            self.size = 0
        elif is_url(path):
            self._raw, self.size = open_url(str(path))
            self._failures = (OSError, ValueError, pyarrow().ArrowException)
        else:
            try:
                self._raw = Path(path).open("rb")  # noqa: SIM115, closed by close
            except OSError as error:
                raise InputError(
                    f"{self.name}: cannot be read ({error.strerror}); give a readable file, or - for standard input"
                ) from None
            self.size = os.fstat(self._raw.fileno()).st_size
        self._offset = self._number = 0
        self.stream: BinaryIO = self._raw
        self._packed = _Packed(self._raw)
        with self._reading(0):
            peeked = cast(io.BufferedReader, self._raw).peek(2)[:2]
        if peeked == _GZIP:
            packed = gzip.GzipFile(fileobj=cast(BinaryIO, self._packed))
            self.stream = cast(BinaryIO, io.BufferedReader(packed, 1 << 16))

    def fraction(self) -> float | None:
        """How much has been read, 0 to 1; None for streams without a size."""
        if not self.size or self._raw.closed:
            return None
        return min(1.0, self._raw.tell() / self.size)

    def lines(self, max_bytes: int = MAX_ROW_BYTES) -> Iterator[Line]:
        """Lines ended by LF or CRLF, without a leading byte order mark; memory is bounded by ``max_bytes``."""
        number, offset = self._number, self._offset
        while True:
            with self._reading(number):
                data = self.stream.readline(max_bytes + 2)
            if not data:
                return
            number, begin, offset = number + 1, offset, offset + len(data)
            whole = data.endswith(b"\n") or len(data) < max_bytes + 2
            if number == 1 and data.startswith(_BOM):
                data = data[len(_BOM) :]
            while not whole and (rest := self._skip(number)):
                offset += len(rest)
                if rest.endswith(b"\n"):
                    break
            end = b"\r\n" if data.endswith(b"\r\n") else b"\n" if data.endswith(b"\n") else b""
            yield Line(number, data[: len(data) - len(end)] if end else data, whole, end, begin)

    def seek(self, offset: int, number: int, passed: Callable[[], None]) -> None:
        """``lines`` goes on at line ``number``, which begins at ``offset``; gzipped data is unpacked up to there, and
        ``passed`` is called with each piece of it; what it raises ends that."""
        self._offset, self._number = offset, number - 1
        with self._reading(number - 1):
            self._packed.passed = passed
            try:
                self.stream.seek(offset)
            finally:
                self._packed.passed = _nothing

    def _skip(self, number: int) -> bytes:
        with self._reading(number):
            return self.stream.readline(1 << 20)

    def read(self) -> bytes:
        """Everything that is left."""
        with self._reading(0):
            return self.stream.read()

    @contextmanager
    def _reading(self, number: int) -> Iterator[None]:
        try:
            yield
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError(
                f"{self.name}: damaged gzip data after line {number} ({reason_of(error, self._path)}); "
                "fetch the file again"
            ) from None
        except IsADirectoryError:
            raise InputError(f"{self.name}: is a folder; give a file") from None
        except self._failures as error:
            raise InputError(
                f"{self.name}: cannot be read after line {number} ({reason_of(error, self._path)})"
            ) from None

    def close(self) -> None:
        if self._raw is not sys.stdin.buffer:
            self._raw.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_text(path: str | os.PathLike[str]) -> str:
    """A whole small file as text (UTF-8, with or without a byte order mark, gzipped or not)."""
    with Source(path) as source:
        data = source.read()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8; convert the file to UTF-8") from None
