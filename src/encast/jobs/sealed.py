"""Lines of JSON that say themselves whether they are as they were written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

__all__ = ["seal", "unseal"]

_SEAL = "sha256"


def seal(content: Mapping[str, Any]) -> bytes:
    """An object as a line of ASCII; its last field is the digest of what goes before."""
    text = json.dumps(content)
    return f'{text[:-1]}, "{_SEAL}": "{_digest(text)}"}}\n'.encode("ascii")


def unseal(line: bytes) -> dict[str, Any]:
    """What was sealed; raises ``ValueError`` for anything else."""
    content = json.loads(line)
    if not isinstance(content, dict) or content.pop(_SEAL, None) != _digest(json.dumps(content)):
        raise ValueError("it is not what was written")
    return content


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("ascii")).hexdigest()
