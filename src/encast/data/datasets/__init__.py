"""Evaluation sets: GLUE tables, SQuAD, CoNLL and JSONL."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from encast.data.datasets.base import Dataset, Labelled, Question, Sentence
from encast.data.datasets.conll import read_conll
from encast.data.datasets.glue import read_glue
from encast.data.datasets.jsonl import read_jsonl
from encast.data.datasets.squad import read_squad
from encast.data.source import open_text
from encast.errors import InputError

__all__ = ["Dataset", "Labelled", "Question", "Sentence", "open_dataset"]

_READERS: dict[str, Callable[[str, str], Dataset]] = {
    ".tsv": read_glue,
    ".json": read_squad,
    ".conll": read_conll,
    ".bio": read_conll,
    ".jsonl": read_jsonl,
}
_SUFFIXES = ", ".join(_READERS) + ", each also with .gz"


def open_dataset(path: str | os.PathLike[str]) -> Dataset:
    """Reads an evaluation set, gzipped or not; its kind follows from the file's suffix.

    ``.tsv``: GLUE table; ``.json``: SQuAD; ``.conll``, ``.bio``: words and labels; ``.jsonl``: see
    ``read_jsonl``. For a folder, its ``dev.tsv`` or ``dev.tsv.gz``. Raises ``InputError``.
    """
    path = Path(path)
    if path.is_dir():
        inside = [path / name for name in ("dev.tsv", "dev.tsv.gz") if (path / name).is_file()]
        if not inside:
            raise InputError(f"{path}: a folder without dev.tsv; name the file ({_SUFFIXES})")
        path = inside[0]
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    read = _READERS.get(plain.suffix.lower())
    if read is None:
        raise InputError(f"{path}: no evaluation set has the suffix {plain.suffix!r}; known are {_SUFFIXES}")
    data = read(str(path), open_text(path))
    if not data.rows:
        raise InputError(f"{path}: holds no rows")
    return data
