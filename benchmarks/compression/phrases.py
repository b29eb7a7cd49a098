"""Longer texts for a data set of short ones, without labels: random training texts joined to the length of sentences.

Students learn from a teacher's answers to them. SST-2 trains on phrases of 9 words and is judged on sentences of 20.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from encast.data.datasets import open_dataset

WORDS = 5, 20
JOINTS = ", ", "; ", "-- ", "and ", ", and ", ", but "


def joined(texts: list[str], count: int, seed: int) -> Iterator[str]:
    """Each has at least a number of words drawn from ``WORDS``."""
    generator = random.Random(seed)
    for _ in range(count):
        text, wanted = generator.choice(texts), generator.randint(*WORDS)
        while len(text.split()) < wanted:
            text = f"{text.rstrip()} {generator.choice(JOINTS)}{generator.choice(texts)}"
        yield text.strip()


def write_phrases(data: Path, out: Path, count: int) -> int:
    """Writes JSONL; returns how many texts."""
    texts = sorted({row.text for row in open_dataset(data, split="train").rows})
    lines = [json.dumps({"text": text}) for text in joined(texts, count, 0)]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)
