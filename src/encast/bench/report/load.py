"""Folders of experiments to rows; what cannot be read is reported with its file and line, and never stops the rest."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from encast.bench.rows import SCHEMA, STATUSES
from encast.errors import InputError
from encast.pages import numbers

__all__ = ["Broken", "Loaded", "Row", "Slo", "load"]

_LONGEST_LINE = 1 << 24
"""Bytes; a line of that size holds no row, and reading it would only fill the memory."""

_DEEPEST = 32
"""Rows have six levels; what follows may walk them by recursion."""

_LARGEST = 1e60
"""No measured quantity is beyond it or below its inverse; axes and products of such numbers would overflow."""

_LONGEST_SETTINGS = 1 << 13


@dataclass(frozen=True, order=True)
class Slo:
    """A latency objective: ``percentile`` (``p99``, ``p99_9``) of the latency within ``limit_ms``."""

    percentile: str
    limit_ms: float

    @property
    def name(self) -> str:
        return self.percentile.replace("_", ".")

    def __str__(self) -> str:
        return f"{self.name} within {numbers.plain(self.limit_ms)} ms"


@dataclass(frozen=True)
class Row:
    """One system at one point. What a report cannot do without has a field; the rest is asked for by its path."""

    data: Mapping[str, Any] = field(repr=False)
    experiment: str
    status: str
    reason: str
    name: str
    """The backend's own, by which ``ratio_to`` of the others speaks of it."""
    dtype: str
    model: str
    workload: str
    scenario: str
    launcher: str
    point: Mapping[str, int | float | str]

    @property
    def backend(self) -> str:
        """The backend with its dtype: what a reader tells systems apart by."""
        return self.name if not self.dtype or self.dtype in self.name else f"{self.name}-{self.dtype}"

    @property
    def family(self) -> str:
        """The backend without its dtype: the same line colour in every plot."""
        parts = [part for part in self.backend.split("-") if part != self.dtype]
        return "-".join(parts) or self.backend

    @property
    def identity(self) -> tuple[object, ...]:
        """What makes rows of two experiments the same measurement."""
        point = tuple(sorted(self.point.items()))
        return (self.name, self.dtype, self.model, self.workload, self.scenario, self.launcher, point)

    @property
    def compared_by(self) -> str:
        """The quantity that ``ratio_to`` and the figures by round are of, as a short text; "" where nobody says."""
        return self.text("compared_by")[:60]

    @property
    def measured(self) -> bool:
        return self.status == "ok"

    @property
    def noisy(self) -> bool:
        return self.at("noise", "noisy") is True

    @property
    def flag(self) -> str:
        """What stands behind the number of a noisy row."""
        return " ~" if self.noisy else ""

    @property
    def slo(self) -> Slo | None:
        """None for a row that nothing was asked of."""
        percentile, limit = self.text("metrics", "slo", "percentile"), self.number("metrics", "slo", "limit_ms")
        return None if not percentile or limit is None or limit <= 0 else Slo(percentile, limit)

    @property
    def slo_met(self) -> bool | None:
        """None where too few calls were made to know, or nothing was asked."""
        met = self.at("metrics", "slo", "met")
        return met if isinstance(met, bool) else None

    @property
    def slo_latency(self) -> float | None:
        """The limited percentile in milliseconds; None with too few calls to know it."""
        value = self.number("metrics", "slo", "latency_ms")
        return value if value is not None and value > 0 else None

    def at(self, *path: str) -> Any:
        """What stands there, None for nothing."""
        value: Any = self.data
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def number(self, *path: str) -> float | None:
        """The finite number there, None for anything else."""
        return _finite(self.at(*path))

    def interval(self, *path: str) -> tuple[float, float] | None:
        """Two finite numbers there, the lower one first; None for anything else."""
        pair = self.at(*path)
        found = [one for one in map(_finite, pair) if one is not None] if isinstance(pair, list) else []
        return (min(found), max(found)) if len(found) == 2 == len(pair) else None

    def text(self, *path: str) -> str:
        """What stands there as text, "" for nothing, lists joined by semicolons."""
        value = self.at(*path)
        return "; ".join(map(_word, value)) if isinstance(value, list) else _word(value)

    def rounds(self) -> tuple[str, tuple[float, ...]] | None:
        """The name and the figures by round under ``samples`` that two experiments are compared by."""
        samples = self.at("samples")
        for name, values in samples.items() if isinstance(samples, Mapping) else ():
            figures = [_finite(one) for one in values] if isinstance(values, list) else []
            known = tuple(one for one in figures if one is not None and one > 0)
            if known and len(known) == len(figures):
                return str(name), known
        return None


@dataclass(frozen=True)
class Broken:
    """A line that is no row, or a file that cannot be read (line 0)."""

    file: str
    line: int
    reason: str


@dataclass(frozen=True)
class Loaded:
    """``settings``: by file name, the resolved configuration of every experiment as it stands beside its rows."""

    rows: tuple[Row, ...]
    broken: tuple[Broken, ...]
    settings: Mapping[str, str]
    replaced: int = 0
    """Rows that a later one with the same key in the same file takes the place of."""


