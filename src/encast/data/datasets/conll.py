"""CoNLL's columns: a word and its label a line, an empty line between sentences."""

from __future__ import annotations

from encast.data.datasets.base import Dataset, Sentence
from encast.errors import InputError

__all__ = ["read_conll"]


def read_conll(name: str, text: str) -> Dataset:
    """The first column is the word, the last its BIO label; tabs separate them, or else white space.

    Lines end with LF, CRLF or CR. ``-DOCSTART-`` lines are passed over. Raises ``InputError`` naming the line that has
    no word or no label.
    """
    rows: list[Sentence] = []
    words: list[str] = []
    labels: list[str] = []
    for number, line in enumerate([*_lines(text), ""], 1):
        fields = [field.strip() for field in line.split("\t")] if "\t" in line else line.split()
        if not any(fields) or fields[0] == "-DOCSTART-":
            if words:
                rows.append(Sentence(tuple(words), tuple(labels)))
            words, labels = [], []
            continue
        if len(fields) < 2 or not (fields[0] and fields[-1]):
            raise InputError(f"{name}: line {number} is {line!r}; a word, a tab and its label are needed")
        words.append(fields[0])
        labels.append(fields[-1])
    return Dataset(name, "entities", rows)


def _lines(text: str) -> list[str]:
    """With CRCRLF too, which some tools make of CRLF."""
    return [line for part in text.split("\n") for line in part.rstrip("\r").split("\r")]
