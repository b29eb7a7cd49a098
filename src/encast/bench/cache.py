"""Things that are made once and found again by what they were made from."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from encast.errors import ResourceError

__all__ = ["cached", "cached_place", "content_hash", "default_cache", "seconds_to_make"]

_MADE = "made.json"


def default_cache() -> Path:
    """``bench`` below the folder that encast keeps measurements in; see ``encast.ceilings.cache_dir``."""
    from encast.ceilings import cache_dir  # here: peers in environments of their own have no native core

    return cache_dir() / "bench"


def content_hash(key: Mapping[str, Any]) -> str:
    """16 hexadecimal digits of the SHA-256 of the key's canonical JSON; values that are not JSON count as text."""
    text = json.dumps(key, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def cached(cache: Path, kind: str, key: Mapping[str, Any], make: Callable[[Path], None]) -> Path:
    """The folder ``cache/kind/HASH`` of that key, which ``make(folder)`` fills when it is not there yet.

    ``key`` names everything that the content depends on: model sha, versions of the packages, settings. ``make``
    fills an empty folder; only when it returns does the folder get its name, so a half-made one is never found. Beside
    what it wrote, ``made.json`` records key and seconds. Processes that want the same folder wait for the one that
    makes it. What ``make`` raises goes through; raises ``ResourceError`` when the cache cannot be written.
    """
    folder = cached_place(cache, kind, key)
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")):
            if folder.is_dir():
                return folder
            unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
            try:
                begin = time.perf_counter()
                make(unfinished)
                made = {"seconds": time.perf_counter() - begin, "key": key}
                (unfinished / _MADE).write_text(json.dumps(made, indent=1, sort_keys=True, default=str) + "\n")
                unfinished.chmod(0o755)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise ResourceError(
            f"{error.filename or folder}: cannot be written ({error.strerror or error}); make room, or name another "
            "folder with cache=FOLDER"
        ) from None
    return folder


def cached_place(cache: Path, kind: str, key: Mapping[str, Any]) -> Path:
    """The folder that ``cached`` returns, which is there only when it has been made."""
    return cache / kind / content_hash(key)


def seconds_to_make(folder: Path) -> float:
    """How long ``make`` took for a folder of ``cached``, in whichever run that was."""
    return float(json.loads((folder / _MADE).read_text())["seconds"])


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
