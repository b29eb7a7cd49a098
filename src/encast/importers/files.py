"""Reading the files of a checkpoint: bounded, precise about what went wrong, and recorded.

Every byte that an importer takes from a checkpoint comes through ``Folder``, so that the
provenance lists all files read and so that odd things (pipes, folders where files belong,
dangling links, unreadable files) end in a ``CheckpointError`` and never hang.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import stat
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import numpy as np

from encast.errors import CheckpointError

__all__ = ["CONFIG_LIMIT", "FileLedger", "Folder", "MappedFile", "parse_json", "quote", "refuse_pointer", "shown"]

CONFIG_LIMIT = 64 << 20
"""Bytes that a configuration file may have; real ones have kilobytes."""

_HASH_CHUNK = 1 << 20


def quote(name: object) -> str:
    """A name from a checkpoint as it may stand in a message: escaped and bounded in length."""
    if not isinstance(name, str):
        return f"a value of type {type(name).__name__}"
    return repr(name) if len(name) <= 120 else repr(name[:120]) + "..."


def shown(value: object) -> str:
    """A value of JSON as it may stand in a message: bounded, and not followed into what it contains."""
    if value is None or isinstance(value, (bool, int, float)):
        return json.dumps(value)[:80]
    return quote(value)


def parse_json(data: bytes, where: str) -> Any:
    """Strict JSON: UTF-8, no key twice, no NaN or Infinity; raises ``CheckpointError`` naming ``where``."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise CheckpointError(
                        f"{where}: the key {quote(key)} stands twice in one object; readers disagree on which "
                        "counts, so remove one"
                    )
                seen.add(key)
        return table

    def constant(text: str) -> NoReturn:
        raise CheckpointError(f"{where}: {text} is not JSON; write a finite number or null")

    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not UTF-8 at byte {error.start}; JSON in UTF-8 is needed") from None
    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{where}: not JSON at line {error.lineno}, column {error.colno}: {error.msg}; "
            "the file is damaged or incomplete, so fetch it again"
        ) from None
    except RecursionError:
        raise CheckpointError(f"{where}: JSON nested too deeply; checkpoints need a few levels") from None
    except ValueError as error:  # integers beyond Python's limit of digits
        raise CheckpointError(f"{where}: {error}") from None


def refuse_pointer(head: bytes, where: str) -> None:
    """Raises ``CheckpointError`` when a file that begins with ``head`` is what git leaves for one of git-lfs."""
    if head.startswith(b"version https://git-"):
        raise CheckpointError(f"{where}: a git-lfs pointer, not the file; run `git lfs pull` in the checkpoint")


class MappedFile:
    """A regular file, memory-mapped for reading; pages are read when they are touched.

    The mapping stays valid when the file is renamed or removed. A file that another process truncates
    while it is mapped ends the process with SIGBUS, as with every memory-mapped reader.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _open_regular(path) as handle:
            self.size = os.fstat(handle.fileno()).st_size
            if self.size == 0:
                raise CheckpointError(f"{path}: the file is empty; its download or copy did not finish")
            try:
                self.bytes = mmap.mmap(handle.fileno(), self.size, access=mmap.ACCESS_READ)
            except (OSError, ValueError, OverflowError) as error:
                raise CheckpointError(f"{path}: cannot be memory-mapped ({error})") from error

    def elements(self, dtype: np.dtype[Any], offset: int, count: int) -> np.ndarray[Any, Any]:
        """A read-only view of ``count`` elements that start at byte ``offset``."""
        if count == 0:
            return np.empty(0, dtype)
        return np.frombuffer(self.bytes, dtype, count, offset)

    def sha256(self) -> str:
        digest = hashlib.sha256()
        with memoryview(self.bytes) as view:
            for start in range(0, self.size, _HASH_CHUNK):
                with view[start : start + _HASH_CHUNK] as chunk:
                    digest.update(chunk)
        return digest.hexdigest()


class FileLedger:
    """Which files were read; digests of mapped files are computed when they are asked for."""

    def __init__(self) -> None:
        self._files: dict[str, str | MappedFile] = {}

    def record(self, name: str, content: bytes | MappedFile) -> None:
        self._files[name] = content if isinstance(content, MappedFile) else hashlib.sha256(content).hexdigest()

    def digests(self) -> dict[str, str]:
        """File name relative to the checkpoint's folder → SHA-256 in hexadecimal, sorted by name."""
        for name, content in self._files.items():
            if isinstance(content, MappedFile):
                self._files[name] = content.sha256()
        return {name: str(self._files[name]) for name in sorted(self._files)}


