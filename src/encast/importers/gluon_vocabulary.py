"""The vocabulary of a GluonNLP model (``Vocab.to_json``), as the files that a Hugging Face tokenizer is built from.

``src/gluonnlp/vocab/vocab.py``: ``idx_to_token`` has the tokens by id, ``unknown_token`` and ``identifiers_to_tokens``
the special ones; before 0.9 these stood beside each other (``padding_token``, ``cls_token``, ...).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers.files import Folder, parse_json, quote
from encast.importers.tokenizer_build import FAMILIES, VOCAB_LIMIT, trim_line

__all__ = ["tokenizer_files"]

_ROLES = {"padding": "pad", "cls": "cls", "sep": "sep", "mask": "mask", "bos": "bos", "eos": "eos"}
_MERGES = re.compile(r"merges\.txt|openai_webtext_bpe_ranks-[0-9a-f]+\.json")
_CASE = re.compile(r"(?<![a-z])(un)?cased(?![a-z])")
_PADDING_ID = 1
"""Of RoBERTa's vocabulary, whose numbers are fairseq's; its position table starts behind it."""


def tokenizer_files(folder: Folder, params: str, model_type: str, rows: int) -> dict[str, bytes]:
    """File name → content, of a tokenizer of ``model_type`` for the file ``params`` in ``folder``, whose table of words
    has ``rows`` rows.

    Raises ``CheckpointError`` when the vocabulary is missing or damaged, of another model, or does not say what is
    needed, and ``UnsupportedModelError`` for one of sentencepiece.
    """
    name = _find(folder, params)
    where = str(folder.path(name))
    tokens, special = _read(folder, name)
    given = folder.object("tokenizer_config.json") if folder.has("tokenizer_config.json") else {}
    config: dict[str, Any] = {}
    if model_type == "roberta":
        if "<pad>" not in tokens[_PADDING_ID : _PADDING_ID + 1]:
            raise CheckpointError(
                f"{where}: token {_PADDING_ID} must be <pad>, as in RoBERTa's vocabulary; this one is of another model"
            )
        config = {"tokenizer_class": "GluonRobertaTokenizer"}
        # BERTSentenceTransform takes bos and eos where a vocabulary has no cls and sep.
        special |= {"cls": special["cls"] or special["bos"], "sep": special["sep"] or special["eos"]}
        made = {"vocab.json": json.dumps({token: index for index, token in enumerate(tokens)}).encode()}
        made["merges.txt"] = _merges(folder)
    else:
        if not any(token.startswith("##") for token in tokens) and any(token.startswith("\u2581") for token in tokens):
            raise UnsupportedModelError(
                f"{where}: pieces of a sentencepiece model, which this file does not have whole; put a tokenizer.json "
                "for it beside the weights"
            )
        if "do_lower_case" not in given:
            config["do_lower_case"] = _lowers(tokens, (name, params), where)
        made = {"vocab.txt": _lines(tokens, where)}
    # A net is made with a row for every token, so another number of them is the vocabulary of another model.
    if len(tokens) != rows:
        raise CheckpointError(
            f"{where}: has {len(tokens)} tokens, and the table of words in {params} has {rows} rows; give the "
            "vocabulary that the model was made with"
        )
    config.update(_special_tokens(special, tokens, given, model_type, folder, where))
    return {**made, "tokenizer_config.json": json.dumps({**config, **given}).encode()}


def _find(folder: Folder, params: str) -> str:
    stem = params.removesuffix(".params")
    known = (f"{stem}.vocab", f"{stem}.vocab.json", "vocab.json")
    name = folder.pick(known)
    others = sorted(name for name in folder.names if name.endswith(".vocab"))
    if name is None and len(others) == 1:
        return others[0]
    if name is None:
        found = f"; there are {', '.join(map(quote, others[:5]))}: rename the right one" if others else ""
        raise CheckpointError(
            f"{folder.root}: no vocabulary for {params}; accepted are {', '.join(known)} (of Vocab.to_json), a "
            f"single *.vocab, or a tokenizer.json{found}"
        )
    return name


def _read(folder: Folder, name: str) -> tuple[list[str], dict[str, str | None]]:
    """The tokens by id, and role → special token."""
    where = str(folder.path(name))
    content = parse_json(folder.read(name, VOCAB_LIMIT), where)
    if not isinstance(content, dict) or not isinstance(content.get("idx_to_token"), list):
        raise CheckpointError(f"{where}: idx_to_token must be a list of tokens; Vocab.to_json of GluonNLP writes it")
    tokens: list[Any] = content["idx_to_token"]
    if not tokens or not all(isinstance(token, str) and token for token in tokens):
        raise CheckpointError(f"{where}: idx_to_token must be a list of strings, none of them empty")
    if lone := next((token for token in tokens if any("\ud800" <= char <= "\udfff" for char in token)), None):
        raise CheckpointError(f"{where}: the token {quote(lone)} has half of a surrogate pair; the file is damaged")
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if ids[token] != index)
        raise CheckpointError(f"{where}: the token {quote(twice)} stands twice in idx_to_token; its id is not certain")
    other = content.get("token_to_idx", ids)
    if other != ids:
        raise CheckpointError(f"{where}: token_to_idx and idx_to_token say different ids; write the vocabulary anew")
    named = content.get("identifiers_to_tokens", {})
    if not isinstance(named, dict):
        raise CheckpointError(f"{where}: identifiers_to_tokens must be an object")
    special: dict[str, str | None] = {"unk": content.get("unknown_token")}
    special.update({role: named.get(f"{key}_token", content.get(f"{key}_token")) for key, role in _ROLES.items()})
    for role, token in special.items():
        if token is not None and (not isinstance(token, str) or token not in ids):
            raise CheckpointError(f"{where}: its special token for {role}, {quote(token)}, is none of its tokens")
    return tokens, special


def _special_tokens(
    special: Mapping[str, str | None],
    tokens: Sequence[str],
    given: Mapping[str, Any],
    model_type: str,
    folder: Folder,
    where: str,
) -> dict[str, str | None]:
    """Fields of tokenizer_config.json, every token one of ``tokens``, so that none is added behind the table."""
    name = "GluonRobertaTokenizer" if model_type == "roberta" else "BertTokenizer"
    family = next(family for family in FAMILIES if name in family.classes)
    known = set(tokens)
    fields: dict[str, str | None] = {f"{role}_token": token for role, token in special.items() if token is not None}
    for role, default in family.defaults.items():
        own = given.get(f"{role}_token")
        own = own.get("content") if isinstance(own, dict) else own
        if isinstance(own, str) and own not in known:
            raise CheckpointError(
                f"{folder.path('tokenizer_config.json')}: {role}_token is {quote(own)}, which {where} does not have; "
                "correct the field or leave it out"
            )
        if fields.get(f"{role}_token") is None:
            if default not in known and role not in family.optional and not isinstance(own, str):
                raise CheckpointError(
                    f"{where}: names no special token for {role}, and {quote(default)} is none of its tokens; write "
                    "the vocabulary with its special tokens"
                )
            fields[f"{role}_token"] = default if default in known else None
    return fields


def _lines(tokens: Sequence[str], where: str) -> bytes:
    for token in tokens:
        if "\n" in token or trim_line(token) != token:
            raise CheckpointError(
                f"{where}: the token {quote(token)} ends in white space, which no word piece does; it is damaged"
            )
    return "\n".join(tokens).encode()


def _lowers(tokens: Sequence[str], names: tuple[str, ...], where: str) -> bool:
    """Whether texts are lowered: GluonNLP itself goes by the name of the data set, which its files have in theirs."""
    found = {match[1] is not None for name in names for match in re.finditer(_CASE, name.lower())}
    if len(found) == 2:
        raise CheckpointError(
            f"{where}: the names {' and '.join(map(quote, names))} say both cased and uncased; rename the files, or "
            'write a tokenizer_config.json beside them: {"do_lower_case": true} or false'
        )
    if found:
        return found.pop()
    words = [token for token in tokens if not re.fullmatch(r"\[.*\]", token)]
    # Lowered texts have no capital, and others have.
    if any(re.search("[A-Z]", word) for word in words):
        return False
    if any(re.search("[a-z]", word) for word in words):
        return True
    raise CheckpointError(
        f"{where}: has no Latin letters, so it does not tell whether texts are lowered; write a tokenizer_config.json "
        'beside it: {"do_lower_case": true} or false'
    )


def _merges(folder: Folder) -> bytes:
    found = sorted(name for name in folder.names if _MERGES.fullmatch(name))
    if not found:
        raise CheckpointError(
            f"{folder.root}: no merges; RoBERTa's vocabulary does not tell which pieces are joined first: put "
            "GluonNLP's openai_webtext_bpe_ranks-396d4d8e.json, or the merges.txt of GPT-2 or RoBERTa, or a "
            "tokenizer.json beside the weights"
        )
    return folder.read(found[0], VOCAB_LIMIT)
