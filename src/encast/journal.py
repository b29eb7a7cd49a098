"""A search's journal: a line of JSON for everything that it measured, from which a search that was ended goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from encast.artifact.strict_json import parse_json
from encast.errors import EncastError, InputError, ResourceError
from encast.files import LineFile

__all__ = ["Journal"]


class Journal:
    """The first line is the key of the search, each other one an entry; all are on the disk once they are added.

    A subclass says what an entry is (``_take``, ``__bool__``) and which command writes it (``_OWNER``).
    """

    _OWNER = "encast"

    def __init__(self, path: Path | None, *, key: Mapping[str, Any], resume: bool, held: ExitStack) -> None:
        """Begins the file, or goes on with it; ``path`` None keeps nothing.

        ``key``: what a search must share with the one that it resumes. No other search writes to the file until
        ``held`` is closed. Raises ``InputError`` for a journal that belongs to something else, is there without
        ``resume`` or is being written, ``ResourceError`` for one that cannot be read or written.
        """
        self.path = path
        self._file: LineFile | None = None
        if path is None:
            return
        if resume and not path.exists():
            raise InputError(f"{path} does not exist, so there is nothing to resume; leave --resume out")
        busy = f"another `{self._OWNER}` writes to {path}; wait for its end or name another --out"
        try:
            self._file = LineFile(path, InputError(busy), create=not resume)
        except OSError as error:
            raise self._unusable(error) from None
        held.callback(self._file.close)
        head = _line({"key": dict(key)})
        if head.startswith(self._file.found) or (not resume and self._measured_nothing()):
            try:
                if self._file.found != head:
                    self._file.cut()
                    self._file.append(head)
            except OSError as error:
                self.remove()
                raise self._unusable(error) from None
            return
        if not resume:
            raise InputError(
                f"{path} holds what an earlier search measured; go on with it by --resume, or remove it to begin anew"
            )
        stored = self._read(self._file.whole)
        for name, value in key.items():
            if stored.get(name) != value:
                raise InputError(
                    f"{path} is of another search: its {name} is {stored.get(name)!r}, now it is {value!r}; resume "
                    "with the same arguments, machine and version of encast, or remove the file"
                )
        try:
            self._file.cut()
        except OSError as error:
            raise self._unusable(error) from None

    def _measured_nothing(self) -> bool:
        """Whether the file holds the key of a search and no more."""
        assert self._file is not None
        lines = self._file.found.splitlines()
        return len(lines) == 1 and lines[0].startswith(b'{"key": ')

    def __bool__(self) -> bool:
        """Whether there is anything to go on from."""
        raise NotImplementedError

    def _take(self, entry: Mapping[str, Any]) -> None:
        """Keeps an entry of the file; raises for one that no such search wrote."""
        raise NotImplementedError

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _read(self, lines: bytes) -> Mapping[str, Any]:
        """Takes every entry, and returns the key."""
        stored: Mapping[str, Any] = {}
        for number, line in enumerate(lines.splitlines() or [b""], 1):
            try:
                entry = parse_json(line, "it")
                if number == 1:
                    stored = {**entry["key"]}
                else:
                    self._take(entry)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError, EncastError) as error:
                raise InputError(
                    f"{self.path} is no journal of `{self._OWNER}` (line {number}, {type(error).__name__}: "
                    f"{str(error)[:200]}); remove it, or name another --out"
                ) from None
        return stored

    def _write(self, entry: Mapping[str, Any]) -> None:
        if self._file is not None:
            try:
                self._file.append(_line(entry))
            except OSError as error:
                go_on = ", then --resume goes on with what was measured" if self else ""
                raise ResourceError(
                    f"{self.path}: the journal of the search cannot be written ({error.strerror or error}); make "
                    f"room{go_on}"
                ) from None

    def _unusable(self, error: OSError) -> ResourceError:
        return ResourceError(
            f"{self.path}: the journal of the search cannot be used ({error.strerror or error}); make room, or name "
            "another --out"
        )


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, allow_nan=False).encode() + b"\n"
