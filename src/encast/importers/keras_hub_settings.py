"""The settings that KerasHub's classes write (``get_config``), and the values that they may have here.

The tables have every field of KerasHub 0.32 and KerasNLP 0.12. Of a field that stands in none of them nobody can tell
what it changes, so it is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers.files import quote, shown

__all__ = ["BACKBONES", "PREPROCESSOR", "TASKS", "TOKENIZERS", "need_same", "read_settings", "registered"]

_MISSING = object()


@dataclass(frozen=True)
class _Field:
    """A setting: what ``accepted`` says, ``fits`` checks. ``counts``: whether its value is used, and then is
    ``default`` where the file leaves the field out."""

    accepted: str
    fits: Callable[[Any], bool]
    counts: bool = False
    default: Any = None
    why: str = ""


Fields = Mapping[str, _Field]

_IGNORED = _Field("", lambda value: True)
"""Names, and what matters in training only."""


def _only(*values: Any, counts: bool = False) -> _Field:
    text = " or ".join(json.dumps(value) for value in values)
    # True == 1 in Python.
    return _Field(text, lambda value: any(type(value) is type(one) and value == one for one in values), counts)


def _size(default: Any = _MISSING) -> _Field:
    return _Field("a positive integer", lambda value: type(value) is int and 0 < value < 1 << 31, True, default)


def _flag() -> _Field:
    return _Field("true or false", lambda value: isinstance(value, bool), True, False)


_FLOATS = ("float16", "bfloat16", "float32", "float64", "mixed_float16", "mixed_bfloat16")


def _is_float_policy(value: Any) -> bool:
    if isinstance(value, dict) and value.get("class_name") in ("DTypePolicy", "FloatDTypePolicy"):
        config = value.get("config")
        value = config.get("name") if isinstance(config, dict) else ""
    return value is None or (isinstance(value, str) and value in _FLOATS)


_BACKBONE: Fields = {
    "name": _IGNORED,
    "trainable": _IGNORED,
    "dropout": _IGNORED,
    "dtype": _Field(
        "a policy of floating-point numbers",
        _is_float_policy,
        why="; quantize() leaves another one, so save the preset before it",
    ),
    "vocabulary_size": _size(),
    "num_layers": _size(),
    "num_heads": _size(),
    "hidden_dim": _size(),
    "intermediate_dim": _size(),
    "max_sequence_length": _size(512),
}
BACKBONES: Mapping[str, Fields] = {
    "Bert": {**_BACKBONE, "num_segments": _size(2)},
    "DistilBert": _BACKBONE,
    "Roberta": _BACKBONE,
}
"""By the name of the class without ``Backbone``."""

_TASK: Fields = {"backbone": _IGNORED, "preprocessor": _IGNORED, "name": _IGNORED}
"""The two that are objects themselves are looked at apart."""
TASKS: Mapping[str, Fields] = {
    "classify": {
        **_TASK,
        "dropout": _IGNORED,
        "num_classes": _size(),
        "activation": _only("linear", "softmax", None, counts=True),
        "hidden_dim": _Field("a positive integer or null", lambda value: value is None or type(value) is int, True),
    },
    "fill_mask": _TASK,
}

PREPROCESSOR: Fields = {
    "name": _IGNORED,
    "trainable": _IGNORED,
    "dtype": _IGNORED,
    "config_file": _IGNORED,
    "tokenizer": _IGNORED,
    "sequence_length": _size(512),
    "truncate": _only("round_robin"),
    "mask_selection_rate": _IGNORED,
    "mask_selection_length": _IGNORED,
    "mask_token_rate": _IGNORED,
    "random_token_rate": _IGNORED,
}

_TOKENIZER: Fields = {
    "name": _IGNORED,
    "trainable": _IGNORED,
    "dtype": _IGNORED,
    "config_file": _only("tokenizer.json"),
    "vocabulary": _only(None),
    "sequence_length": _only(None),
}
_WORD_PIECE: Fields = {
    **_TOKENIZER,
    "lowercase": _flag(),
    "strip_accents": _flag(),
    "split": _only(True),
    "split_on_cjk": _only(True),
    "suffix_indicator": _only("##"),
    "oov_token": _only("[UNK]"),
    "special_tokens": _only(None),
    "special_tokens_in_strings": _only(False),
}
_SPECIAL = ("<s>", "</s>", "<pad>", "<mask>")
TOKENIZERS: Mapping[str, Fields] = {
    "Bert": _WORD_PIECE,
    "DistilBert": _WORD_PIECE,
    "Roberta": {
        **_TOKENIZER,
        "merges": _only(None),
        "add_prefix_space": _flag(),
        # KerasHub makes a set of them, so the order says nothing.
        "unsplittable_tokens": _Field(
            f"null or a list of {', '.join(_SPECIAL)}",
            lambda value: value is None or (isinstance(value, list) and sorted(map(str, value)) == sorted(_SPECIAL)),
        ),
    },
}
"""By the name of the class without ``Tokenizer``."""


def read_settings(config: Mapping[str, Any], fields: Fields, where: str) -> dict[str, Any]:
    """The values that count, by name; ``where`` is the file and what in it.

    Raises ``CheckpointError`` for values that no class of KerasHub has, and ``UnsupportedModelError`` for fields that
    are not known and for values that encast has not.
    """
    for name in config:
        if name not in fields:
            raise UnsupportedModelError(
                f"{where}: {quote(name)} is no setting that is known of KerasHub 0.32 or KerasNLP 0.12, and what it "
                f"changes neither; known are {', '.join(fields)}"
            )
    found: dict[str, Any] = {}
    for name, field in fields.items():
        value = config.get(name, field.default)
        if value is _MISSING:
            raise CheckpointError(f"{where}: {name} is missing; {field.accepted} is needed")
        if name in config and not field.fits(value):
            kind = CheckpointError if field.counts and name != "activation" else UnsupportedModelError
            raise kind(f"{where}: {name} is {shown(value)}; {field.accepted} is read{field.why}")
        if field.counts:
            found[name] = value
    return found


def need_same(one: Mapping[str, Any], one_where: str, other: Mapping[str, Any], other_where: str) -> None:
    """Raises ``CheckpointError`` where settings differ that are stored twice, both of one table."""
    for name, value in one.items():
        if value != other[name]:
            raise CheckpointError(
                f"{name} is {shown(value)} in {one_where} and {shown(other[name])} in {other_where}, and KerasHub "
                "takes one or the other by how the preset is loaded; write the same into both"
            )


def registered(stored: object, where: str) -> tuple[str, Mapping[str, Any]]:
    """Class and config of what Keras serialised; raises ``CheckpointError`` for what is not of KerasHub."""
    name, config = (stored.get("registered_name"), stored.get("config")) if isinstance(stored, dict) else (None, None)
    match = re.fullmatch(r"keras_(?:hub|nlp)>(\w+)", name) if isinstance(name, str) else None
    if match is None or not isinstance(config, dict):
        raise CheckpointError(
            f"{where}: registered_name is {shown(name)}; a preset of KerasHub has keras_hub>CLASS, with a config"
        )
    return match[1], config
