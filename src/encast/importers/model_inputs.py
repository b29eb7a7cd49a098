"""What the inputs of a graph mean, by their names: of ONNX files and of TensorFlow's SavedModels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["INPUTS", "OTHER_NAMES", "Inputs", "meaning"]

INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
"""In the words of transformers."""

OTHER_NAMES = {
    "input_mask": "attention_mask",
    "segment_ids": "token_type_ids",
    "input_word_ids": "input_ids",
    "input_type_ids": "token_type_ids",
}
"""Those of google-research/bert, and of the encoders of TensorFlow's Model Garden."""


@dataclass(frozen=True)
class Inputs:
    """``names``: by the file's name of an input what it is. ``sequences`` and ``positions``: the sizes that the file
    fixes, None for those that it leaves open."""

    names: Mapping[str, str]
    sequences: int | None = None
    positions: int | None = None


def meaning(name: str) -> str | None:
    """One of ``INPUTS``; None for a name that an encoder's input does not have."""
    plain = name.removesuffix(":0")  # as TensorFlow calls the first output of a placeholder
    what = OTHER_NAMES.get(plain, plain)
    return what if what in INPUTS else None
