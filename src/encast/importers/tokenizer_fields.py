"""Fields of ``tokenizer_config.json`` that say of a tokenizer what ``tokenizer.json`` says too.

The classes that transformers has for a family (``BertTokenizer`` and its kin, not ``PreTrainedTokenizerFast``) make
normaliser and pre-tokenizer of these fields, whatever tokenizer.json has. A field that is given is applied as
transformers 5 does. Where it is absent BERT's normaliser takes the default of the class, in transformers 4 and 5 alike;
of other normalisers tokenizer.json counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

from encast.errors import UnsupportedModelError
from encast.importers.tokenizer_parts import INNER, change_part, steps_of
from encast.importers.tokenizer_settings import TokenizerSettings

__all__ = [
    "Fields",
    "albert_fields",
    "apply_fields",
    "bert_fields",
    "deberta_fields",
    "lowers",
    "piece_fields",
    "roberta_fields",
]

Steps = list[dict[str, Any]]
Fields = Callable[[dict[str, Steps], TokenizerSettings], None]
"""Changes the steps of each part, as tokenizer.json describes them, in place."""


def apply_fields(tokenizer: Tokenizer, settings: TokenizerSettings, fields: Fields) -> bool:
    """False where the tokenizer is what the fields say. Raises ``CheckpointError`` for a field that is no flag and
    ``UnsupportedModelError`` where versions of transformers disagree."""
    before = {part: steps_of(tokenizer, part) for part in INNER}
    after = {part: [dict(step) for step in steps] for part, steps in before.items()}
    fields(after, settings)
    for part, inner in INNER.items():
        if after[part] != before[part]:
            one = len(after[part]) == 1
            change_part(tokenizer, part, after[part][0] if one else {"type": "Sequence", inner: after[part]})
    return after != before


def lowers(normalizer: Steps) -> bool:
    """Whether one of a normaliser's steps lowers the text."""
    return any(step["type"] == "Lowercase" or step.get("lowercase") is True for step in normalizer)


def bert_fields(parts: dict[str, Steps], settings: TokenizerSettings) -> None:
    """BERT, DistilBERT, ELECTRA, MPNet."""
    normalizer = parts["normalizer"]
    lower = settings.flag("do_lower_case", None)
    if len(normalizer) == 1 and normalizer[0]["type"] == "BertNormalizer":
        chinese = settings.flag("tokenize_chinese_chars", None)
        normalizer[0].update(
            lowercase=True if lower is None else lower,
            handle_chinese_chars=True if chinese is None else chinese,
            strip_accents=settings.flag("strip_accents", None),  # None has a meaning: as lowercase says
        )
    elif lower is not None and lower != lowers(normalizer):
        raise UnsupportedModelError(
            f"{settings.where}: do_lower_case is {str(lower).lower()}, and the normaliser in tokenizer.json, which is "
            "no BertNormalizer, does the opposite: transformers 4 goes by that, transformers 5 by the field; remove "
            "the field, or correct it"
        )


def roberta_fields(parts: dict[str, Steps], settings: TokenizerSettings) -> None:
    space = settings.flag("add_prefix_space", None)
    pre_tokenizer = parts["pre_tokenizer"]
    # Behind another step a space would come before every piece.
    if space is not None and len(pre_tokenizer) == 1 and pre_tokenizer[0]["type"] == "ByteLevel":
        pre_tokenizer[0]["add_prefix_space"] = space
        for step in parts["post_processor"]:
            if step["type"] in ("RobertaProcessing", "ByteLevel"):  # which leave that space out of offsets
                step["add_prefix_space"] = space


def piece_fields(parts: dict[str, Steps], settings: TokenizerSettings) -> None:
    """XLM-RoBERTa, CamemBERT."""
    _prepend(parts["pre_tokenizer"], settings, "never")


def albert_fields(parts: dict[str, Steps], settings: TokenizerSettings) -> None:
    normalizer = parts["normalizer"]
    _prepend(parts["pre_tokenizer"], settings, "never")
    keep = settings.flag("keep_accents", None)
    if keep:
        _remove(normalizer, "NFKD", "StripAccents")
    elif keep is False and not any(step["type"] == "StripAccents" for step in normalizer):
        _insert(normalizer, [{"type": "NFKD"}, {"type": "StripAccents"}], "Lowercase", "Precompiled")
    lower = settings.flag("do_lower_case", None)
    if lower is False:
        _remove(normalizer, "Lowercase")
    elif lower and not lowers(normalizer):
        _insert(normalizer, [{"type": "Lowercase"}], "Precompiled")


def deberta_fields(parts: dict[str, Steps], settings: TokenizerSettings) -> None:
    normalizer, pre_tokenizer = parts["normalizer"], parts["pre_tokenizer"]
    _prepend(pre_tokenizer, settings, "first")
    lower, split = settings.flag("do_lower_case", None), settings.flag("split_by_punct", None)
    if lower is False:
        _remove(normalizer, "Lowercase")
    elif lower and not lowers(normalizer):
        normalizer.insert(0, {"type": "Lowercase"})
    if split is False:
        _remove(pre_tokenizer, "Punctuation")
    elif split and not any(step["type"] == "Punctuation" for step in pre_tokenizer):
        pre_tokenizer.insert(0, {"type": "Punctuation", "behavior": "Isolated"})


def _prepend(pre_tokenizer: Steps, settings: TokenizerSettings, without: str) -> None:
    """``without``: the scheme where ``add_prefix_space`` is false."""
    space = settings.flag("add_prefix_space", None)
    for step in pre_tokenizer:
        if space is not None and step["type"] == "Metaspace":
            step["prepend_scheme"] = "always" if space else without


def _remove(steps: Steps, *kinds: str) -> None:
    steps[:] = [step for step in steps if step["type"] not in kinds]


def _insert(steps: Steps, more: Steps, *kinds: str) -> None:
    """Before the first step of ``kinds``, or at the end."""
    place = next((index for index, step in enumerate(steps) if step["type"] in kinds), len(steps))
    steps[place:place] = more
