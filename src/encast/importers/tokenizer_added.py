"""Added and special tokens that files beside the vocabulary name. They get ids in the order of transformers 5."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tokenizers import AddedToken, Tokenizer

from encast.errors import CheckpointError
from encast.importers.files import quote
from encast.importers.tokenizer_settings import ROLES, TokenizerSettings

__all__ = ["add_missing", "add_special"]


def add_special(
    tokenizer: Tokenizer,
    settings: TokenizerSettings,
    special: Mapping[str, AddedToken],
    symbols: Sequence[AddedToken] | None = None,
) -> None:
    """Registers added tokens (which may extend the vocabulary), then special ones by role, then extra ones.

    ``special``: role or custom name → token; ``symbols``: the vocabulary's own, in place of those of
    special_tokens_map.json. Raises ``CheckpointError`` when an added token gets another id than its own.
    """
    named = {token.content for token in special.values()}
    tokens: list[AddedToken] = []
    for _, token in settings.added:
        if token.content in named:
            token.special = True
        tokens.append(token)
    tokens.extend(_by_role(special))
    if settings.extra is not None:
        tokens.extend(settings.extra)
    else:
        tokens.extend(settings.legacy_extra if symbols is None else symbols)
    seen: set[str] = set()
    for token in tokens:
        if token.content not in seen:
            seen.add(token.content)
            tokenizer.add_tokens([token])
    _check_ids(tokenizer, settings, settings.added)


def add_missing(tokenizer: Tokenizer, settings: TokenizerSettings, special: Mapping[str, AddedToken]) -> bool:
    """Registers what the files beside a tokenizer.json name and it has not as an added token, in that order; False
    where nothing is missing. Words of the vocabulary keep their ids. Raises ``CheckpointError`` as ``add_special``."""
    known = tokenizer.get_added_tokens_decoder()
    exact = {repr(token) for token in known.values()}
    named = {token.content for token in special.values()}
    told = "added_tokens_decoder" in settings.config
    # Where added_tokens_decoder says the same token with other flags it counts; added_tokens.json never does.
    added = [each for each in settings.added if (repr(each[1]) not in exact if told else each[0] not in known)]
    new = [each for each in added if tokenizer.token_to_id(each[1].content) is None]
    tokens = [token for _, token in added]
    for token in tokens:
        token.special = token.special or token.content in named
    contents = {token.content for token in [*known.values(), *tokens]}
    for token in [*_by_role(special), *(settings.legacy_extra if settings.extra is None else settings.extra)]:
        if token.content not in contents:
            contents.add(token.content)
            tokens.append(token)
    tokenizer.add_tokens(tokens)
    _check_ids(tokenizer, settings, new)
    return bool(tokens)


def _by_role(special: Mapping[str, AddedToken]) -> list[AddedToken]:
    roles = [*(role for role in ROLES if role in special), *(name for name in special if name not in ROLES)]
    return [special[role] for role in roles]


def _check_ids(tokenizer: Tokenizer, settings: TokenizerSettings, added: Iterable[tuple[int, AddedToken]]) -> None:
    for index, token in added:
        if tokenizer.token_to_id(token.content) != index:
            raise CheckpointError(
                f"{settings.where}: the added token {quote(token.content)} is said to have id {index}, the vocabulary "
                f"gives it {tokenizer.token_to_id(token.content)}; the tokenizer's files are from different versions"
            )
