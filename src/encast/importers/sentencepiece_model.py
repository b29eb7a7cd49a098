"""Reading a sentencepiece ``.model`` file: the few fields of its protocol buffer that tokenizers need.

Schema: ``sentencepiece_model.proto`` (``ModelProto``); wire format: the protocol buffers encoding
guide. Unknown fields are skipped, as the format asks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from encast.errors import CheckpointError

__all__ = ["CONTROL", "USER_DEFINED", "Piece", "SentencePieceModel", "parse_sentencepiece"]

CONTROL, USER_DEFINED = 3, 4
"""Kinds of pieces that tokenizers treat apart (``SentencePiece.Type``)."""

UNIGRAM = 1


@dataclass(frozen=True)
class Piece:
    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePieceModel:
    """``charsmap`` is the compiled normalisation (a double-array trie and its texts), empty for none."""

    pieces: tuple[Piece, ...]
    model_type: int
    charsmap: bytes


def parse_sentencepiece(data: bytes, where: str) -> SentencePieceModel:
    """Raises ``CheckpointError`` on anything that is not a well-formed model."""
    pieces: list[Piece] = []
    model_type, charsmap = UNIGRAM, b""
    try:
        for field, value in _fields(data):
            if field == 1:
                pieces.append(_piece(_message(value)))
            elif field == 2:
                for inner, setting in _fields(_message(value)):
                    if inner == 3:
                        model_type = _integer(setting)
            elif field == 3:
                for inner, setting in _fields(_message(value)):
                    if inner == 2:
                        charsmap = _message(setting)
        _check_charsmap(charsmap)
    except (IndexError, struct.error, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: not a sentencepiece model, or a damaged one ({error})") from None
    if not pieces:
        raise CheckpointError(f"{where}: a sentencepiece model without pieces; the file is damaged")
    return SentencePieceModel(tuple(pieces), model_type, charsmap)


def _piece(data: bytes) -> Piece:
    text, score, kind = "", 0.0, 1
    for field, value in _fields(data):
        if field == 1:
            text = _message(value).decode("utf-8")
        elif field == 2:
            score = struct.unpack("<f", value)[0]
        elif field == 3:
            kind = _integer(value)
    if not np.isfinite(score):
        raise ValueError(f"the score of piece {text[:40]!r} is {score}")
    return Piece(text, score, kind)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value): integers for varints, bytes for everything else."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        wire = tag & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield tag >> 3, value
            continue
        if wire == 2:
            size, position = _varint(data, position)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {position}")
        if position + size > len(data):
            raise ValueError(f"a field reaches beyond the end at byte {position}")
        yield tag >> 3, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError(f"an integer of more than ten bytes at byte {position}")


def _message(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("a number where bytes are needed")
    return value


def _integer(value: Any) -> int:
    if not isinstance(value, int):
        raise TypeError("bytes where a number is needed")
    return value


def _check_charsmap(charsmap: bytes) -> None:
    """Raises ``ValueError`` unless every step in the double-array trie and every text stay inside.

    The tokenizers library follows the trie without looking at its bounds. Layout: u32 bytes of trie, the
    trie's u32 units, then zero-terminated UTF-8 texts. A unit's offset (darts-clone: bits 10 to 30, shifted
    by 8 if bit 9 is set) leads from position p to p ^ offset, and from there by ^ byte to the next unit;
    bit 8 says that the unit at p ^ offset is a value: the index of a text. Bit 31 marks values.
    """
    if not charsmap:
        return
    size = int.from_bytes(charsmap[:4], "little")
    if len(charsmap) < 4 or size % 4 or size < 1024 or size > len(charsmap) - 4:
        raise ValueError("its normalisation table does not fit its size")
    units = np.frombuffer(charsmap, "<u4", size // 4, 4)
    texts = charsmap[4 + size :]
    texts.decode("utf-8")
    steps = np.flatnonzero(units >> 31 == 0)
    nodes = units[steps]
    targets = steps ^ ((nodes >> 10) << ((nodes & 0x200) >> 6)).astype(np.int64)
    if targets.size and int((targets | 0xFF).max()) >= units.size:
        raise ValueError("its normalisation table leads outside of itself")
    indices = units[targets[nodes >> 8 & 1 == 1]] & 0x7FFFFFFF
    starts = np.append(np.frombuffer(texts, np.uint8) & 0xC0 != 0x80, True)
    if indices.size and (int(indices.max()) > len(texts) or not starts[indices].all()):
        raise ValueError("its normalisation table names a text that it does not have")
