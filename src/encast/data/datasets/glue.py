"""GLUE's tables: tab-separated with a header line, and a double quote is an ordinary character."""

from __future__ import annotations

from encast.data.datasets.base import Dataset, Labelled
from encast.errors import InputError

__all__ = ["read_glue"]

_TEXTS = (
    ("sentence1", "sentence2"),
    ("#1 String", "#2 String"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("premise", "hypothesis"),
    ("sentence",),
    ("text",),
)
_GOLD = (
    ("score", "scores"),
    ("label", "classes"),
    ("Quality", "classes"),
    ("gold_label", "classes"),
    ("is_duplicate", "classes"),
)


def read_glue(name: str, text: str) -> Dataset:
    """A table with known column names: SST-2, MRPC, STS-B, QQP, QNLI, RTE, MNLI, or own ones alike.

    A ``score`` column makes a set of scores, ``label`` and its kin one of classes. Raises ``InputError``
    naming the line of a row that does not fit.
    """
    lines = text.split("\n")
    header = lines[0].rstrip("\r").split("\t")
    columns = next((columns for columns in _TEXTS if all(column in header for column in columns)), None)
    gold = next(((column, kind) for column, kind in _GOLD if column in header), None)
    if columns is None or gold is None:
        raise InputError(
            f"{name}: the header line has the columns {header}; needed are texts (sentence; sentence1 and "
            "sentence2; ...) and a label or score"
        )
    at_texts, at_gold = [header.index(column) for column in columns], header.index(gold[0])
    rows: list[Labelled] = []
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        fields = line.rstrip("\r").split("\t")
        if len(fields) != len(header):
            raise InputError(
                f"{name}: line {number} has {len(fields)} fields, the header has {len(header)}; mend the line"
            )
        texts = [fields[at] for at in at_texts]
        value: str | float = fields[at_gold]
        if gold[1] == "scores":
            try:
                value = float(value)
            except ValueError:
                raise InputError(f"{name}: line {number} has the score {value!r}; a number is needed") from None
        rows.append(Labelled(texts[0] if len(texts) == 1 else (texts[0], texts[1]), value))
    return Dataset(name, gold[1], rows)
