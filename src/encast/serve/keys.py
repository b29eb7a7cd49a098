"""API keys: who may ask. The file holds hashes only, so that whoever reads it cannot ask in another's name."""

from __future__ import annotations

import hashlib
import hmac
import re
import stat
from collections.abc import Callable
from pathlib import Path

from encast.errors import InputError

__all__ = ["Keys"]

_LINE = re.compile(r"([\w.-]{1,64})\s+sha256:([0-9a-fA-F]{64})")


class Keys:
    """The keys of a file with lines ``NAME sha256:HEX``; ``printf %s "$KEY" | sha256sum`` prints the HEX.

    Empty lines and those that begin with ``#`` are skipped. Two keys may have one name, so that one can replace the
    other. ``authorise`` belongs into ``Service.authorise``.
    """

    def __init__(self, path: str | Path, warn: Callable[[str], None]) -> None:
        """Raises ``InputError`` as ``reload`` does. ``warn`` is told when everybody can read the file."""
        self._path, self._warn = Path(path), warn
        self._keys: tuple[tuple[bytes, str], ...] = ()
        self.reload()

    def reload(self) -> None:
        """Reads the file again. Raises ``InputError`` with the line that is wrong; the keys then stay as they were."""
        try:
            text = self._path.read_text(encoding="utf-8")
            mode = self._path.stat().st_mode
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise InputError(f"{self._path}: the API keys cannot be read: {reason}") from None
        keys = []
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            found = _LINE.fullmatch(line.strip())
            if found is None:
                # Not shown: it may be a key itself.
                raise InputError(
                    f'{self._path}, line {number}: give NAME sha256:HEX, the HEX by: printf %s "$KEY" | sha256sum'
                )
            keys.append((bytes.fromhex(found[2]), found[1]))
        if not keys:
            raise InputError(f"{self._path} holds no key, so nobody could ask; add a line NAME sha256:HEX")
        if mode & stat.S_IROTH:
            self._warn(f"{self._path} can be read by everybody (chmod o-r); it holds hashes only, but names as well")
        self._keys = tuple(keys)

    def authorise(self, header: str | None) -> str | None:
        """The name of the key of a header ``Authorization: Bearer KEY``, None when there is none or it is wrong.

        It takes as long whichever key it is: all are compared, each in constant time.
        """
        scheme, _, key = (header or "").partition(" ")
        # Servers read headers as latin-1, which gives the bytes that were sent.
        given = hashlib.sha256(key.strip().encode("latin-1", "replace")).digest()
        name = None
        for known, its_name in self._keys:
            if hmac.compare_digest(known, given):
                name = its_name
        return name if scheme.lower() == "bearer" else None
