"""Data sets: tables with named columns (GLUE, JSONL, CSV, Parquet), SQuAD and CoNLL."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from encast.data.datasets.base import Dataset, Labelled, Pair, Question, Sentence, number_of
from encast.data.datasets.conll import read_conll
from encast.data.datasets.squad import read_squad
from encast.data.datasets.table import read_table
from encast.data.source import open_text
from encast.errors import InputError

__all__ = [
    "DATASETS",
    "Dataset",
    "Labelled",
    "Pair",
    "Question",
    "Sentence",
    "file_of",
    "number_of",
    "open_dataset",
]

_TABLES = {".tsv": "tsv", ".csv": "csv", ".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_DOCUMENTS: dict[str, Callable[[str, str], Dataset]] = {
    ".json": read_squad,
    ".conll": read_conll,
    ".bio": read_conll,
}
_SUFFIXES = {*_TABLES, *_DOCUMENTS}
_SPLITS = {"train": ("train",), "dev": ("dev", "validation")}
_PASSED_OVER = re.compile("predictions|mismatched")
DATASETS = (
    "tables with named columns (.tsv as GLUE has it, .csv, .jsonl, .ndjson, .parquet), SQuAD (.json), words and labels "
    "(.conll, .bio); all but Parquet also with .gz"
)
"""What is read, for messages and help."""


def open_dataset(path: str | os.PathLike[str], columns: Mapping[str, str] | None = None, split: str = "dev") -> Dataset:
    """Reads a labelled data set, gzipped or not; its format follows from the file's suffix (``DATASETS``).

    ``columns``: for tables, see ``read_table``. ``split``: for a folder, whose file of that split is read, see
    ``file_of``; for a file it means nothing. Raises ``InputError``, and ``ResourceError`` for Parquet without pyarrow.
    """
    path = Path(path)
    if path.is_dir():
        path = file_of(path, split)
    if not path.exists():
        raise InputError(f"{path}: no such file or folder; a data set is one of {DATASETS}")
    suffix = _plain(path).suffix.lower()
    if suffix in _TABLES:
        data = read_table(path, _TABLES[suffix], columns or {})
    elif suffix not in _DOCUMENTS:
        raise InputError(f"{path}: no data set has the suffix {_plain(path).suffix!r}; known are {DATASETS}")
    elif columns:
        raise InputError(f"{path}: {suffix} has no columns to name; only tables have")
    else:
        data = _DOCUMENTS[suffix](str(path), open_text(path))
    if not data.rows:
        raise InputError(f"{path}: holds no rows")
    return data


def file_of(folder: Path, split: str) -> Path:
    """The file of a split, "train" or "dev", in a folder.

    It is the file called so (``train.tsv``, ``dev.jsonl.gz``) or else the one whose name has the split's name as a
    word, ``validation`` being another word for ``dev`` (``train-v1.1.json``, ``wnut17train.conll``,
    ``dev_matched.tsv``). Names with ``predictions`` or ``mismatched`` (MNLI's second dev set) are passed over. Raises
    ``InputError`` unless exactly one file fits.
    """
    words = _SPLITS.get(split)
    if words is None:
        raise InputError(f"split is {split!r}; {' and '.join(map(repr, _SPLITS))} are known")
    files = sorted(path for path in folder.iterdir() if path.is_file() and _plain(path).suffix.lower() in _SUFFIXES)
    named = [path for path in files if _plain(path).stem.lower() in words]
    word = re.compile(rf"(?<![a-z])({'|'.join(words)})(?![a-z])")
    fitting = named or [
        path for path in files if word.search(path.name.lower()) and not _PASSED_OVER.search(path.name.lower())
    ]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise InputError(
            f"{folder}: the split {split!r} may be {' or '.join(path.name for path in fitting)}; name the file"
        )
    held = ", ".join(path.name for path in files) or "none"
    raise InputError(
        f"{folder}: no file of the split {split!r}, whose name would have {' or '.join(words)} as a word; data sets in "
        f"this folder: {held}; name the file: {DATASETS}"
    )


def _plain(path: Path) -> Path:
    """The path without ``.gz``."""
    return path.with_suffix("") if path.suffix.lower() == ".gz" else path
