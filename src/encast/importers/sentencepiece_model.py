"""Reading a sentencepiece ``.model`` file: the few fields of its protocol buffer that tokenizers need.

Schema: ``sentencepiece_model.proto`` (``ModelProto``).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from encast.errors import CheckpointError
from encast.importers.protobuf import MALFORMED, Bytes, fields, integer, message, text

__all__ = ["CONTROL", "UNKNOWN", "USER_DEFINED", "Piece", "SentencePieceModel", "parse_sentencepiece"]

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
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
        for field, value in fields(data):
            if field == 1:
                pieces.append(_piece(message(value)))
            elif field == 2:
                for inner, setting in fields(message(value)):
                    if inner == 3:
                        model_type = integer(setting)
            elif field == 3:
                for inner, setting in fields(message(value)):
                    if inner == 2:
                        charsmap = bytes(message(setting))
        _check_charsmap(charsmap)
    except MALFORMED as error:
        raise CheckpointError(f"{where}: not a sentencepiece model, or a damaged one ({error})") from None
    if not pieces:
        raise CheckpointError(f"{where}: a sentencepiece model without pieces; the file is damaged")
    return SentencePieceModel(tuple(pieces), model_type, charsmap)


def _piece(data: Bytes) -> Piece:
    word, score, kind = "", 0.0, 1
    for field, value in fields(data):
        if field == 1:
            word = text(value)
        elif field == 2:
            score = struct.unpack("<f", message(value))[0]
        elif field == 3:
            kind = integer(value)
    if not np.isfinite(score):
        raise ValueError(f"the score of piece {word[:40]!r} is {score}")
    return Piece(word, score, kind)


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
