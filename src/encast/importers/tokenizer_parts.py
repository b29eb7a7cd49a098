"""The parts of a tokenizer (normaliser, pre-tokenizer, post-processor) as JSON, which can be read and changed."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer, models

__all__ = ["change_part", "state_of"]


def state_of(part: Any) -> Any:
    """What a part has in tokenizer.json: an object with ``type``, or None where there is no part."""
    return None if part is None else json.loads(part.__getstate__())


def change_part(tokenizer: Tokenizer, name: str, state: Any) -> None:
    """Sets ``normalizer``, ``pre_tokenizer`` or ``post_processor`` to what tokenizer.json would say of it."""
    # The library reads parts as those of a whole tokenizer alone; one without words costs nothing.
    whole = json.loads(Tokenizer(models.WordLevel({}, unk_token="")).to_str())
    setattr(tokenizer, name, getattr(Tokenizer.from_str(json.dumps({**whole, name: state})), name))
