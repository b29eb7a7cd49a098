"""Rows that a small model learns in seconds."""

from __future__ import annotations

import random
from typing import Any

__all__ = ["WORDS", "classes", "sentences"]

WORDS = ["the", "of", "and", "to", "in", "is", "was", "for", "on", "that", "with", "as", "it", "by", "he", "at", "from"]


def sentences(count: int, seed: int, least: int = 3, most: int = 10) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(least, most))) for _ in range(count)]


def classes(count: int, seed: int) -> list[dict[str, Any]]:
    """The first word decides."""
    return [{"text": text, "label": _class(text)} for text in sentences(count, seed)]


def _class(text: str) -> str:
    return "early" if WORDS.index(text.split()[0]) < 8 else "late"
