"""Reading ``config.json``: every field is checked as it is read, and every error names it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from encast.errors import CheckpointError, UnsupportedModelError

__all__ = ["ACTIVATION_NAMES", "Config"]

ACTIVATION_NAMES = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
"""The config's names of activations to the op table's. ``gelu_fast`` writes sqrt(2/pi) with ten digits, which is the
same f32 number; the others of one row are the same formula, written differently."""

_PROBLEM_TYPES = {
    "single_label_classification": "single_label",
    "multi_label_classification": "multi_label",
    "regression": "regression",
}
_ABSENT = object()
# Beyond what any real model has, and small enough that no product of two of them can overflow 64 bits.
_MOST = 1 << 24
_LARGEST = 1e30


class Config:
    """A checkpoint's config with checked access.

    Values of a wrong type or range raise ``CheckpointError``, well-formed ones that ask for arithmetic that encast
    does not have raise ``UnsupportedModelError``; ``where`` says in both which file is meant.
    """

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self.where = where
        if not isinstance(fields, Mapping):
            raise CheckpointError(f"{where}: a JSON object is needed, this is a {type(fields).__name__}")
        self._fields = fields

    def count(self, *names: str, default: int | None = None, least: int = 1, most: int = _MOST) -> int:
        """An integer from ``least`` to ``most``; ``names`` are spellings of one field, the usual one first."""
        name, value = self._find(names)
        if value is _ABSENT:
            if default is None:
                raise CheckpointError(
                    f"{self.where}: {name} is missing; it cannot be told from the weights: add it, an integer"
                )
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise CheckpointError(
                f"{self.where}: {name} is {value!r}; an integer from {least} to {most} is needed: correct the file"
            )
        return value

    def eps(self, name: str, default: float) -> float:
        """A layer norm's epsilon: above 0, at most 1."""
        _, value = self._find((name,))
        if value is _ABSENT:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0.0 < value <= 1.0:
            raise CheckpointError(
                f"{self.where}: {name} is {value!r}; a number above 0 and at most 1 is needed: correct the file"
            )
        return float(value)

    def above_zero(self, name: str, default: float | None = None) -> float:
        """A number above 0, at most 1e30; without a default the field must be there."""
        _, value = self._find((name,))
        if value is _ABSENT and default is not None:
            return default
        if value is _ABSENT:
            raise CheckpointError(f"{self.where}: {name} is missing; add it, a number above 0")
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0.0 < value <= _LARGEST:
            raise CheckpointError(
                f"{self.where}: {name} is {value!r}; a number above 0, at most 1e30, is needed: correct the file"
            )
        return float(value)

    def part(self, name: str) -> Config | None:
        """An object within the file, or None where the field is absent or null; errors name the way to it."""
        value = self._fields.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self.where}: {name} is {_short(value)}; an object is needed: correct the file")
        return Config(value, f"{self.where}: {name}")

    def given(self, name: str) -> bool:
        """Whether the file has the field, and not as null."""
        return self._fields.get(name) is not None

    def names(self) -> list[str]:
        """The names of all fields."""
        return list(self._fields)

    def texts(self, name: str) -> list[str] | None:
        """A list of strings, or None where the field is absent or null."""
        value = self._fields.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(text, str) for text in value)):
            raise CheckpointError(f"{self.where}: {name} is {_short(value)}; a list of strings is needed")
        return value

    def words(self, name: str) -> list[str]:
        """A list of strings as it is, or the lower-case words of one string with ``|`` between them; [] where absent,
        null or without a word."""
        value = self._fields.get(name)
        parts = [part.strip().lower() for part in value.split("|")] if isinstance(value, str) else value
        if parts is not None and not (isinstance(parts, list) and all(isinstance(part, str) for part in parts)):
            raise CheckpointError(
                f"{self.where}: {name} is {_short(value)}; a list of strings, or one with | between them, is needed"
            )
        return [part for part in parts or () if part]

    def flag(self, name: str, default: bool) -> bool:
        """A boolean; null counts as absent."""
        value = self._fields.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {name} is {value!r}; true or false is needed: correct the file")
        return value

    def text(self, name: str) -> str | None:
        """A string, or None where the field is absent or null."""
        value = self._fields.get(name)
        if value is not None and not isinstance(value, str):
            raise CheckpointError(f"{self.where}: {name} is {value!r}; a string is needed: correct the file")
        return value

    def is_text(self, name: str, value: str) -> bool:
        """Whether a field is this string."""
        return self._fields.get(name) == value

    def all_texts_match(self, name: str, pattern: str) -> bool:
        """Whether a field is an object all of whose values are strings that the pattern matches whole."""
        value = self._fields.get(name)
        return isinstance(value, Mapping) and all(
            isinstance(text, str) and re.fullmatch(pattern, text) for text in value.values()
        )

    def own_class(self) -> str:
        """The config's class of the code that ``auto_map`` names, without its module; "" for none."""
        value = self._fields.get("auto_map")
        name = value.get("AutoConfig") if isinstance(value, Mapping) else None
        return name.rpartition(".")[2] if isinstance(name, str) else ""

    def activation(self, *names: str, default: str) -> str:
        """An activation of the op table, exactly the one that the config names."""
        name, value = self._find(names)
        if value is _ABSENT:
            value = default
        if not isinstance(value, str) or value not in ACTIVATION_NAMES:
            raise UnsupportedModelError(
                f"{self.where}: {name} is {value!r}, an activation that encast does not have; "
                f"it has {sorted(ACTIVATION_NAMES)}"
            )
        return ACTIVATION_NAMES[value]

    def refuse_unless(self, name: str, *accepted: Any) -> None:
        """Raises ``UnsupportedModelError`` unless the field is absent, null or one of ``accepted``."""
        value = self._fields.get(name)
        if value is not None and not any(value == known and type(value) is type(known) for known in accepted):
            raise UnsupportedModelError(
                f"{self.where}: {name} is {value!r}, which changes the arithmetic in a way that encast does not have; "
                f"it takes {' or '.join(map(repr, accepted)) or 'models without this field'}"
            )

    def labels(self) -> list[str]:
        """The names of the labels by index, from ``id2label``, else as many as ``num_labels`` (2) says."""
        value = self._fields.get("id2label")
        if value is None:
            return [f"LABEL_{index}" for index in range(self.count("num_labels", default=2))]
        if not isinstance(value, Mapping) or not all(isinstance(label, str) for label in value.values()):
            raise CheckpointError(f"{self.where}: id2label must map indices to strings; it is {_short(value)}")
        if not value:
            raise CheckpointError(f"{self.where}: id2label is empty; give every label an entry, or leave it out")
        if sorted(map(str, value)) != sorted(str(index) for index in range(len(value))):
            raise CheckpointError(
                f"{self.where}: the keys of id2label must be 0 to {len(value) - 1} without a gap; they are "
                f"{_short(list(value))}"
            )
        by_index = {int(key): label for key, label in value.items()}
        return [by_index[index] for index in range(len(by_index))]

    def problem_type(self, labels: int) -> str:
        """``single_label``, ``multi_label`` or ``regression``; one label without a statement is a regression."""
        value = self.text("problem_type")
        if value is None:
            return "regression" if labels == 1 else "single_label"
        if value not in _PROBLEM_TYPES:
            raise UnsupportedModelError(
                f"{self.where}: problem_type is {value!r}; encast has {sorted(_PROBLEM_TYPES)} or none"
            )
        if labels == 1 and value == "single_label_classification":
            raise CheckpointError(
                f"{self.where}: problem_type is {value!r} with one label, whose softmax is always 1; "
                "give it two labels, or make it a regression"
            )
        return _PROBLEM_TYPES[value]

    def _find(self, names: tuple[str, ...]) -> tuple[str, Any]:
        found = [(name, self._fields[name]) for name in names if name in self._fields]
        for name, value in found[1:]:
            if value != found[0][1]:
                raise CheckpointError(
                    f"{self.where}: {found[0][0]} is {found[0][1]!r} and {name} is {value!r}, "
                    "two spellings of one field: remove one"
                )
        return found[0] if found else (names[0], _ABSENT)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:120] + "..."
