"""Files and lines that are whole or absent, and that one process at a time has."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from encast.errors import EncastError

__all__ = ["LineFile", "exchange", "lock", "new_file", "open_regular", "sync_folder", "turn", "write_whole"]

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def lock(fd: int, refusal: EncastError) -> bool:
    """Raises ``refusal`` where another process has locked the open file; the lock ends when it is closed.

    False where the file system has no locks (some mounts of NFS and Lustre), so that nobody is kept out.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise refusal from None
    except OSError:
        return False
    return True


def new_file(folder: Path, name: str) -> tuple[int, Path]:
    """An empty file of a new name that begins and ends like a temporary one, open for writing; raises ``OSError``.

    ``tempfile`` would make it for its owner alone. Here the kernel applies the umask, which a process can only read by
    changing it for all of its threads.
    """
    path = folder / f".{name}.{secrets.token_urlsafe(6)}.tmp"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), path


def write_whole(path: Path, content: str | bytes) -> None:
    """A file that is replaced as a whole or stays as it was; text becomes UTF-8. Raises ``OSError``."""
    path = path.resolve()  # the file that a link names, not the link
    fd, temporary = new_file(path.parent, "encast")
    try:
        with open(fd, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def exchange(a: Path, b: Path) -> bool:
    """Swaps the names of two files or folders at once; False where kernel or file system cannot. Raises ``OSError``.

    Nobody, and no crash, meets a moment without either. ``renameat2(2)`` with RENAME_EXCHANGE, Linux 3.15.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM):  # EPERM: of some filters of system calls
        return False
    raise OSError(number, os.strerror(number), str(a), None, str(b))


def sync_folder(path: Path) -> None:
    """Makes what was made and renamed inside of a folder last; raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path, flags: int) -> int:
    """``os.open`` of a file that is no pipe, which could wait for ever, no device and no folder; raises ``OSError``."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return fd


class LineFile:
    """A file to which whole lines are added; no other process can open it as one meanwhile. Methods raise ``OSError``.

    The kernel sees to that, also when this process is killed. ``found`` is what was in it, a last line that a crash cut
    off included: ``cut`` removes that, which is the caller's to say, as the file may be no such file at all.
    """

    def __init__(self, path: Path, refusal: EncastError, *, create: bool) -> None:
        """Raises ``refusal`` while another process has it open. ``locked``: whether it keeps others out."""
        while True:
            self._fd = open_regular(path, os.O_RDWR | os.O_APPEND | (os.O_CREAT if create else 0))
            try:
                self.locked = lock(self._fd, refusal)
                # Who had it may have removed it in the meantime: then this is no longer the file of that name.
                if _is_file(self._fd, path):
                    self.found = path.read_bytes()
                    break
            except BaseException:
                self.close()
                raise
            self.close()
        self._size = len(self.whole)

    @property
    def whole(self) -> bytes:
        """The lines of ``found`` that have an end."""
        return self.found[: self.found.rfind(b"\n") + 1]

    def cut(self) -> None:
        """Removes what stands behind the last whole line."""
        os.ftruncate(self._fd, self._size)

    def clear(self) -> None:
        """Removes all lines."""
        os.ftruncate(self._fd, 0)
        self._size = 0

    def append(self, lines: bytes) -> None:
        """Adds whole lines, all or none, and has them on the disk when it returns; those of before always stay."""
        try:
            view = memoryview(lines)
            while view:
                view = view[os.write(self._fd, view) :]
            os.fsync(self._fd)
            self._size += len(lines)
        except BaseException:
            self.cut()
            raise

    def close(self) -> None:
        """Closing twice is fine."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def _is_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


@contextmanager
def turn(path: Path) -> Iterator[None]:
    """One process at a time is inside, for the same file, which is made and stays; others wait. Raises ``OSError``."""
    with open(path, "ab") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise  # some network file systems have no locks
        yield
