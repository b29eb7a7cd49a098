"""Files of object stores and of HDFS by their URLs, through the file systems of Apache Arrow."""

from __future__ import annotations

import importlib
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from encast.data.arrow import pyarrow
from encast.errors import InputError

__all__ = ["file_system", "is_url", "open_url", "random_access", "reaching"]

_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_BUFFER_BYTES = 1 << 22
"""Of one request to an object store, whose answer takes long and whose bytes are cheap."""


def is_url(path: str | os.PathLike[str]) -> bool:
    return _URL.match(str(path)) is not None


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """What Arrow raises inside becomes an ``InputError`` that names the URL."""
    arrow = pyarrow()
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{url}: there is no such file; give one that can be read") from None
    except (OSError, ValueError, arrow.ArrowException) as error:
        if isinstance(error, InputError):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise InputError(
            f"{url}: cannot be read ({reason}); URLs are s3://, gs://, abfs://, hdfs:// and file://, and credentials "
            "are looked for where the store's own tools do"
        ) from None


def file_system(url: str) -> tuple[Any, str]:
    """Arrow's file system of a URL, and the path in it; raises ``InputError``, without pyarrow ``ResourceError``."""
    pyarrow()
    with reaching(url):
        system, path = importlib.import_module("pyarrow.fs").FileSystem.from_uri(url)
        return system, str(path)


def random_access(url: str) -> Any:
    """A ``pyarrow.NativeFile`` with ``seek``; raises as ``file_system``."""
    system, path = file_system(url)
    with reaching(url):
        return system.open_input_file(path)


def open_url(url: str) -> tuple[BinaryIO, int]:
    """A buffered stream with ``peek`` and ``seek``, and its size in bytes; raises as ``file_system``."""
    file = random_access(url)
    with reaching(url):
        return cast(BinaryIO, io.BufferedReader(file, _BUFFER_BYTES)), int(file.size())
