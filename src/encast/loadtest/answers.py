"""The words that protocols share: what is asked, what is answered, and answers that can be compared."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Answers", "BadAnswerError", "Ranking", "Row", "Target", "Vector", "vector_of"]


@dataclass(frozen=True)
class Ranking:
    """Documents to be put in order for a query."""

    query: str
    documents: tuple[str, ...]


@dataclass(frozen=True)
class Target:
    """What is asked: the name of a model, and of its input of texts where a protocol names inputs. ``fields``: of every
    body besides, in protocols of JSON."""

    model: str = ""
    input: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


Row = str | tuple[str, str] | Ranking

Vector = tuple[tuple[str, ...], bytes]
"""An answer that can be compared: labels of its numbers, if they have any, and the numbers as little-endian f32."""


class BadAnswerError(Exception):
    """A body that answers with success and holds no answers."""


@dataclass(frozen=True)
class Answers:
    """``found``: one for each text (of a ranking: one), as the body holds it; ``tokens``: None if it does not say."""

    found: Sequence[Any]
    tokens: int | None = None


def vector_of(answer: str, found: Any) -> Vector:
    """Of an answer as a body or a row of ``encast run`` holds it; raises ``BadAnswerError`` for what is none.

    ``embedding``: a list of numbers, little-endian f32, or base64 of them. ``scores``: by label. ``ranking``: scores by
    the place of their document.
    """
    try:
        if answer == "scores":
            ordered = sorted((str(one["label"]), float(one["score"])) for one in found)
            return tuple(label for label, _ in ordered), _f32([score for _, score in ordered])
        if answer == "ranking":
            return (), _f32([score for _, score in sorted(map(_place, found))])
        if isinstance(found, bytes):
            numbers = found
        else:
            numbers = base64.b64decode(found, validate=True) if isinstance(found, str) else _f32(found)
        if len(numbers) % 4:
            raise ValueError(f"{len(numbers)} bytes are no numbers of 4 bytes each")
        return (), numbers
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise BadAnswerError(f"no {answer} ({error})") from None


def _f32(numbers: Any) -> bytes:
    return np.asarray(numbers, "<f4").tobytes()


def _place(one: Mapping[str, Any]) -> tuple[int, float]:
    score = one.get("score", one.get("relevance_score"))
    return int(one["index"]), math.nan if score is None else float(score)
