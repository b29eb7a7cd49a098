"""Data sets as tables with named columns: JSONL, CSV, Parquet, and GLUE's tab-separated files."""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator, Mapping
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

from encast.data.datasets.base import Dataset, Labelled, Pair, Question, Sentence, number_of, text_of
from encast.data.datasets.questions import check_starts, question_of
from encast.data.readers import need_columns, open_rows
from encast.data.rows import BadRow, Row
from encast.data.source import open_text
from encast.errors import InputError

__all__ = ["read_table", "text_names"]

_TEXTS = (
    ("sentence1", "sentence2"),
    ("#1 String", "#2 String"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("premise", "hypothesis"),
    ("text", "pair"),
    ("sentence",),
    ("text",),
)
_COLA = ["source", "label", "mark", "sentence"]
_QQP = ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"]
_LABELS = ("label", "Quality", "gold_label", "is_duplicate")
_FORMS = {
    "entities": ("words", "labels"),
    "answers": ("question", "context", "answers"),
    "pairs": ("anchor", "positive"),
    "labelled": ("text", "pair", "label", "score"),
}
_MARKS = (
    ("entities", ("words",)),
    ("answers", ("context",)),
    ("pairs", ("anchor", "positive")),
    ("pairs", ("query", "positive")),
)
"""The columns that tell the form of a row."""
_NEEDED = (
    "a row has text (and pair, or sentence1 and sentence2) with label or score; anchor (or query) and positive; "
    "question, context and answers; or words and labels"
)
_OPTIONS = "name columns that are called otherwise with --text-column, --pair-column, --label-column or --score-column"


def text_names(count: int) -> list[tuple[str, ...]]:
    """What the columns of a table's texts are called, of one a row or of two, the usual names first."""
    own = [("text", "pair")[:count]]
    known = (*_TEXTS, *(names for kind, names in _MARKS if kind == "pairs"))
    return own + [names for names in known if len(names) == count and names not in own]


def read_table(path: Path, format: str, columns: Mapping[str, str]) -> Dataset:
    """Rows of one of the forms in ``_FORMS``, with GLUE's names for the texts and the label too.

    ``format``: "jsonl", "csv", "parquet" or "tsv". ``columns``: names of a form to those of the file, where they
    differ; with any of them all rows have that form, else a row's columns tell. Numbers as labels are scores when one
    of them has a fraction, in the cells of CSV and TSV too. Raises ``InputError`` naming the row that does not fit, or
    the columns of one that lacks some.
    """
    kind, ids = "", set()
    rows: list[Any] = []
    unit = "row" if format == "parquet" else "line"
    with closing(_tsv_rows(path) if format == "tsv" else open_rows(path, [], format)) as source:
        for row in source:
            where = f"{path}: {unit} {row.number}"
            if isinstance(row, BadRow):
                raise InputError(f"{where}: {row.reason}; mend the {unit}")
            try:
                own, made = _row(row.values, columns, len(rows))
            except KeyError as error:
                present = ", ".join(map(repr, row.values))
                raise InputError(f"{where} has no {error}; its columns are {present}: {_NEEDED}; {_OPTIONS}") from None
            except (ValueError, TypeError) as error:
                raise InputError(f"{where} does not fit ({error}); {_NEEDED}") from None
            kind = kind or own
            if own != kind:
                raise InputError(f"{where} holds {own}, the {unit}s before {kind}; keep one kind a file")
            if rows and isinstance(made, Labelled) and type(made.text) is not type(rows[0].text):
                form = ("a single text", "pairs") if isinstance(made.text, str) else ("a pair", "single texts")
                raise InputError(f"{where} holds {form[0]}, the {unit}s before {form[1]}; keep one form a file")
            if isinstance(made, Question):
                if made.id in ids:
                    raise InputError(f"{where} has the id {made.id!r} of a row before; give every question its own")
                ids.add(made.id)
                check_starts(where, made)
            rows.append(made)
    if kind == "labels":
        kind, rows = _labelled(str(path), rows, format in ("csv", "tsv"))
    return Dataset(str(path), kind or "classes", rows)


def _tsv_rows(path: Path) -> Generator[Row]:
    """A header line, then a row a line; a double quote is an ordinary character. CR ends lines where there is no LF.

    CoLA has no header. Of QQP, whose published train set has questions with line ends in them, lines with too few
    fields are passed over with a ``UserWarning`` that numbers them.
    """
    text = open_text(path)
    lines = text.split("\n" if "\n" in text else "\r")
    header, first = lines[0].rstrip("\r").split("\t"), 1
    if len(header) == len(_COLA) and header[1] in ("0", "1") and header[2] in ("", "*"):
        header, first = _COLA, 0
    need_columns(str(path), [], header)
    broken: list[str] = []
    for number, line in enumerate(lines[first:], first + 1):
        fields = line.rstrip("\r").split("\t")
        if not line.strip():
            continue
        if header == _QQP and len(fields) < len(header):
            broken.append(str(number))
            continue
        if len(fields) != len(header):
            raise InputError(
                f"{path}: line {number} has {len(fields)} fields, the first line has {len(header)}; mend the line"
            )
        yield Row(number, dict(zip(header, fields, strict=True)), line)
    if broken:
        warnings.warn(
            f"{path}: passed over {len(broken)} lines with fewer fields than the header: {', '.join(broken)}",
            UserWarning,
            stacklevel=2,
        )


def _row(
    item: Mapping[str, Any], columns: Mapping[str, str], index: int
) -> tuple[str, Labelled | Pair | Question | Sentence]:
    """The row's kind, before labels are told from scores, and the row; raises ``KeyError`` for what is missing."""
    own = {name: columns.get(name, name) for names in _FORMS.values() for name in names}
    if columns:
        form = next((form for form, names in _FORMS.items() if columns.keys() <= set(names)), "")
        if not form:
            raise ValueError(f"no form of rows has the columns {', '.join(map(repr, columns))}")
    else:
        form = next((form for form, names in _MARKS if all(name in item for name in names)), "labelled")
    if form == "entities":
        words, labels = _texts(item[own["words"]]), _texts(item[own["labels"]])
        if len(words) != len(labels):
            raise ValueError(f"{len(words)} words and {len(labels)} labels")
        return "entities", Sentence(words, labels)
    if form == "pairs":
        anchor = "query" if own["anchor"] not in item and "query" in item else own["anchor"]
        return "pairs", Pair(text_of(item[anchor]), text_of(item[own["positive"]]))
    if form == "answers":
        return "answers", question_of(
            item.get("id", index),
            item[own["question"]],
            item[own["context"]],
            item[own["answers"]],
            item.get("is_impossible"),
        )
    if "text" in columns or "pair" in columns:
        second = [columns["pair"]] if "pair" in columns else ["pair"] if "pair" in item else []
        names: tuple[str, ...] = (columns.get("text", "text"), *second)
    else:
        names = next((names for names in _TEXTS if all(name in item for name in names)), ("text",))
    texts = [text_of(item[name]) for name in names]
    both = texts[0] if len(texts) == 1 else (texts[0], texts[1])
    label = columns.get("label") or next((name for name in _LABELS if name in item), None)
    if not columns.keys() & {"label", "score"} and label is not None and "score" in item:
        raise ValueError(
            f"it has the columns {label!r} and 'score', of which one counts: say which with --label-column {label} or "
            "--score-column score"
        )
    if "score" in columns or ("label" not in columns and "score" in item):
        return "scores", Labelled(both, _score(item[columns.get("score", "score")]))
    if label is None:
        raise KeyError("label or score")
    return "labels", Labelled(both, _label(item[label]))


def _score(value: Any) -> float:
    """Not NaN or infinite, with which no loss and no correlation can be computed."""
    try:
        score = number_of(value) if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        score = None
    if score is None or isinstance(value, bool) or not math.isfinite(score):
        raise ValueError(f"the score is {value!r}; a number is needed, and a finite one")
    return score


def _label(value: Any) -> Any:
    """As it is in the file, but Parquet's decimals as whole numbers and floats: whether these are scores only all rows
    tell."""
    if value is None or (isinstance(value, str) and not value.strip()):
        missing = "null" if value is None else "empty"
        raise ValueError(f"the label is missing ({missing}); leave out rows without one")
    if isinstance(value, str):
        return text_of(value)
    if isinstance(value, (list, dict, bytes)):
        raise TypeError(f"the label is {value!r}; a text or a finite number is needed, one a row")
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, (int, float)):
        try:
            finite = math.isfinite(value)
        except OverflowError:
            finite = False
        if not finite:
            raise ValueError(f"the label is {value!r}; a text or a finite number is needed")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError(
            f"{value!r} is no list: words and labels are lists, for which CSV and TSV have no cells; "
            "give .conll, JSONL or Parquet"
        )
    return tuple(map(text_of, value))


