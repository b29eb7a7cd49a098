"""The files that a job reads: those named, those in named folders, those behind URLs."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from encast.data.readers import FORMATS, format_of
from encast.data.remote import file_system, is_url, reaching
from encast.errors import InputError

__all__ = ["InputFile", "list_inputs"]


@dataclass(frozen=True)
class InputFile:
    """``name``: as the user wrote it, or found in a folder; ``path``: absolute, or a URL. ``changed``: when it was last
    written, in nanoseconds (0: the store does not say)."""

    name: str
    path: str
    format: str
    bytes: int
    changed: int


def list_inputs(names: Iterable[str], format: str = "auto") -> list[InputFile]:
    """The files of ``names`` in their order, those of a folder by their names, with those of the folders in it.

    In folders, names that begin with "_" or "." are passed over, as by Spark: they are marks of other programs.
    "auto" goes by each file's suffix. Raises ``InputError`` for what is not there, an empty folder, a file whose format
    nothing tells, and one that is named twice; ``ResourceError`` where a URL needs pyarrow.
    """
    if format != "auto" and format not in FORMATS:
        raise InputError(f"input format {format!r} is unknown; {', '.join(FORMATS)} are known")
    found: list[InputFile] = []
    seen: dict[str, str] = {}
    for name in names:
        for one, path, size, changed in _in_store(name) if is_url(name) else _on_disk(name):
            told = format_of(one) if format == "auto" else format
            if told not in FORMATS:
                raise InputError(
                    f"{one}: its name does not say which of {', '.join(FORMATS)} it holds; say so with --input-format, "
                    "or name the files without it"
                )
            if path in seen:
                raise InputError(f"{one} is the file {seen[path]}, which is named already; name it once")
            seen[path] = one
            found.append(InputFile(one, path, told, size, changed))
    return found


def _hidden(inside: str) -> bool:
    return any(part.startswith(("_", ".")) for part in inside.split("/"))


def _on_disk(name: str) -> Iterator[tuple[str, str, int, int]]:
    top = Path(name)
    try:
        files = [top]
        if top.is_dir():
            inside = [path for path in top.rglob("*") if not _hidden(path.relative_to(top).as_posix())]
            files = sorted((path for path in inside if path.is_file()), key=os.fsencode)
        for path in files:
            stat = path.stat()
            yield str(path), os.path.realpath(path), stat.st_size, stat.st_mtime_ns
    except OSError as error:
        raise InputError(
            f"{error.filename}: cannot be read ({error.strerror}); give files or folders of rows"
        ) from None
    if not files:
        raise InputError(f"{name}: the folder holds no files; give files or folders of rows")


def _in_store(url: str) -> Iterator[tuple[str, str, int, int]]:
    system, path = file_system(url)
    fs = importlib.import_module("pyarrow.fs")
    with reaching(url):
        info = system.get_file_info(path)
        if info.type == fs.FileType.Directory:
            told = system.get_file_info(fs.FileSelector(path, recursive=True))
            inside = [one for one in told if one.is_file and not _hidden(one.path[len(path) :].strip("/"))]
        else:
            inside = [info] if info.is_file else []
    if not inside:
        raise InputError(f"{url}: there is no such file or folder, or nothing in it; give files or folders of rows")
    # What stands behind a question mark says how the store is reached, and goes with every file.
    base, mark, query = url.partition("?")
    for one in sorted(inside, key=lambda one: one.path.encode()):
        name = base.rstrip("/") + one.path[len(path.rstrip("/")) :]
        yield name, name + mark + query, int(one.size), int(one.mtime_ns or 0)
