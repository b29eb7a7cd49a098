"""Small tokenizers for made checkpoints: word pieces, byte-level BPE and unigram pieces, in the hub's files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["BYTE_LEVEL_VOCAB", "write_tokenizer"]

BYTE_LEVEL_VOCAB = 300  # 256 bytes, 5 special tokens, 39 merges
_ROBERTAS = ("roberta", "xlm-roberta", "camembert")
_WORDS = "the of and to in is was for on that with as it by he at from are this"
_TAILS = "ing ed er es ly tion al en est th an on or ar"


def write_tokenizer(folder: Path, arch: str, stem: str, vocab: int, positions: int, whole: bool) -> None:
    """Writes the files of the tokenizer that checkpoints of ``arch`` (a ``model_type``) come with.

    ``stem``: its class name's; ``vocab``: the size of the embedding; ``whole``: also as tokenizer.json, which is the
    only form for architectures that come with a sentencepiece model.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    limit = positions - (2 if arch in (*_ROBERTAS, "mpnet") else 0)
    settings: dict[str, Any] = {"model_max_length": limit}
    if arch in (*_ROBERTAS, "mpnet"):
        special = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>"}
        first, last, mask = "<s>", "</s>", "<mask>"
    elif arch == "albert":
        special = {"pad": "<pad>", "unk": "<unk>", "cls": "[CLS]", "sep": "[SEP]"}
        first, last, mask = "[CLS]", "[SEP]", "[MASK]"
    else:
        special = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]"}
        first, last, mask = "[CLS]", "[SEP]", "[MASK]"
    settings.update({f"{key}_token": token for key, token in special.items()}, mask_token=mask)
    ids: dict[str, int] = {token: index for index, token in enumerate([*special.values(), mask])}

    if arch == "roberta":
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        merges = _merges(BYTE_LEVEL_VOCAB - len(ids) - len(letters))
        for piece in [*letters, *("".join(merge) for merge in merges)]:
            ids[piece] = len(ids)
        (folder / "vocab.json").write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
        lines = ["#version: 0.2", *(" ".join(merge) for merge in merges)]
        (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        settings["tokenizer_class"] = "RobertaTokenizer"
    elif arch in ("xlm-roberta", "camembert", "albert", "deberta-v2"):
        for piece in _words("▁", ""):
            if len(ids) < vocab:
                ids.setdefault(piece, len(ids))
        scores = [(token, -0.1 * index) for token, index in ids.items()]
        tokenizer = Tokenizer(models.Unigram(scores, unk_id=ids[special["unk"]], byte_fallback=False))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        settings["tokenizer_class"] = stem + "Tokenizer"
        whole = True
    else:
        for piece in _words("", "##"):
            if len(ids) < vocab:
                ids.setdefault(piece, len(ids))
        (folder / "vocab.txt").write_text("\n".join(ids) + "\n", encoding="utf-8")
        unknown = special["unk"]
        tokenizer = Tokenizer(models.WordPiece(ids, unk_token=unknown))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        settings.update(tokenizer_class=stem + "Tokenizer", do_lower_case=True)
    tokenizer.add_special_tokens([*special.values(), mask])
    second = ids[last]
    if arch in _ROBERTAS or arch == "mpnet":
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A {last}",
            pair=f"{first} $A {last} {last} $B {last}",
            special_tokens=[(first, ids[first]), (last, second)],
        )
    else:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A {last}",
            pair=f"{first} $A {last} $B:1 {last}:1",
            special_tokens=[(first, ids[first]), (last, second)],
        )
    if whole:
        tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _words(start: str, inside: str) -> Iterator[str]:
    """Pieces of a vocabulary: single characters first, so that every ASCII text has a tokenisation."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    yield from (start + letter for letter in letters)
    yield from (inside + letter for letter in letters)
    yield from ".,!?'\"()-:;"
    yield from (start + word for word in _WORDS.split())
    yield from (inside + tail for tail in _TAILS.split())
    for left in "bcdfglmnprst":
        for right in "aeiou":
            yield start + left + right
            yield inside + left + right


def _merges(count: int) -> list[tuple[str, str]]:
    pairs = [(left, right) for right in "aeiou" for left in "tnrsldhcm"]
    return [("Ġ", "t"), ("Ġ", "a"), *pairs][:count]
