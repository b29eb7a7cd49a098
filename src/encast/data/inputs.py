"""The files that a job reads: those named, those in named folders, those behind URLs."""

from __future__ import annotations

import importlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote

from encast.data.readers import FORMATS, format_of
from encast.data.remote import (
    file_system,
    is_url,
    local_path,
    mark_of,
    reaching,
    shown,
    with_credentials,
    without_credentials,
)
from encast.errors import InputError

__all__ = ["InputFile", "State", "list_inputs", "state_of"]


@dataclass(frozen=True)
class InputFile:
    """``name``: as outputs have it; ``path``: absolute, or a URL without credentials. ``changed``: when it was last
    written, in nanoseconds (0: the store does not say). ``named``: the argument that it comes from."""

    name: str
    path: str
    format: str
    bytes: int
    changed: int
    named: int

    def reached(self, names: Sequence[str]) -> str:
        """The path, or the URL with the credentials of the argument that it comes from."""
        return with_credentials(self.path, names[self.named]) if is_url(self.path) else self.path


class State(NamedTuple):
    """What a file is now. ``mark``: what a store tells contents apart by; "" of local files, which ``changed`` tells
    apart (of URLs 0). ``inode``: which file has the name, on this machine; 0 of URLs."""

    bytes: int
    changed: int
    mark: str
    inode: int


class _Found(NamedTuple):
    name: str
    path: str
    bytes: int
    changed: int


def state_of(path: str) -> State:
    """Asks the file system or the store, past caches; ``path`` may be a URL with credentials.

    Raises ``InputError`` where nothing can be read there, or no regular file.
    """
    if is_url(path):
        size, mark = mark_of(path)
        return State(size, 0, mark, 0)
    try:
        # Opening has a network file system ask the server; without O_NONBLOCK a pipe would wait for its writer.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise _unreadable(path, error) from None
    if not stat.S_ISREG(found.st_mode):
        raise _no_file(path)
    return State(found.st_size, found.st_mtime_ns, "", found.st_ino)


def list_inputs(names: Iterable[str], format: str = "auto") -> list[InputFile]:
    """The files of ``names`` in their order, those of a folder by their names, with those of the folders in it.

    In folders, names that begin with "_" or "." are passed over, as by Spark: they are marks of other programs. Links
    are followed. "auto" goes by each file's suffix. Raises ``InputError`` for whatever else cannot be read there: what
    is not there, links to nothing, pipes and devices, an empty folder, a file whose format nothing tells, and one that
    is named twice; ``ResourceError`` where a URL needs pyarrow.
    """
    if format != "auto" and format not in FORMATS:
        raise InputError(f"input format {format!r} is unknown; {', '.join(FORMATS)} are known")
    found: list[InputFile] = []
    seen: dict[str, str] = {}
    called: dict[str, str] = {}
    for at, name in enumerate(map(local_path, names)):
        for one in _in_store(name) if is_url(name) else _on_disk(name):
            told = format_of(one.path) if format == "auto" else format
            if told not in FORMATS:
                raise InputError(
                    f"{one.name}: its name does not say which of {', '.join(FORMATS)} it holds; say so with "
                    "--input-format, or name the files without it"
                )
            path = one.path if is_url(one.path) else os.path.realpath(one.path)
            if path in seen:
                raise InputError(
                    f"{one.name} is the file {seen[path]}, which is named already, and its rows would be answered "
                    "twice; name it once, and move a link to it out of the folder"
                )
            if one.name in called:
                raise InputError(
                    f"{one.path} and {called[one.name]} are both called {one.name} in the output; rename one, or read "
                    "them in two jobs"
                )
            seen[path], called[one.name] = one.name, one.path
            found.append(InputFile(one.name, one.path, told, one.bytes, one.changed, at))
    return found


def _hidden(name: str) -> bool:
    return name.startswith(("_", "."))


def _unreadable(path: str, error: OSError) -> InputError:
    return InputError(
        f"{shown(error.filename or path)}: cannot be read ({error.strerror}); give files or folders of rows that can be"
    )


def _no_file(path: str) -> InputError:
    return InputError(
        f"{shown(path)}: is no regular file but a pipe, a socket or a device, which cannot be read again where a job "
        "was ended; write its rows to a file"
    )


def _on_disk(name: str) -> Iterator[_Found]:
    try:
        top = os.stat(name)
        paths = [name]
        if stat.S_ISDIR(top.st_mode):
            paths = sorted(_below(name, []), key=os.fsencode)
            if not paths:
                raise InputError(f"{shown(name)}: the folder holds no files; give files or folders of rows")
        for path in paths:
            told = os.stat(path)
            if not stat.S_ISREG(told.st_mode):
                raise _no_file(path)
            yield _Found(shown(path), os.path.abspath(path), told.st_size, told.st_mtime_ns)
    except OSError as error:
        raise _unreadable(name, error) from None


def _below(folder: str, above: list[tuple[int, int]]) -> Iterator[str]:
    """What is in a folder and the folders in it, links followed; ``above``: the folders that it lies in."""
    told = os.stat(folder)
    here = (told.st_dev, told.st_ino)
    if here in above:
        raise InputError(
            f"{shown(folder)}: is a link to a folder that it lies in, so that its files would be read for ever; remove "
            "it, or let its name begin with _"
        )
    for name in os.listdir(folder):
        if _hidden(name):
            continue
        path = os.path.join(folder, name)
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            raise InputError(
                f"{shown(path)}: is a link to nothing; mend or remove it, or let its name begin with _"
            ) from None
        if stat.S_ISDIR(mode):
            yield from _below(path, [*above, here])
        else:
            yield path


def _in_store(url: str) -> Iterator[_Found]:
    system, path = file_system(url)
    fs = importlib.import_module("pyarrow.fs")
    with reaching(url):
        info = system.get_file_info(path)
        if info.type == fs.FileType.Directory:
            told = system.get_file_info(fs.FileSelector(path, recursive=True))
            inside = [
                one
                for one in told
                if one.is_file and not any(map(_hidden, one.path[len(path) :].strip("/").split("/")))
            ]
        else:
            inside = [info] if info.is_file else []
    if not inside:
        raise InputError(
            f"{shown(url)}: there is no such file or folder, or nothing in it; give files or folders of rows"
        )
    # What stands behind a question mark says how the store is reached, and goes with every file.
    base, mark, query = without_credentials(url).partition("?")
    for one in sorted(inside, key=lambda one: one.path.encode("utf-8", "surrogateescape")):
        below = one.path[len(path.rstrip("/")) :]
        name = (base.rstrip("/") if below else base) + quote(below)
        found = _Found(name, name + mark + query, int(one.size), int(one.mtime_ns or 0) // 10**9 * 10**9)
        # The URL is how workers find the file: it must be this one, whatever its name is made of.
        if quote(below) != below and file_system(with_credentials(found.path, url))[1] != one.path:
            raise InputError(f"{name}: cannot be named by a URL; rename the object")
        yield found
