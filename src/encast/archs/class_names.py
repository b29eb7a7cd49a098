"""What the class names in ``architectures`` of config.json say."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["SUFFIXES", "stem_of", "task_of"]

SUFFIXES = {
    "Model": "features",
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "tag",
    "ForQuestionAnswering": "answer",
    "ForMaskedLM": "fill_mask",
}
"""Of all architectures: what a suffix stands for."""


def stem_of(name: str) -> str:
    """A class name without its suffix."""
    return re.sub(r"(For[A-Z]\w*|Model|LMHeadModel)$", "", name)


def task_of(name: str, suffixes: Mapping[str, str], classes: Mapping[str, str]) -> str | None:
    """The task of a class name, ``features`` for none; None for a head that is not known.

    ``suffixes``: those that an architecture has besides ``SUFFIXES``; ``classes``: its names without one.
    """
    # "TFBertModel" and "FlaxBertModel" are the same models in other frameworks.
    match = re.fullmatch(r"(?:TF|Flax)?(\w+?)(Model|For[A-Z]\w*|LMHeadModel)", name)
    return {**SUFFIXES, **suffixes}.get(match[2]) if match else {"": "features", **classes}.get(name)
