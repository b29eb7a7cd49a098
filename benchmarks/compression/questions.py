"""Questions with their contexts, without answers: a random part of a training set, for a student to learn from a
teacher's answers. ``encast compress --train-rows`` leaves the others of a large set unread."""

from __future__ import annotations

import json
import random
from pathlib import Path

from encast.data.datasets import open_dataset


def write_questions(data: Path, out: Path, count: int) -> int:
    """Writes JSONL; returns how many questions."""
    rows = list(open_dataset(data, split="train").rows)
    random.Random(0).shuffle(rows)
    lines = [json.dumps({"question": row.question, "context": row.context}) for row in rows[:count]]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)
