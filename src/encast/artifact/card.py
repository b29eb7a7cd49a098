"""``card.json``: where an artifact comes from, how it was made, what was measured, and every checksum.

The card begins with its own checksum: the XXH64 of its bytes with the sixteen digits set to zero. With the
checksums of the other files and of every tensor in it, no byte of an artifact can change unnoticed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from encast.artifact.strict_json import parse_json
from encast.errors import ArtifactError, InputError, ResourceError
from encast.files import sync_folder

__all__ = [
    "CARD",
    "CARD_TEMPORARY",
    "FORMAT_VERSION",
    "GRAPH",
    "MUTABLE",
    "TOKENIZER",
    "WEIGHTS",
    "checksum",
    "hexadecimal",
    "read_card",
    "read_small",
    "seal",
    "update_card",
    "write_file",
]

FORMAT_VERSION = 2
CARD, GRAPH, TOKENIZER, WEIGHTS = "card.json", "graph.json", "tokenizer.json", "weights.safetensors"
CARD_TEMPORARY = ".card.json.tmp-"

MAX_SMALL_FILE = 1 << 28
"""Bytes that graph, tokenizer and card may have; the tokenizers of the largest vocabularies take some 20 MB."""

MUTABLE = ("accuracy", "search", "speed", "verified")
"""The entries that may change after compilation."""

_BLANK = "0" * 16
_PREFIX = b'{\n "checksum": "'


def checksum(data: Any) -> int:
    """XXH64 (seed 0) of a contiguous buffer."""
    from encast._core import xxh64

    return int(xxh64(data))


def hexadecimal(value: int) -> str:
    return f"{value:016x}"


def seal(card: Mapping[str, Any]) -> bytes:
    """The bytes of ``card.json``, with the checksum filled in."""
    body = {"checksum": _BLANK, **{key: value for key, value in card.items() if key != "checksum"}}
    blank = json.dumps(body, indent=1, ensure_ascii=False, allow_nan=False).encode()
    begin = len(_PREFIX)
    return blank[:begin] + hexadecimal(checksum(blank)).encode() + blank[begin + len(_BLANK) :]


def read_card(folder: Path) -> dict[str, Any]:
    """The card of an artifact; raises ``ArtifactError`` if it is damaged or of another version."""
    path = folder / CARD
    data = read_small(path)
    card = parse_json(data, str(path))
    if not isinstance(card, dict) or card.get("format") != "encast":
        raise ArtifactError(f"{path} is not the card of an encast artifact")
    version = card.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise ArtifactError(
            f"{path}: the artifact has format version {version!r} (made by encast "
            f"{card.get('encast_version')!r}), this encast reads version {FORMAT_VERSION}: compile the checkpoint again"
        )
    begin, end = len(_PREFIX), len(_PREFIX) + len(_BLANK)
    blank = data[:begin] + _BLANK.encode() + data[end:]
    if data[:begin] != _PREFIX or data[begin:end] != hexadecimal(checksum(blank)).encode():
        raise ArtifactError(f"{path} does not match its own checksum: it is damaged or was edited; compile again")
    return card


def update_card(folder: str | os.PathLike[str], **entries: Any) -> None:
    """Sets entries of an artifact's card that are ``MUTABLE``, atomically.

    Raises ``ArtifactError`` for a damaged card, ``InputError`` for another entry and ``ResourceError`` if the
    folder cannot be written; the card is then as it was.
    """
    fixed = sorted(set(entries) - set(MUTABLE))
    if fixed:
        raise InputError(f"the card's {fixed} are fixed at compile; {', '.join(MUTABLE)} may be updated")
    folder = Path(folder)
    data = seal({**read_card(folder), **entries})
    temporary = folder / f"{CARD_TEMPORARY}{secrets.token_hex(4)}"
    try:
        write_file(temporary, data)
        os.replace(temporary, folder / CARD)
        sync_folder(folder)
    except OSError as error:
        raise ResourceError(f"{folder / CARD} cannot be updated: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def read_small(path: Path) -> bytes:
    """A whole small file; raises ``ArtifactError`` if it is missing, unreadable, no file, or not small."""
    try:
        if not path.is_file():
            raise ArtifactError(f"{path} is missing: this is no encast artifact, or an incomplete one; compile again")
        size = path.stat().st_size
        if size > MAX_SMALL_FILE:
            raise ArtifactError(f"{path} has {size} bytes; at most {MAX_SMALL_FILE} are accepted")
        return path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}") from None


def write_file(path: Path, data: bytes) -> None:
    """Writes a new file through to the disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
