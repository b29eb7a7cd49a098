"""Rows that belong side by side: of one experiment, model and scenario, by point and by backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from encast.bench.report import numbers
from encast.bench.report.load import Row
from encast.bench.scenarios import base
from encast.bench.scenarios.slo_throughput import best_rows

__all__ = [
    "AXES",
    "LATENCY",
    "TAIL",
    "THROUGHPUT",
    "WITHIN_LIMIT",
    "Group",
    "Metric",
    "Slice",
    "describe",
    "group_rows",
    "ratio_to",
    "slices",
]

Label = int | float | str
Key = tuple[Label, ...]

AXES = ("length", "batch", "cores", "threads", "instances", "rate", "load")
"""Columns that something is plotted against, when they vary."""

_COLUMNS = ("workload", "launcher", "length", "lengths", "batch", "rate", "load", "instances", "cores", "threads")
"""The order in which a reader looks for them; others follow."""

_FREE_FIRST = ("launcher", "workload", "threads", "load", "rate", "instances", "cores", "batch", "length")
"""Of two columns that say the same, the one that stands later here is kept."""


@dataclass(frozen=True)
class Metric:
    """A number of a row: where it stands, how it is called, and which way is good."""

    path: tuple[str, ...]
    interval: tuple[str, ...]
    title: str
    unit: str
    higher_is_better: bool

    def of(self, row: Row) -> float | None:
        value = row.number("metrics", *self.path)
        return value if value is not None and value > 0 else None

    def interval_of(self, row: Row) -> tuple[float, float] | None:
        bounds = row.interval("metrics", *self.interval) if self.interval else None
        return bounds if bounds is not None and bounds[0] > 0 else None


LATENCY = Metric(("latency_ms", "p50"), ("latency_ms_interval",), base.LATENCY, "ms", False)
TAIL = Metric(("latency_ms", "p99"), (), "latency (p99)", "ms", False)
THROUGHPUT = Metric(("sequences_per_s",), ("sequences_per_s_interval",), base.THROUGHPUT, "sequences/s", True)
COLD_START = Metric(("cold_start_s", "total"), ("cold_start_s_interval",), base.COLD_START, "s", False)
WITHIN_LIMIT = Metric(
    ("sequences_per_s_within_slo",), ("sequences_per_s_interval",), "throughput within the limit", "sequences/s", True
)

_PRODUCTION = "slo_throughput"
_SET_UP = ("batch", "instances", "threads")

_OF_SCENARIO = {
    "throughput": (THROUGHPUT, LATENCY),
    "instance_scaling": (THROUGHPUT, LATENCY),
    "length_replay": (THROUGHPUT, LATENCY),
    _PRODUCTION: (WITHIN_LIMIT, THROUGHPUT),
    "open_loop": (TAIL, LATENCY),
    "cold_start": (COLD_START, LATENCY),
}
"""Scenarios that are about something else than latency, and what stands in when no row has it."""


@dataclass(frozen=True)
class Group:
    """Rows of one experiment, model and scenario.

    ``columns``: what tells its points apart. ``backends`` and ``points`` are in the order of their first rows, points
    sorted by their columns. A row that comes twice (two files, say) counts once, the last.
    """

    experiment: str
    model: str
    scenario: str
    rows: tuple[Row, ...]
    columns: tuple[str, ...]
    cells: Mapping[tuple[Key, str], Row]
    points: tuple[Key, ...]
    backends: tuple[str, ...]
    metric: Metric
    """The one that the scenario is about."""

    @property
    def measured(self) -> list[Row]:
        return [row for row in self.cells.values() if row.measured]

    @property
    def ratios_of(self) -> str:
        """What else than the number shown ratios are of; "" where they are of that, or no row says."""
        if self.metric is WITHIN_LIMIT:
            return ""  # they are made of the numbers
        found = dict.fromkeys(row.compared_by for row in self.measured)
        return " and ".join(name for name in found if name and name != self.metric.title)

    def key(self, row: Row) -> Key:
        return tuple(_value(row, column) for column in self.columns)

    def fixed(self) -> dict[str, Label]:
        """Columns that every row has and that do not vary, with their value."""
        first = next((row for row in self.rows if row.point), self.rows[0])
        names = dict.fromkeys([*_COLUMNS, *first.point])
        fixed = {name: _value(first, name) for name in names if name not in self.columns}
        return {name: value for name, value in fixed.items() if value != ""}


@dataclass(frozen=True)
class Slice:
    """Rows that differ in ``x`` and in the backend alone, of one dtype; ``rest``: the other columns."""

    dtype: str
    rest: Mapping[str, Label]
    rows: tuple[Row, ...]


def group_rows(rows: Iterable[Row]) -> list[Group]:
    """The groups in the order in which they first appear."""
    parts: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        parts.setdefault((row.experiment, row.model, row.scenario), []).append(row)
    return [_group(*key, _best_within_limit(members)) for key, members in parts.items()]


def describe(labels: Mapping[str, Label]) -> str:
    """``length 128, batch 1``: columns in the order in which a reader looks for them."""
    names = [name for name in dict.fromkeys([*_COLUMNS, *labels]) if labels.get(name, "") != ""]
    return ", ".join(f"{name} {numbers.plain(labels[name])}" for name in names)


def ratio_to(row: Row, other: str) -> tuple[float, tuple[float, float] | None] | None:
    """How many times as fast as the other backend, with its interval; None when they were not compared by turns."""
    value = row.number("ratio_to", other, "ratio")
    if value is None or value <= 0:
        return None
    low, high = row.number("ratio_to", other, "low"), row.number("ratio_to", other, "high")
    return value, None if low is None or high is None else (low, high)


def slices(rows: Sequence[Row], columns: Sequence[str], x: str) -> list[Slice]:
    """Lines over ``x``: rows grouped by dtype and by those other columns that neither ``x`` nor the rest determines.

    A column that follows from ``x`` (the threads of each instance when all cores are divided) would otherwise leave
    every point alone.
    """
    rest = [column for column in columns if column != x]
    order = [column for column in rest if column not in _FREE_FIRST]
    order += [column for column in _FREE_FIRST if column in rest]
    for column in order:
        others = [one for one in rest if one != column]
        seen: dict[Key, Label] = {}
        if all(
            seen.setdefault((*(_value(row, one) for one in (x, *others)),), _value(row, column)) == _value(row, column)
            for row in rows
        ):
            rest = others
    parts: dict[tuple[str, Key], list[Row]] = {}
    for row in rows:
        parts.setdefault((row.dtype, tuple(_value(row, column) for column in rest)), []).append(row)
    ordered = sorted(parts, key=lambda part: (_dtype_order(part[0]), _sortable(part[1])))
    return [Slice(dtype, dict(zip(rest, key, strict=True)), tuple(parts[dtype, key])) for dtype, key in ordered]


def _best_within_limit(rows: list[Row]) -> list[Row]:
    """Of the production scenario each backend's best set-up for a length, and not every one that was tried."""
    if rows[0].scenario != _PRODUCTION:
        return rows
    plain: list[dict[str, Any]] = [
        {
            "row": index,
            "status": row.status,
            "scenario": row.scenario,
            "model": {"name": row.model},
            "backend": {"name": row.backend},
            "point": {**row.point, "workload": row.workload, "launcher": row.launcher},
            "metrics": {
                "sequences_per_s_within_slo": WITHIN_LIMIT.of(row),
                "slo": {
                    "limit_ms": row.number("metrics", "slo", "limit_ms"),
                    "percentile": row.text("metrics", "slo", "percentile"),
                },
                "latency_ms": {"mean": row.number("metrics", "latency_ms", "mean")},
            },
        }
        for index, row in enumerate(rows)
        if row.number("metrics", "latency_ms", "mean") is not None
    ]
    best = [rows[int(one["row"])] for one in best_rows(plain)]
    # A length at which some set-ups failed still has the best of the others: later rows take the place of earlier ones.
    kept = [*(row for row in rows if not row.measured), *best]
    return [replace(row, point={name: row.point[name] for name in row.point if name not in _SET_UP}) for row in kept]


