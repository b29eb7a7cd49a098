"""The parts of a tokenizer (normaliser, pre-tokenizer, post-processor) as JSON, which can be read and changed."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer, models

__all__ = ["INNER", "change_part", "state_of", "steps_of"]

INNER = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}
"""Part → what a ``Sequence`` of such calls its steps."""


def state_of(part: Any) -> Any:
    """What a part has in tokenizer.json: an object with ``type``, or None where there is no part."""
    return None if part is None else json.loads(part.__getstate__())


def steps_of(tokenizer: Tokenizer, name: str) -> list[dict[str, Any]]:
    """The steps of a part, in order, those of a ``Sequence`` within a ``Sequence`` too; none where there is no part."""
    return _flat(state_of(getattr(tokenizer, name)), INNER[name])


def _flat(state: Any, inner: str) -> list[dict[str, Any]]:
    if state is None:
        return []
    return [step for part in state[inner] for step in _flat(part, inner)] if state["type"] == "Sequence" else [state]


def change_part(tokenizer: Tokenizer, name: str, state: Any) -> None:
    """Sets ``normalizer``, ``pre_tokenizer`` or ``post_processor`` to what tokenizer.json would say of it."""
    # The library reads parts as those of a whole tokenizer alone; one without words costs nothing.
    whole = json.loads(Tokenizer(models.WordLevel({}, unk_token="")).to_str())
    setattr(tokenizer, name, getattr(Tokenizer.from_str(json.dumps({**whole, name: state})), name))
