"""Evaluation sets: tables with named columns (GLUE, JSONL, CSV, Parquet), SQuAD and CoNLL."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from encast.data.datasets.base import Dataset, Labelled, Question, Sentence
from encast.data.datasets.conll import read_conll
from encast.data.datasets.squad import read_squad
from encast.data.datasets.table import read_table
from encast.data.source import open_text
from encast.errors import InputError

__all__ = ["DATASETS", "Dataset", "Labelled", "Question", "Sentence", "open_dataset"]

_TABLES = {".tsv": "tsv", ".csv": "csv", ".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_DOCUMENTS: dict[str, Callable[[str, str], Dataset]] = {
    ".json": read_squad,
    ".conll": read_conll,
    ".bio": read_conll,
}
DATASETS = (
    "tables with named columns (.tsv as GLUE has it, .csv, .jsonl, .ndjson, .parquet), SQuAD (.json), words and labels "
    "(.conll, .bio); all but Parquet also with .gz"
)
"""What is read, for messages and help."""


def open_dataset(path: str | os.PathLike[str], columns: Mapping[str, str] | None = None) -> Dataset:
    """Reads an evaluation set, gzipped or not; its format follows from the file's suffix (``DATASETS``).

    ``columns``: for tables, see ``read_table``. For a folder, its ``dev.tsv`` or ``dev.tsv.gz``. Raises
    ``InputError``, and ``ResourceError`` for Parquet without pyarrow.
    """
    path = Path(path)
    if path.is_dir():
        inside = [path / name for name in ("dev.tsv", "dev.tsv.gz") if (path / name).is_file()]
        if not inside:
            raise InputError(f"{path}: a folder without dev.tsv; name the file: {DATASETS}")
        path = inside[0]
    if not path.exists():
        raise InputError(f"{path}: no such file or folder; an evaluation set is one of {DATASETS}")
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    suffix = plain.suffix.lower()
    if suffix in _TABLES:
        data = read_table(path, _TABLES[suffix], columns or {})
    elif suffix not in _DOCUMENTS:
        raise InputError(f"{path}: no evaluation set has the suffix {plain.suffix!r}; known are {DATASETS}")
    elif columns:
        raise InputError(f"{path}: {suffix} has no columns to name; only tables have")
    else:
        data = _DOCUMENTS[suffix](str(path), open_text(path))
    if not data.rows:
        raise InputError(f"{path}: holds no rows")
    return data
