"""``--calibrate``: the texts of a file, of which some tell the ranges of static int8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from encast.calibrate import calibrate
from encast.cli.progress import Progress
from encast.data.datasets import Labelled, Question, Sentence, open_dataset
from encast.data.datasets.base import Pair
from encast.errors import InputError
from encast.measure.texts import read_whole
from encast.quant import Calibration, QuantSpec
from encast.tasks.texts import Text, check_text

__all__ = ["CALIBRATION_TEXTS", "calibrated"]

CALIBRATION_TEXTS = 256
"""Of a longer file so many are taken, evenly spread."""

_DATASETS = (".tsv", ".json", ".conll", ".bio")


def calibrated(
    source: str, path: Path | None, task: str | None, spec: QuantSpec, *, adapter: str | None = None, quiet: bool
) -> tuple[QuantSpec, Calibration | None]:
    """The spec, which becomes static unless it says what else the texts are for, and the calibration on ``path``.

    Raises ``InputError`` where one is given without the other.
    """
    if path is None:
        if spec.needs_calibration:
            raise InputError(
                "static activations and move_outliers need texts: add --calibrate FILE, with some hundred of the kind "
                "that the model will read"
            )
        return spec, None
    if not spec.needs_calibration:
        spec = replace(spec, activations="static")
    texts = _texts(path)
    chosen = [texts[index * len(texts) // CALIBRATION_TEXTS] for index in range(CALIBRATION_TEXTS)]
    if len(texts) <= CALIBRATION_TEXTS:
        chosen = texts
    with Progress("tokens seen", quiet=quiet) as progress:
        seen = calibrate(
            source,
            chosen,
            task=task,
            quant=spec,
            adapter=adapter,
            progress=lambda done, total: progress.update(done, done / total),
        )
    return spec, seen


def _texts(path: Path) -> list[Text]:
    """Lines of text, rows with ``text`` (and ``pair``), or rows of a data set; of a folder those of its train file."""
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    if path.is_dir() or plain.suffix.lower() in _DATASETS:
        return [_text_of(row) for row in open_dataset(path, split="train").rows]
    lines = plain.suffix.lower() not in (".jsonl", ".ndjson", ".csv", ".parquet")
    try:
        texts = read_whole(str(path), ["text"] if lines else [], _made)
    except InputError:
        if lines:
            raise
        try:
            rows = open_dataset(path).rows
        except InputError:
            rows = []
        if not rows:
            raise
        return [_text_of(row) for row in rows]
    if not texts:
        raise InputError(f"{path}: holds no texts; calibration needs some hundred")
    return texts


def _made(values: Mapping[str, object], where: str) -> Text:
    if "text" not in values:
        raise InputError(f"{where} has no column 'text'; its columns are {', '.join(values)}")
    text = check_text(values["text"], f"{where}: text")
    return (text, check_text(values["pair"], f"{where}: pair")) if values.get("pair") is not None else text


def _text_of(row: object) -> Text:
    if isinstance(row, Question):
        return row.question, row.context
    if isinstance(row, Pair):
        return row.anchor, row.positive
    if isinstance(row, Sentence):
        return " ".join(row.words)
    assert isinstance(row, Labelled)
    return row.text
