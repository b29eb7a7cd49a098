"""Numbers of a configuration, checked: a YAML or a command line may have put anything there."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from encast.errors import InputError

__all__ = ["positive", "positives", "seed_number", "whole_number", "whole_numbers"]


def whole_numbers(name: str, value: Any) -> tuple[int, ...]:
    """One whole number above 0 or a list of them, each once; raises ``InputError`` naming the field."""
    found = _listed(value)
    if not found or any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in found):
        raise InputError(f"{name} is {value!r}; give a whole number above 0, or a list of them")
    return tuple(dict.fromkeys(found))


def whole_number(name: str, value: Any) -> int:
    """One whole number above 0; raises ``InputError`` naming the field."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} is {value!r}; give a whole number above 0")
    return value


def seed_number(name: str, value: Any) -> int:
    """A seed: a whole number from 0, 0 when there is none; raises ``InputError`` naming the field."""
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"{name} is {value!r}; a seed is a whole number from 0")
    return value


def positive(name: str, value: Any, most: float = math.inf) -> float:
    """One number above 0 and up to ``most``; raises ``InputError`` naming the field."""
    numbers = positives(name, value, most)
    if len(numbers) > 1:
        raise InputError(f"{name} is {value!r}; give one number")
    return numbers[0]


def positives(name: str, value: Any, most: float = math.inf) -> tuple[float, ...]:
    """One number above 0 and up to ``most`` or a list of them, each once; raises ``InputError`` naming the field."""
    found = _listed(value)
    good = all(isinstance(one, (int, float)) and not isinstance(one, bool) and 0 < one <= most for one in found)
    if not found or not good or any(math.isinf(one) for one in found):
        limit = "" if math.isinf(most) else f" and up to {most:g}"
        raise InputError(f"{name} is {value!r}; give a number above 0{limit}, or a list of them")
    return tuple(dict.fromkeys(float(one) for one in found))


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes, dict)) else [value]
