"""Output files that are whole or not there, and keep finished blocks when a run ends early."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

from encast.errors import ResourceError
from encast.files import new_file

__all__ = ["OutputFile"]


class OutputFile:
    """Blocks of bytes, written to a temporary sibling that takes the final name with ``finish``.

    After a failure or an interrupt, ``keep`` cuts the file back to its last whole block and names it
    ``NAME.partial``. Standard output (``"-"``) and devices are written to directly. Methods raise
    ``ResourceError``, and ``BrokenPipeError`` when nobody reads standard output any more.
    """

    def __init__(self, path: str | os.PathLike[str], option: str = "--output", *, scratch: Path | None = None) -> None:
        """``option`` is what the user gave the path with. ``scratch``: a folder of the same file system in which the
        temporary file lies; default: that of ``path``."""
        self.path, self._option = Path(path), option
        self.name = "standard output" if str(path) == "-" else str(path)
        self.size = 0
        self._temporary: Path | None = None
        self._fd = -1
        try:
            if str(path) == "-":
                sys.stdout.flush()
                self._fd = os.dup(sys.stdout.fileno())
            elif self.path.exists() and not self.path.is_file():
                self._fd = os.open(self.path, os.O_WRONLY)  # a device or a pipe; a folder fails here
            else:
                self._fd, self._temporary = new_file(scratch or self.path.parent, self.path.name)
        except OSError as error:
            raise ResourceError(
                f"{self.name}: cannot be written ({error.strerror or error}); choose another {self._option}"
            ) from None

    @property
    def regular(self) -> bool:
        """Whether this is a file that can be patched and kept, not a stream."""
        return self._temporary is not None

    @property
    def fd(self) -> int:
        return self._fd

    def append(self, block: bytes) -> None:
        """Writes one block; only whole blocks survive ``keep``."""
        view = memoryview(block)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            raise ResourceError(self.describe(error)) from None
        self.size += len(block)

    def describe(self, error: OSError) -> str:
        """What went wrong, and what to do, in a sentence."""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "make room" if full else "check the disk"
        reason = error.strerror or error
        return (
            f"{self.name}: writing failed after {self.size} bytes ({reason}); {advice} or choose another {self._option}"
        )

    def patch(self, data: bytes, offset: int = 0) -> None:
        """Overwrites bytes that were written before."""
        try:
            os.pwrite(self._fd, data, offset)
        except OSError as error:
            raise ResourceError(self.describe(error)) from None

    @property
    def temporary(self) -> Path:
        """Where a regular file lies until it has its name."""
        assert self._temporary is not None
        return self._temporary

    def finish(self) -> None:
        """Closes the file and gives it its name."""
        self.complete()
        self.place()

    def complete(self) -> None:
        """Closes the file, which is on the disk then; what is left is ``place``, or ``discard``."""
        self._close()

    def place(self) -> None:
        """Gives the complete file its name."""
        if self._temporary is not None:
            self._rename(self.path)

    def keep(self, *, cut: bool = True) -> Path | None:
        """Closes the file, cut back to whole blocks, as ``NAME.partial``; None when there is nothing to keep."""
        if self._temporary is None or self.size == 0:
            self.discard()
            return None
        if cut and self._fd >= 0:
            os.ftruncate(self._fd, self.size)
        self._close()
        partial = self.path.with_name(self.path.name + ".partial")
        self._rename(partial)
        return partial

    def discard(self) -> None:
        """Closes and removes the file."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
            self._temporary = None

    def _close(self) -> None:
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            if self._temporary is not None:
                os.fsync(fd)
            os.close(fd)
        except OSError as error:
            raise ResourceError(self.describe(error)) from None

    def _rename(self, path: Path) -> None:
        assert self._temporary is not None
        # Ours no longer, whatever happens: nothing that was written is lost.
        temporary, self._temporary = self._temporary, None
        try:
            os.replace(temporary, path)
        except OSError as error:
            raise ResourceError(
                f"{path}: cannot be put into place ({error.strerror}); what was written is in {temporary}"
            ) from None
