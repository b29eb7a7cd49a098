"""Tokenizers that would make a short text fill the memory end in a CheckpointError before any text is read."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from encast.errors import CheckpointError
from encast.importers.files import Folder
from encast.importers.sentence_modules import TransformerSettings
from encast.importers.tokenizer import TokenizerFiles, read_tokenizer

MANY = 60  # two to this power is more than any memory, so that the tests end only if nothing is encoded


def charsmap(text: bytes) -> str:
    """A trie of 256 empty units, which changes no text, and a text that it might lead to."""
    return base64.b64encode(struct.pack("<I", 1024) + bytes(1024) + text + b"\0").decode()


def normalized(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"normalizer": {"type": "Sequence", "normalizers": list(steps)}}


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}


def read(folder: Path, parts: dict[str, Any]) -> TokenizerFiles:
    whole = json.loads(Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).to_str())
    (folder / "tokenizer.json").write_text(json.dumps({**whole, **parts}))
    return read_tokenizer(Folder(folder), {}, TransformerSettings())


@pytest.mark.parametrize(
    "parts",
    [
        normalized(*[replace("a", "aa")] * MANY),
        normalized(*[normalized(*[replace("a", "aa")] * 8)["normalizer"]] * 8),
        normalized(*[replace("", "a")] * MANY),
        normalized(*[replace("x?", "a", "Regex")] * MANY),
        normalized(*[replace("[x[y]]?", "a", "Regex")] * MANY),
        normalized(*[{"type": "Prepend", "prepend": "a"}, replace("a", "aa")] * MANY),
        normalized(*[replace("a", "\ufdfa"), {"type": "NFKD"}, replace("\u0644", "a")] * MANY),
        normalized(*[{"type": "Precompiled", "precompiled_charsmap": charsmap(b"a" * 100)}] * MANY),
        normalized({"type": "Prepend", "prepend": "\u00e9"}, *[{"type": "ByteLevel"}] * MANY),
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * MANY}},
        normalized(replace("a", "a" * 5000)),
    ],
)
def test_steps_that_grow_without_end(tmp_path: Path, parts: dict[str, Any]) -> None:
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.json: (normalizer|pre_tokenizer) has \d+ steps that can make"
    ):
        read(tmp_path, parts)


ALBERT = [
    replace("``", '"'),
    replace("''", '"'),
    {"type": "NFKD"},
    {"type": "StripAccents"},
    {"type": "Lowercase"},
    {"type": "Precompiled", "precompiled_charsmap": charsmap(b"a" * 18)},
    replace(" {2,}", " ", "Regex"),
]


@pytest.mark.parametrize(
    "parts",
    [
        normalized(*ALBERT),
        normalized({"type": "Prepend", "prepend": "\u2581"}, replace(" ", "\u2581")),
        normalized(*[replace("aa", "a"), replace("b", "a")] * MANY),
        normalized(*[{"type": "NFKC"}, {"type": "Lowercase"}, {"type": "NFD"}, {"type": "StripAccents"}] * 5),
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}, BYTE_LEVEL]}},
    ],
)
def test_steps_of_real_tokenizers(tmp_path: Path, parts: dict[str, Any]) -> None:
    assert read(tmp_path, parts).vocab_size == 2
