"""Files of the command line that are whole or not there, and are tried before the work begins."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from types import TracebackType

from encast.errors import ResourceError

__all__ = ["WholeFile"]


class WholeFile:
    """A text file for an option of a verb; a context manager.

    A temporary sibling is made at once, so that a folder that cannot be written is an error before any work; ``write``
    fills it and gives it its name. ``-`` is standard output. Devices and pipes are written to directly. Raises
    ``ResourceError``.
    """

    def __init__(self, path: str | os.PathLike[str], option: str) -> None:
        """``option`` is what the user gave the path with: ``--plot``."""
        self._path, self._option = Path(path), option
        self._standard = str(path) == "-"
        self._temporary: Path | None = None
        self._fd = -1
        if self._standard:
            return
        try:
            if self._path.exists() and not self._path.is_file():
                self._fd = os.open(self._path, os.O_WRONLY)  # a folder fails here
            else:
                self._fd, name = tempfile.mkstemp(prefix=f".{self._path.name}.", suffix=".tmp", dir=self._path.parent)
                self._temporary = Path(name)
                mask = os.umask(0)
                os.umask(mask)
                os.fchmod(self._fd, 0o666 & ~mask)
        except (OSError, ValueError) as error:
            self.discard()
            raise self._failure(error) from None

    def write(self, text: str) -> None:
        """All of the file."""
        if self._standard:
            sys.stdout.write(text)
            return
        try:
            view = memoryview(text.encode("utf-8", "replace"))
            while view:
                view = view[os.write(self._fd, view) :]
            if self._temporary is not None:
                os.fsync(self._fd)
                os.replace(self._temporary, self._path)
                self._temporary = None
        except BrokenPipeError:
            raise
        except OSError as error:
            raise self._failure(error) from None
        finally:
            self.discard()

    def discard(self) -> None:
        """Closes the file; removes it unless it was written."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
            self._temporary = None

    def _failure(self, error: OSError | ValueError) -> ResourceError:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return ResourceError(f"{self._path}: cannot be written ({reason}); choose another {self._option}")

    def __enter__(self) -> WholeFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.discard()
