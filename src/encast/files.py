"""Files that are whole or absent, and that one process at a time has."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

from encast.errors import EncastError

__all__ = ["lock", "write_whole"]


def lock(fd: int, refusal: EncastError) -> None:
    """Raises ``refusal`` where another process has locked the open file; the lock ends when it is closed."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise refusal from None
    except OSError:
        pass  # some network file systems have no locks


def write_whole(path: Path, text: str) -> None:
    """A file that is replaced as a whole or stays as it was; raises ``OSError``."""
    path = path.resolve()  # the file that a link names, not the link
    fd, name = tempfile.mkstemp(prefix=".encast-", suffix=".tmp", dir=path.parent)
    try:
        with open(fd, "w", newline="", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