class Folder:
    """A folder of a checkpoint; all file names are relative to it."""

    def __init__(self, root: Path, ledger: FileLedger | None = None, prefix: str = "") -> None:
        self.root = root
        self.ledger = FileLedger() if ledger is None else ledger
        self._prefix = prefix
        self._maps: dict[str, MappedFile] = {}
        try:
            self.names = frozenset(os.listdir(root))
        except NotADirectoryError:
            raise CheckpointError(
                f"{root}: a file; give the folder that holds config.json and the weights, or a .params file of GluonNLP"
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"{root}: the folder cannot be read ({error.strerror}); check that it exists and its permissions"
            ) from error

    def path(self, name: str) -> Path:
        return self.root / name

    def has(self, name: str) -> bool:
        """Whether the folder lists a file or link of this name (which need not be readable)."""
        return name in self.names

    def read(self, name: str, limit: int = CONFIG_LIMIT) -> bytes:
        """The whole file; raises ``CheckpointError`` when it has more than ``limit`` bytes."""
        path = self.path(name)
        with _open_regular(path) as handle:
            try:
                data: bytes = handle.read(limit + 1)
            except OSError as error:
                raise CheckpointError(f"{path}: reading failed ({error.strerror})") from error
        if len(data) > limit:
            raise CheckpointError(f"{path}: more than {limit} bytes, which no {name} needs; the file is damaged")
        if not data:
            raise CheckpointError(f"{path}: the file is empty; its download or copy did not finish")
        self.ledger.record(self._prefix + name, data)
        return data

    def object(self, name: str) -> dict[str, Any]:
        """A JSON file that holds an object."""
        value = parse_json(self.read(name), str(self.path(name)))
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.path(name)}: holds a {type(value).__name__}; a JSON object is needed")
        return value

    def array(self, name: str) -> list[Any]:
        """A JSON file that holds an array."""
        value = parse_json(self.read(name), str(self.path(name)))
        if not isinstance(value, list):
            raise CheckpointError(f"{self.path(name)}: holds a {type(value).__name__}; a JSON array is needed")
        return value

    def map(self, name: str) -> MappedFile:
        if name not in self._maps:
            self._maps[name] = MappedFile(self.path(name))
            self.ledger.record(self._prefix + name, self._maps[name])
        return self._maps[name]

    def child(self, name: str, where: str) -> Folder:
        """A folder inside; ``name`` comes from the checkpoint and may not lead out of it."""
        parts = PurePosixPath(name).parts
        if not parts or "\\" in name or "\0" in name or ".." in parts or PurePosixPath(name).is_absolute():
            raise CheckpointError(f"{where}: the path {quote(name)} does not stay inside the checkpoint's folder")
        inside = "/".join(parts)
        return Folder(self.root / inside, self.ledger, f"{self._prefix}{inside}/")

    def pick(self, names: Iterable[str]) -> str | None:
        """The first of ``names`` that is here."""
        return next((name for name in names if self.has(name)), None)


def _open_regular(path: Path) -> Any:
    """Opens a regular file for reading; anything else could block or give endless data."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CheckpointError(f"{path}: not a regular file; a file or a link to one is needed")
        return open(path, "rb")
    except FileNotFoundError:
        if os.path.islink(path):
            raise CheckpointError(
                f"{path}: a link to {os.readlink(path)}, which does not exist; fetch the checkpoint again"
            ) from None
        raise CheckpointError(f"{path}: no such file; the checkpoint is incomplete") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened ({error.strerror}); check its permissions") from error
    except ValueError as error:  # a NUL in a name
        raise CheckpointError(f"{quote(str(path))}: cannot be opened ({error})") from None
