"""Arrays of answers as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson

from encast.tasks.session import F32, need_finite

__all__ = ["json_list", "json_rows", "json_vector"]


def json_vector(numbers: np.ndarray[Any, Any]) -> bytes:
    """``f32[n]``, finite, or ``i32[n]`` as a JSON array: each number in the fewest digits that give it back."""
    return orjson.dumps(numbers, option=orjson.OPT_SERIALIZE_NUMPY)


def json_rows(rows: F32) -> Iterator[bytes]:
    """Every row of ``f32[n, m]`` as a JSON array, see ``json_vector``.

    Raises ``InputError`` for a number that is not finite, which JSON lacks. One row at a time, so that another thread
    can have the interpreter between two.
    """
    need_finite(rows)
    for row in np.ascontiguousarray(rows):
        yield json_vector(row)


def json_list(rows: F32) -> bytes:
    """``f32[n, m]`` as a JSON array of arrays; see ``json_rows``."""
    return b"[" + b",".join(json_rows(rows)) + b"]"
