"""The tokenizer of a checkpoint, as the text of a ``tokenizer.json``.

A ``tokenizer.json`` is used with what ``tokenizer_config.json`` changes in it (``tokenizer_fields``); without one the
tokenizer is built from the vocabulary files (``tokenizer_build``). Texts are cut by whoever encodes them, to
``max_length``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, normalizers

from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers.files import Folder
from encast.importers.sentence_modules import TransformerSettings
from encast.importers.token_types import drop_token_types
from encast.importers.tokenizer_added import add_missing
from encast.importers.tokenizer_build import FAMILIES, Family, build_tokenizer, class_of, family_of, guarded
from encast.importers.tokenizer_fields import apply_fields, lowers
from encast.importers.tokenizer_growth import check_growth
from encast.importers.tokenizer_parts import steps_of
from encast.importers.tokenizer_settings import ROLES, TokenizerSettings, read_tokenizer_settings

__all__ = ["TokenizerFiles", "read_tokenizer"]

_TOKENIZER_LIMIT = 256 << 20
_NO_LIMIT = 10**6
"""``model_max_length`` of tokenizers that know no limit is an absurd number (1e30); no encoder reaches this one."""


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer and what surrounds it.

    ``json``: text of a ``tokenizers`` tokenizer.json, which may hold truncation and padding settings of
    its own that users must override. ``max_length``: longest input in tokens, special ones included, by
    ``sentence_bert_config.json``, else by ``tokenizer_config.json``; None when that sets no limit.
    ``truncation_side``: ``left`` or ``right``. ``special_tokens``: role (``cls``, ``sep``, ``mask``, ``pad``,
    ``unk``, ``bos``, ``eos``) → token, those that the vocabulary has. ``vocab_size``: one more than the
    largest id, added tokens included. ``special_count``: special tokens that a pair of texts gets.
    """

    json: str
    max_length: int | None
    truncation_side: str
    special_tokens: Mapping[str, str]
    vocab_size: int
    special_count: int


def read_tokenizer(folder: Folder, config: Mapping[str, Any], transformer: TransformerSettings) -> TokenizerFiles:
    """Raises ``CheckpointError`` when the folder has no tokenizer, or one that is damaged, and
    ``UnsupportedModelError`` when it is of a kind that is not known or splits special tokens."""
    settings = read_tokenizer_settings(folder)
    if settings.flag("split_special_tokens", False):
        # No field of tokenizer.json says it, so that an artifact could not keep it.
        raise UnsupportedModelError(
            f"{settings.where}: split_special_tokens is true; encast finds special tokens in texts: false is accepted, "
            "or remove the field"
        )
    family = family_of(settings, config)
    if folder.has("tokenizer.json"):
        where = str(folder.path("tokenizer.json"))
        data = folder.read("tokenizer.json", _TOKENIZER_LIMIT)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{where}: not UTF-8 at byte {error.start}; the file is damaged") from None
        with guarded(where):
            tokenizer = Tokenizer.from_str(text)
        # Other classes, such as PreTrainedTokenizerFast, take normaliser and special tokens as tokenizer.json has them.
        own = family if family is not None and _is_own(family, settings, config) else None
        special = settings.special
        if own is not None:
            # A class's own token that no word is would only take an id that the model has no row for.
            has = {role: token for role, token in own.special(settings).items() if _has(tokenizer, token)}
            special = {**has, **special}
        with guarded(where):
            changed = add_missing(tokenizer, settings, special)
        if own is not None:
            changed |= apply_fields(tokenizer, settings, own.fields)
        if changed:
            text = tokenizer.to_str()
    else:
        where = str(folder.root)
        tokenizer = build_tokenizer(folder, settings, family)
        text = tokenizer.to_str()
    if transformer.do_lower_case and not lowers(steps_of(tokenizer, "normalizer")):
        # As sentence-transformers does it: before every other normalisation.
        before = [tokenizer.normalizer] if tokenizer.normalizer is not None else []
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *before])
        text = tokenizer.to_str()
    with guarded(where):
        if not settings.has_token_types(class_of(settings, config)) and drop_token_types(tokenizer):
            text = tokenizer.to_str()
        tokenizer.no_padding()
        tokenizer.no_truncation()
        check_growth(tokenizer, where)
        tokenizer.encode("a", "b")
        vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if vocab_size == 0:
        raise CheckpointError(f"{where}: the tokenizer has an empty vocabulary")
    return TokenizerFiles(
        text,
        _max_length(settings, transformer),
        settings.truncation_side,
        _special_tokens(tokenizer, settings, family),
        vocab_size,
        tokenizer.num_special_tokens_to_add(True),
    )


def _is_own(family: Family, settings: TokenizerSettings, config: Mapping[str, Any]) -> bool:
    """Whether the family is that of the tokenizer's class, and not only of the model."""
    named = class_of(settings, config)
    # transformers 5 has a list of model types whose tokenizer.json it takes whatever class they name.
    return config.get("model_type") != "modernbert" and (named is None or named.removesuffix("Fast") in family.classes)


def _has(tokenizer: Tokenizer, token: AddedToken) -> bool:
    return tokenizer.token_to_id(token.content) is not None


def _max_length(settings: TokenizerSettings, transformer: TransformerSettings) -> int | None:
    # sentence-transformers sets its own length on the tokenizer, so that it counts even where it is the larger one.
    limit = settings.max_length if transformer.max_seq_length is None else transformer.max_seq_length
    return limit if limit is not None and limit < _NO_LIMIT else None


def _special_tokens(tokenizer: Tokenizer, settings: TokenizerSettings, family: Family | None) -> dict[str, str]:
    candidates: dict[str, str] = {}
    for default in [family.defaults] if family else [each.defaults for each in FAMILIES]:
        for role, token in default.items():
            if tokenizer.token_to_id(token) is not None:
                candidates.setdefault(role, token)
    candidates.update({role: token.content for role, token in settings.special.items() if role in ROLES})
    return {
        role: candidates[role]
        for role in ROLES
        if role in candidates and role not in settings.absent and tokenizer.token_to_id(candidates[role]) is not None
    }
