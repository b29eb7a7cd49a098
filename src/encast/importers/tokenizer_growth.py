"""How much longer a tokenizer's steps may make a text: hostile ones double it again and again."""

from __future__ import annotations

import base64
from itertools import groupby
from math import prod
from typing import Any

from tokenizers import Tokenizer

from encast.errors import CheckpointError
from encast.importers.tokenizer_parts import steps_of

__all__ = ["check_growth"]

_MOST = 2048
"""Real tokenizers have 648 (ALBERT: two Unicode forms, one after the other, and a regex) or much less."""
_UNICODE = 18
"""The longest that a character becomes in any form of Unicode: U+FDFA, a whole sentence."""
_BYTES = 4
"""Characters that a character becomes where its UTF-8 is spelled out."""


def check_growth(tokenizer: Tokenizer, where: str) -> None:
    """Raises ``CheckpointError`` before a text is read whose characters could become more than ``_MOST``."""
    for part in ("normalizer", "pre_tokenizer"):
        growth, steps = 1.0, steps_of(tokenizer, part)
        for form, run in groupby(steps, _is_form):
            # Unicode forms in a row converge: what the first has spelled out stays.
            each = [_growth(step) for step in run]
            growth *= max(each) if form else prod(each, start=1.0)
        if growth > _MOST:
            raise CheckpointError(
                f"{where}: {part} has {len(steps)} steps that can make a text {growth:.3g} times as long; at most "
                f"{_MOST} is accepted, which real tokenizers are far from: the file is damaged or hostile"
            )


def _is_form(step: dict[str, Any]) -> bool:
    return step["type"] not in ("Replace", "Prepend", "Precompiled", "ByteLevel")


def _growth(step: dict[str, Any]) -> float:
    kind = step["type"]
    if kind == "Replace":
        pattern, length = step["pattern"], len(step["content"])
        if "String" in pattern:
            literal = len(pattern["String"])
            return max(1, length / literal) if literal else 1 + length
        return 1 + length  # a match may be empty, and is then replaced at every place
    if kind == "Prepend":
        return 1 + len(step["prepend"])
    if kind == "Precompiled":
        return _longest(step["precompiled_charsmap"])
    if kind == "ByteLevel":
        return _BYTES
    # Of the others, BertNormalizer may put spaces around a character, and NFC and NFD give up to four for one.
    return _UNICODE if kind in ("NFKC", "NFKD") else 4


def _longest(charsmap: str) -> int:
    """Of the texts of a sentencepiece charsmap: the size of its trie, the trie, texts with a NUL behind each."""
    data = base64.b64decode(charsmap)
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(1, *(len(text.decode("utf-8", "replace")) for text in texts.split(b"\0")))