def load(folders: Sequence[Path]) -> Loaded:
    """The rows of every ``rows.jsonl`` in the folders and below them, in the order of the folders, files and lines.

    Raises ``InputError`` for a folder without any; everything else that is wrong is in ``broken``.
    """
    files = [file for folder in folders for file in _files(folder)]
    files = list(dict.fromkeys(file.resolve() for file in files))
    names = _short_names(files)
    rows: list[Row] = []
    broken: list[Broken] = []
    settings: dict[str, str] = {}
    replaced = 0
    for file, name in zip(files, names, strict=True):
        found: dict[object, Row] = {}
        for number, line in _lines(file, name, broken):
            try:
                row = _row(line)
            except ValueError as error:
                broken.append(Broken(name, number, str(error)))
                continue
            key = row.at("key") if isinstance(row.at("key"), str) else number
            replaced += key in found
            found.pop(key, None)
            found[key] = row
        rows += found.values()
        text = _settings(file.with_name("config.yaml"))
        if text:
            settings[str(Path(name).with_name("config.yaml"))] = text
    return Loaded(tuple(_tell_models_apart(rows)), tuple(broken), settings, replaced)


def _tell_models_apart(rows: Sequence[Row]) -> Iterator[Row]:
    """Two models of one name get the beginning of their files' hash behind it, lest they be compared."""
    hashes: dict[str, set[str]] = {}
    for row in rows:
        hashes.setdefault(row.model, set()).add(row.text("model", "sha"))
    for row in rows:
        sha = row.text("model", "sha")[:8]
        yield replace(row, model=f"{row.model} ({sha})") if sha and len(hashes[row.model]) > 1 else row


def _files(folder: Path) -> list[Path]:
    if folder.is_file():
        if folder.name != "rows.jsonl":
            raise InputError(f"{folder}: is a file, and no rows.jsonl; name the folder that `encast bench` has written")
        return [folder]
    found = [folder / "rows.jsonl"] if (folder / "rows.jsonl").is_file() else sorted(folder.rglob("rows.jsonl"))
    if not found:
        what = "holds no rows.jsonl, nor does a folder below it" if folder.is_dir() else "is no folder"
        raise InputError(
            f"{folder}: {what}; name a folder that `encast bench` has written, such as bench-results/NAME of "
            "experiment=NAME"
        )
    return found


def _short_names(files: Sequence[Path]) -> list[str]:
    """Paths from the folder that all have in common on: a page says nothing of whose machine it was made on."""
    folders = [str(file.parent) for file in files]
    shared = Path(os.path.commonpath(folders)) if folders else Path()
    # With the name of that folder, lest a single one be called nothing.
    return [str(Path(shared.name) / file.relative_to(shared)) for file in files]


def _lines(file: Path, name: str, broken: list[Broken]) -> Iterator[tuple[int, str]]:
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(iter(lambda: stream.readline(_LONGEST_LINE), b""), 1):
                if len(line) >= _LONGEST_LINE:
                    broken.append(Broken(name, number, f"longer than {_LONGEST_LINE} bytes; the rest is not read"))
                    return
                if not line.strip():
                    continue
                try:
                    yield number, line.decode("utf-8")
                except UnicodeDecodeError as error:
                    broken.append(Broken(name, number, f"byte {error.start} is not UTF-8"))
    except OSError as error:
        broken.append(Broken(name, 0, f"cannot be read: {error.strerror or error}"))


def _row(line: str) -> Row:
    """Raises ``ValueError`` saying what is wrong and what would be accepted."""
    try:
        data = json.loads(line)
    except RecursionError:
        raise ValueError("no row: nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON ({error.msg}, column {error.colno}); cut off while it was written?") from None
    if _depth(data) > _DEEPEST:
        raise ValueError(f"no row: nested more than {_DEEPEST} levels deep")
    if not isinstance(data, dict):
        raise ValueError("no row: a JSON object is expected")
    schema, status, scenario, backend = map(data.get, ("schema", "status", "scenario", "backend"))
    point = data.get("point") or {}
    for good, wrong in (
        (schema == SCHEMA and schema is not True, f"schema {_shown(schema)}; this version reads {SCHEMA}"),
        (status in STATUSES, f"status {_shown(status)}; expected {', '.join(STATUSES)}"),
        (isinstance(backend, Mapping) and _is_name(backend.get("name")), "backend.name is missing; a text is expected"),
        (_is_name(scenario), "scenario is missing; a text is expected"),
        (isinstance(point, Mapping), f"point is {_shown(point)}; an object of columns is expected"),
    ):
        if not good:
            raise ValueError(wrong)
    assert isinstance(backend, Mapping)
    assert status is not None
    assert scenario is not None
    return Row(
        data,
        experiment=_word(data.get("experiment")) or "experiment",
        status=status,
        reason=_word(data.get("reason")),
        name=backend["name"],
        dtype=_word(backend.get("dtype")),
        model=_name(data.get("model")),
        workload=_name(data.get("workload")),
        scenario=scenario,
        launcher=_word(data.get("launcher")),
        point={str(name): _label(value) for name, value in point.items()},
    )


def _depth(data: Any) -> int:
    """Levels of nesting, counted without recursion."""
    depth, level = 0, [data]
    while level:
        depth += 1
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list))]
        level = [value for values in inner for value in values]
    return depth


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _shown(value: Any) -> str:
    return numbers.cut(repr(value), 60)


def _name(part: Any) -> str:
    return _word(part.get("name")) if isinstance(part, Mapping) else _word(part)


def _word(value: Any) -> str:
    """A value as text; nothing for null and for numbers that are none."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return value if isinstance(value, str) else str(value)


def _label(value: Any) -> int | float | str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return _word(value)
    number = _finite(value)
    return _word(value) if number is None else int(number) if number == int(number) else number


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if number == 0 or 1 / _LARGEST < abs(number) < _LARGEST else None


def _settings(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(_LONGEST_SETTINGS + 1).decode("utf-8", "replace")
    except OSError:
        return ""
    return text if len(text) <= _LONGEST_SETTINGS else text[:_LONGEST_SETTINGS] + "\n(cut here)"
