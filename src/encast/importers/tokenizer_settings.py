"""``tokenizer_config.json`` and the files of special and added tokens, merged.

Precedence as in transformers 5: ``added_tokens_decoder`` of the config when there is one, else
``special_tokens_map.json`` over the config, and ``added_tokens.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken

from encast.errors import CheckpointError
from encast.importers.files import Folder, quote

__all__ = ["ROLES", "TokenizerSettings", "read_tokenizer_settings"]

ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Roles of special tokens, in the order in which absent ones are added to a vocabulary."""

_UNTYPED_CLASSES = ("DistilBertTokenizer", "DistilBertTokenizerFast", "TokenizersBackend")
"""Classes that give a model no token types unless told. transformers 5 alone writes TokenizersBackend; of what older
versions wrote (PreTrainedTokenizerFast, AlbertTokenizer) it gives none either, but version 4 did, in training too."""

_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class TokenizerSettings:
    """``special``: role or custom name → token; ``plain``: those of them given as bare strings; ``absent``: roles
    that are null; ``added``: (id, token) sorted by id; ``extra``: further special tokens, ``legacy_extra`` those
    of special_tokens_map.json, which give way to ``extra`` and to a sentencepiece model's own."""

    where: str
    config: Mapping[str, Any]
    special: Mapping[str, AddedToken]
    plain: frozenset[str]
    absent: frozenset[str]
    added: tuple[tuple[int, AddedToken], ...]
    extra: tuple[AddedToken, ...] | None
    legacy_extra: tuple[AddedToken, ...]

    @property
    def tokenizer_class(self) -> str | None:
        name = self.config.get("tokenizer_class")
        if name is not None and not isinstance(name, str):
            raise CheckpointError(f"{self.where}: tokenizer_class must be a string")
        return name

    def has_token_types(self, tokenizer_class: str | None) -> bool:
        """Whether the model was trained with token types, by ``model_input_names``, else by the class."""
        names = self.config.get("model_input_names")
        if names is None:
            return tokenizer_class not in _UNTYPED_CLASSES
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"{self.where}: model_input_names must be a list of strings, or be absent")
        return "token_type_ids" in names

    @property
    def truncation_side(self) -> str:
        side = self.config.get("truncation_side", "right")
        if side not in ("left", "right"):
            raise CheckpointError(f"{self.where}: truncation_side is {quote(side)}; left or right is needed")
        return str(side)

    @property
    def max_length(self) -> int | None:
        length = self.config.get("model_max_length", self.config.get("max_len"))
        if length is None:
            return None
        if isinstance(length, bool) or not isinstance(length, (int, float)) or length < 1 or length != length // 1:
            raise CheckpointError(f"{self.where}: model_max_length must be a positive integer")
        return int(length)

    def flag(self, name: str, default: bool | None) -> bool | None:
        value = self.config.get(name, default)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {name} must be true or false")
        return value


def read_tokenizer_settings(folder: Folder) -> TokenizerSettings:
    """Empty settings when the folder has none of the files; raises ``CheckpointError`` on malformed ones."""
    where = str(folder.path("tokenizer_config.json"))
    config = folder.object("tokenizer_config.json") if folder.has("tokenizer_config.json") else {}
    values: dict[str, Any] = {key: value for key, value in config.items() if _names_token(key, value)}
    extra = config.get("extra_special_tokens") or config.get(
        "additional_special_tokens", config.get("extra_special_tokens")
    )
    legacy: Any = None
    added: dict[int, AddedToken] = {}
    if "added_tokens_decoder" in config:
        for key, value in _object(config["added_tokens_decoder"], f"{where}: added_tokens_decoder").items():
            if not key.isascii() or not key.isdigit() or len(key) > 9 or not isinstance(value, dict):
                raise CheckpointError(f"{where}: added_tokens_decoder must map ids to tokens; {quote(key)} does not")
            added[int(key)] = _token(value, where, special=False)
    else:
        if folder.has("special_tokens_map.json"):
            tokens = folder.object("special_tokens_map.json")
            values.update({key: value for key, value in tokens.items() if _names_token(key, value)})
            legacy = tokens.get("additional_special_tokens")
            more = tokens.get("extra_special_tokens")
            if isinstance(more, list) and isinstance(extra, (list, type(None))):
                extra = [*(extra or []), *more]
            elif more is not None:
                extra = more
        if folder.has("added_tokens.json"):
            named = {_token(value, where, special=True).content for value in values.values()}
            for content, index in folder.object("added_tokens.json").items():
                if type(index) is not int or not 0 <= index < 2**31:
                    raise CheckpointError(f"{folder.path('added_tokens.json')}: {quote(content)} has no valid id")
                special = content in named
                added[index] = AddedToken(content, normalized=not special, special=special)
    if isinstance(extra, dict):
        values.update(extra)
        extra = None
    if not isinstance(extra, (list, type(None))) or not isinstance(legacy, (list, type(None))):
        raise CheckpointError(f"{where}: extra_special_tokens must be a list of tokens")
    by_content = {token.content: token for token in added.values()}
    roles: dict[str, AddedToken] = {}
    for key, value in values.items():
        token = _token(value, where, special=True)
        roles[key.removesuffix("_token")] = by_content.get(token.content, token)
    plain = frozenset(
        key.removesuffix("_token")
        for key, value in values.items()
        if isinstance(value, str) and value not in by_content
    )
    extras = None if extra is None else tuple(_token(value, where, special=True) for value in extra)
    absent = frozenset(role for role in ROLES if config.get(role + "_token", "") is None and role not in roles)
    legacy_extra = tuple(_token(value, where, special=True) for value in legacy or ())
    by_id = tuple(sorted(added.items(), key=lambda item: item[0]))
    return TokenizerSettings(where, config, roles, plain, absent, by_id, extras, legacy_extra)


def _names_token(key: str, value: Any) -> bool:
    return key.endswith("_token") and isinstance(value, (str, dict))


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must be an object")
    return value


def _token(value: Any, where: str, *, special: bool) -> AddedToken:
    """A token from its string or from the object that ``AddedToken`` is stored as."""
    if isinstance(value, str) and value:
        return AddedToken(value, special=special)
    content = value.get("content") if isinstance(value, dict) else None
    flags = {name: value[name] for name in _TOKEN_FLAGS if name in value} if isinstance(value, dict) else {}
    if not isinstance(content, str) or not content or not all(isinstance(flag, bool) for flag in flags.values()):
        raise CheckpointError(f"{where}: a special token must be a string or an object with content and flags")
    return AddedToken(content, **{"special": special, **flags})