def _group(experiment: str, model: str, scenario: str, rows: list[Row]) -> Group:
    names = list(dict.fromkeys([*_COLUMNS, *(name for row in rows for name in row.point)]))
    # A backend that could not run at all has a row without a point, which is no point of its own.
    placed = [row for row in rows if row.point] or rows
    columns = tuple(name for name in names if len({_value(row, name) for row in placed}) > 1)
    cells: dict[tuple[Key, str], Row] = {}
    for row in rows:
        cells[tuple(_value(row, column) for column in columns), row.backend] = row
    points = sorted({tuple(_value(row, column) for column in columns) for row in placed}, key=_sortable)
    backends = tuple(dict.fromkeys(row.backend for row in rows))
    metric = _metric(scenario, rows)
    return Group(experiment, model, scenario, tuple(rows), columns, cells, tuple(points), backends, metric)


def _metric(scenario: str, rows: Sequence[Row]) -> Metric:
    if scenario == _PRODUCTION and any(row.at("metrics", "slo") is not None for row in rows):
        return WITHIN_LIMIT  # even when nobody keeps it
    preferred = _OF_SCENARIO.get(scenario, (LATENCY, THROUGHPUT))
    return next((metric for metric in preferred if any(metric.of(row) is not None for row in rows)), preferred[0])


def _value(row: Row, column: str) -> Label:
    if column == "workload":
        return row.point.get(column, row.workload)
    if column == "launcher":
        return row.point.get(column, row.launcher)
    return row.point.get(column, "")


def _sortable(key: Key) -> tuple[tuple[bool, float, str], ...]:
    """Numbers before texts."""
    return tuple((isinstance(one, str), 0.0 if isinstance(one, str) else one, str(one)) for one in key)


def _dtype_order(dtype: str) -> tuple[int, str]:
    known = ("f32", "bf16", "int8")
    return (known.index(dtype) if dtype in known else len(known), dtype)