def _labelled(name: str, rows: list[Labelled], cells: bool) -> tuple[str, list[Labelled]]:
    """Scores when a label is a number with a fraction, else classes, as text. ``cells``: of files that hold nothing but
    texts, what is written as a number is one, and white space around it is none of it."""
    golds: list[Any] = [str(row.gold).strip() if cells else row.gold for row in rows]
    numbers = [_number(gold, cells) for gold in golds]
    fraction = next((i for i, one in enumerate(numbers) if isinstance(one, float) and not one.is_integer()), None)
    if fraction is None:
        return "classes", [Labelled(row.text, _class(gold)) for row, gold in zip(rows, golds, strict=True)]
    if None in numbers:
        advice = "; if these are names of classes, give them as texts in JSONL" if cells else ""
        raise InputError(
            f"{name}: some labels are numbers with fractions ({golds[fraction]}), one is "
            f"{golds[numbers.index(None)]!r}; keep one kind a file{advice}"
        )
    return "scores", [Labelled(row.text, float(one)) for row, one in zip(rows, numbers, strict=True) if one is not None]


def _number(gold: Any, cells: bool) -> float | None:
    """The label if it is a number, else None."""
    if cells:
        return number_of(gold)
    return gold if isinstance(gold, (int, float)) and not isinstance(gold, bool) else None


def _class(gold: Any) -> str:
    return str(int(gold)) if isinstance(gold, float) else str(gold)
