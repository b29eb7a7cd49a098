"""Files of object stores and of HDFS by their URLs, through the file systems of Apache Arrow.

A URL may hold credentials, before the host or behind a question mark. ``without_credentials`` is what may be shown and
kept; it still says which object of which store is meant.
"""

from __future__ import annotations

import importlib
import io
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple, cast
from urllib.parse import quote, unquote

from encast.data.arrow import pyarrow
from encast.errors import InputError

__all__ = [
    "file_system",
    "is_url",
    "local_path",
    "mark_of",
    "open_url",
    "random_access",
    "reaching",
    "reason_of",
    "scrubbed",
    "shown",
    "with_credentials",
    "without_credentials",
]

_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_URL_IN_TEXT = re.compile(r"""[a-z][a-z0-9+.-]*://[^\s'"<>]+""")
_REASON_CHARACTERS = 300
_BUFFER_BYTES = 1 << 22
"""Of one request to an object store, whose answer takes long and whose bytes are cheap."""

_USER_IS_A_PLACE = {"abfs", "abfss", "hdfs", "viewfs"}
"""Schemes in which what stands before the @ names a container or a user; elsewhere it is a key or a token."""
_NO_SECRETS = {
    "scheme",
    "endpoint_override",
    "region",
    "blob_storage_authority",
    "dfs_storage_authority",
    "enable_tls",
    "replication",
    "buffer_size",
    "default_block_size",
}
"""Parameters that say which store is meant; all others may be secrets."""
_MARKS = {"etag", "generation", "version-id", "last-modified", "crc32c"}
"""What a store says of an object, by any of which another content is told."""


class _Parts(NamedTuple):
    scheme: str
    user: str
    place: str
    query: str


def _parts(url: str) -> _Parts:
    scheme, _, rest = url.partition("://")
    rest, _, query = rest.partition("?")
    authority, slash, path = rest.partition("/")
    user, at, host = authority.rpartition("@")
    if not at and ":" in authority and "@" in path:
        # A key with a slash that was not written as %2F: no URL that can be opened, but one that must not be shown.
        user, _, rest = rest.rpartition("@")
        return _Parts(scheme, user, rest, query)
    return _Parts(scheme, user, host + slash + path, query)


def _joined(parts: _Parts) -> str:
    user = f"{parts.user}@" if parts.user else ""
    query = f"?{parts.query}" if parts.query else ""
    return f"{parts.scheme}://{user}{parts.place}{query}"


def is_url(path: str | os.PathLike[str]) -> bool:
    return _URL.match(str(path)) is not None


def without_credentials(url: str) -> str:
    """The URL with what says which object it is, and nothing else; of what is no URL, the same."""
    if not is_url(url):
        return url
    parts = _parts(url)
    user = parts.user.partition(":")[0] if parts.scheme in _USER_IS_A_PLACE else ""
    kept = [one for one in parts.query.split("&") if one.partition("=")[0] in _NO_SECRETS and "@" not in one]
    return _joined(_Parts(parts.scheme, user, parts.place, "&".join(kept)))


def with_credentials(url: str, like: str) -> str:
    """``url``, reached as ``like`` is, which may have credentials."""
    if not is_url(url):
        return url
    parts, others = _parts(url), _parts(like)
    return _joined(_Parts(parts.scheme, others.user, parts.place, others.query))


def shown(path: str | os.PathLike[str]) -> str:
    """A path or URL as messages and outputs have it: without credentials and parameters; bytes of a file's name that
    are not UTF-8 as ``\\xNN``."""
    text = without_credentials(str(path))
    if is_url(text):
        return text.partition("?")[0]
    return os.fsencode(text).decode("utf-8", "backslashreplace")


def _secrets(url: str) -> set[str]:
    parts = _parts(url)
    values = [one.partition("=")[2] for one in parts.query.split("&") if one.partition("=")[0] not in _NO_SECRETS]
    pieces = [parts.user, *parts.user.split(":"), *values]
    plain = {form for piece in pieces for form in (piece, unquote(piece))}
    return {form for piece in plain for form in (piece, quote(piece), quote(piece, safe="")) if len(form) > 2}


def scrubbed(text: str, urls: Sequence[str]) -> str:
    """A text of others without what is secret in ``urls``, and without credentials and parameters of the URLs that
    stand in it: a store's error may show one that was signed."""
    secrets: set[str] = set()
    for url in filter(is_url, urls):
        text = text.replace(url, without_credentials(url))
        secrets |= _secrets(url)
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return _URL_IN_TEXT.sub(lambda found: without_credentials(found[0]), text)


def reason_of(error: BaseException, *paths: str | os.PathLike[str]) -> str:
    """Why a file could not be read or written, in one line, without the credentials of ``paths``: Arrow's errors have
    no ``strerror``."""
    text = str(getattr(error, "strerror", None) or error).strip()
    # A secret that was cut off would no longer be known as one.
    lines = scrubbed(text, list(map(str, paths))).splitlines() or [type(error).__name__]
    return lines[0][:_REASON_CHARACTERS]


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """What Arrow raises inside becomes an ``InputError`` that names the URL."""
    arrow = pyarrow()
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{shown(url)}: there is no such file; give one that can be read") from None
    except (OSError, ValueError, arrow.ArrowException) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{shown(url)}: cannot be read ({reason_of(error, url)}); URLs are s3://, gs://, abfs://, hdfs:// and "
            "file://, with spaces and signs as %20 and the like; credentials are looked for where the store's own "
            "tools do"
        ) from None


def _need_whole(url: str) -> None:
    """Raises ``InputError`` where what is read would be another object than the one that is named: Arrow drops what
    stands behind a ``#``, and in the URL of a file behind a question mark."""
    for mark, code in (("#", "%23"), ("?", "%3F")):
        if mark in url and (mark == "#" or url.startswith("file:")):
            raise InputError(
                f"{shown(url)}: a URL with {mark}, behind which nothing would be read; write {code} where it belongs "
                "to a name or a key"
            )


def local_path(name: str) -> str:
    """The path of a ``file:///`` URL; all else stays as it is. Raises ``InputError``."""
    if not name.startswith("file:///"):
        return name
    _need_whole(name)
    return unquote(name[7:])


def file_system(url: str) -> tuple[Any, str]:
    """Arrow's file system of a URL, and the path in it; raises ``InputError``, without pyarrow ``ResourceError``."""
    pyarrow()
    _need_whole(url)
    with reaching(url):
        system, path = importlib.import_module("pyarrow.fs").FileSystem.from_uri(url)
        return system, str(path)


def random_access(url: str) -> Any:
    """A ``pyarrow.NativeFile`` with ``seek``; raises as ``file_system``."""
    system, path = file_system(url)
    with reaching(url):
        return system.open_input_file(path)


def mark_of(url: str) -> tuple[int, str]:
    """The size of a file, and what tells its content from any other that it had or will have; asks the store."""
    system, path = file_system(url)
    with reaching(url), system.open_input_file(path) as file:
        told = {name.lower(): value for name, value in (file.metadata() or {}).items()}
        marks = [f"{name}={_text(told[name])}" for name in sorted(_MARKS & set(told))]
        # HDFS tells nothing of the kind, but when a file was written.
        return int(file.size()), "; ".join(marks) or f"written {system.get_file_info(path).mtime_ns}"


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def open_url(url: str) -> tuple[BinaryIO, int]:
    """A buffered stream with ``peek`` and ``seek``, and its size in bytes; raises as ``file_system``."""
    file = random_access(url)
    with reaching(url):
        return cast(BinaryIO, io.BufferedReader(file, _BUFFER_BYTES)), int(file.size())
