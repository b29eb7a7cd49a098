"""The public texts that real models are calibrated and timed on."""

from __future__ import annotations

import argparse
import gzip
import json
import random
from pathlib import Path

__all__ = ["add_option", "calibration_texts", "queries", "squad_paragraphs"]

DEFAULT = Path(__file__).resolve().parents[3] / "shared" / "data"
"""Where the tests look for the data, too."""


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        type=Path,
        default=DEFAULT,
        help="folder with squad-v1.1/ (SQuAD 1.1's JSON, gzip) and queries/ (NQ-open's dev questions, a JSON a line)",
    )


def squad_paragraphs(data: Path, split: str) -> list[str]:
    """SQuAD's distinct paragraphs, in the file's order."""
    found = json.loads(_read(data / "squad-v1.1", f"{split}-v1.1*.json.gz"))
    return list(dict.fromkeys(paragraph["context"] for title in found["data"] for paragraph in title["paragraphs"]))


def queries(data: Path) -> list[str]:
    """The questions of NQ-open's dev set."""
    return [json.loads(line)["question"] for line in _read(data / "queries", "NQ-open.dev.jsonl.gz").splitlines()]


def calibration_texts(data: Path, count: int = 300) -> list[str]:
    """Half paragraphs, half questions of SQuAD's train set: the lengths that are timed, none of the texts."""
    found = json.loads(_read(data / "squad-v1.1", "train-v1.1*.json.gz"))
    rng = random.Random(0)
    chosen = rng.sample([paragraph for title in found["data"] for paragraph in title["paragraphs"]], count)
    return [
        row["context"] if index % 2 == 0 else rng.choice(row["qas"])["question"] for index, row in enumerate(chosen)
    ]


def _read(folder: Path, pattern: str) -> str:
    files = sorted(folder.glob(pattern))
    if not files:
        raise SystemExit(f"{folder / pattern} is missing; say with --data where the data lies")
    return gzip.decompress(files[0].read_bytes()).decode()
