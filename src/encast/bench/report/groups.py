"""Rows that belong side by side: of one experiment, model and scenario, by point and by backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from encast.bench.report.load import Row
from encast.bench.scenarios import base
from encast.bench.scenarios.max_throughput import BEST_OF_SET_UPS, best_rows
from encast.pages import numbers
from encast.pages.charts import SHAPES, Mark
from encast.pages.document import Cell

__all__ = [
    "LATENCY",
    "TAIL",
    "THROUGHPUT",
    "WITHIN_LIMIT",
    "Group",
    "Metric",
    "checked",
    "colours",
    "describe",
    "group_rows",
    "mark",
    "ratio_to",
    "set_up",
    "slices",
]

OWN = "encast"

Label = int | float | str
Key = tuple[Label, ...]
Bounds = tuple[float, float]

_COLUMNS = ("workload", "launcher", "length", "lengths", "batch", "rate", "load", "instances", "cores", "threads")
"""The order in which a reader looks for them; others follow."""

_FREE_FIRST = ("launcher", "workload", "threads", "load", "rate", "instances", "cores", "batch", "length")
"""Of two columns that say the same, the one that stands later here is kept."""


@dataclass(frozen=True)
class Metric:
    """A number of a row: where it stands, how it is called, and which way is good."""

    path: tuple[str, ...]
    interval: str
    title: str
    unit: str
    higher_is_better: bool = False
    of_set_ups: bool = False
    """It is of each backend's best set-up: two may be different ones, which were not measured by turns."""

    def of(self, row: Row) -> float | None:
        value = row.number("metrics", *self.path)
        return value if value is not None and value > 0 else None

    def interval_of(self, row: Row) -> Bounds | None:
        bounds = row.interval("metrics", self.interval)
        return bounds if bounds is not None and bounds[0] > 0 else None

    def cell(self, row: Row) -> Cell | None:
        """The number and its interval."""
        value = self.of(row)
        return None if value is None else Cell(numbers.amount(value), numbers.interval(self.interval_of(row), value))

    def speed(self, row: Row) -> float:
        """Larger is better."""
        value = self.of(row) or 1.0
        return value if self.higher_is_better else 1 / value


LATENCY = Metric(("latency_ms", "p50"), "latency_ms_interval", base.LATENCY, "ms")
TAIL = Metric(("latency_ms", "p99"), "", "latency (p99)", "ms")
THROUGHPUT = Metric(("sequences_per_s",), "sequences_per_s_interval", base.THROUGHPUT, "sequences/s", True)
COLD_START = Metric(("cold_start_s", "total"), "cold_start_s_interval", base.COLD_START, "s")
WITHIN_LIMIT = Metric(
    ("sequences_per_s_within_slo",),
    "sequences_per_s_interval",
    "throughput within the limit",
    "sequences/s",
    True,
    True,
)
MOST = Metric(("sequences_per_s",), "sequences_per_s_interval", "maximum throughput", "sequences/s", True, True)

_PRODUCTION = "slo_throughput"
_SET_UP = ("batch", "instances", "threads")

_OF_SCENARIO = {
    "throughput": (THROUGHPUT, LATENCY),
    "instance_scaling": (THROUGHPUT, LATENCY),
    "length_replay": (THROUGHPUT, LATENCY),
    _PRODUCTION: (WITHIN_LIMIT, THROUGHPUT),
    "max_throughput": (MOST, LATENCY),
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
        if self.metric.of_set_ups:
            return ""  # they are made of the numbers
        found = dict.fromkeys(row.compared_by for row in self.measured)
        return " and ".join(name for name in found if name and name != self.metric.title)

    def of(self, backend: str) -> list[Row]:
        return [row for row in self.measured if row.backend == backend]

    def key(self, row: Row) -> Key:
        return tuple(_value(row, column) for column in self.columns)

    def place(self, point: Key) -> str:
        return describe(dict(zip(self.columns, point, strict=True)))

    def fixed(self) -> dict[str, Label]:
        """Columns that every row has and that do not vary, with their value."""
        first = next((row for row in self.rows if row.point), self.rows[0])
        return {name: _value(first, name) for name in (*_COLUMNS, *first.point) if name not in self.columns}


def group_rows(rows: Iterable[Row]) -> list[Group]:
    """The groups in the order in which they first appear."""
    parts: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        parts.setdefault((row.experiment, row.model, row.scenario), []).append(row)
    return [_group(*key, _best_set_ups(members)) for key, members in parts.items()]


def colours(rows: Sequence[Row]) -> dict[str, int]:
    """Family to colour, the same on the whole page: encast's own is the first, the others follow as they appear."""
    families = sorted(dict.fromkeys(row.family for row in rows), key=lambda family: not family.startswith(OWN))
    return {family: index for index, family in enumerate(dict.fromkeys([OWN, *families]))}


def describe(labels: Mapping[str, Label]) -> str:
    """``length 128, batch 1``: columns in the order in which a reader looks for them."""
    names = [name for name in dict.fromkeys([*_COLUMNS, *labels]) if labels.get(name, "") != ""]
    return ", ".join(f"{name} {numbers.plain(labels[name])}" for name in names)


def mark(
    row: Row, x: float | str, y: float | str, note: str, interval: Bounds | None = None, *, filled: bool = True
) -> Mark:
    """In the shape of the row's dtype."""
    low, high = interval or (None, None)
    return Mark(x, y, note, low, high, SHAPES.get(row.dtype, "diamond"), filled)


def set_up(row: Row) -> str:
    """``batch 8, 2 x 1``: the batch, and instances by threads; other columns as they are called."""
    labels = {name: value for name, value in row.point.items() if name not in ("length", "instances", "threads")}
    instances, threads = row.point.get("instances"), row.point.get("threads")
    sizes = "" if instances is None or threads is None else f"{numbers.plain(instances)} x {numbers.plain(threads)}"
    return ", ".join(filter(None, (describe(labels), sizes))) or row.launcher


def ratio_to(row: Row, other: str) -> tuple[float, Bounds | None] | None:
    """How many times as fast as the other backend, with its interval; None when they were not compared by turns."""
    value = row.number("ratio_to", other, "ratio")
    if value is None or value <= 0:
        return None
    ends = [end for name in ("low", "high") if (end := row.number("ratio_to", other, name)) is not None and end > 0]
    return value, (min(ends), max(ends)) if len(ends) == 2 else None


def slices(rows: Sequence[Row], columns: Sequence[str], x: str) -> list[tuple[str, dict[str, Label], list[Row]]]:
    """Lines over ``x``: the dtype, the other columns, and the rows that differ in ``x`` and in the backend alone.

    A column that follows from ``x`` and the rest (the threads of each instance when all cores are divided) would
    otherwise leave every point alone, and is left out.
    """
    rest = [column for column in columns if column != x]
    for column in sorted(rest, key=lambda one: _FREE_FIRST.index(one) if one in _FREE_FIRST else -1):
        others = [one for one in rest if one != column]
        seen: dict[Key, Label] = {}
        if all(
            seen.setdefault(tuple(_value(row, one) for one in (x, *others)), _value(row, column)) == _value(row, column)
            for row in rows
        ):
            rest = others
    parts: dict[tuple[str, Key], list[Row]] = {}
    for row in rows:
        parts.setdefault((row.dtype, tuple(_value(row, column) for column in rest)), []).append(row)
    ordered = sorted(parts, key=lambda part: (_dtype_order(part[0]), _sortable(part[1])))
    return [(dtype, dict(zip(rest, key, strict=True)), parts[dtype, key]) for dtype, key in ordered]


def checked(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Measured rows as ``encast.bench.scenarios`` reads them, each with its ``Row``, and numbers that are some."""
    return [
        {
            "row": row,
            "status": "ok",
            "scenario": row.scenario,
            "model": {"name": row.model},
            "backend": {"name": row.backend},
            "point": {**row.point, "workload": row.workload, "launcher": row.launcher},
            "metrics": {
                "sequences_per_s": THROUGHPUT.of(row),
                "sequences_per_s_within_slo": WITHIN_LIMIT.of(row),
                "slo": {
                    "limit_ms": row.number("metrics", "slo", "limit_ms"),
                    "percentile": row.text("metrics", "slo", "percentile"),
                },
                "latency_ms": {"mean": row.number("metrics", "latency_ms", "mean")},
            },
        }
        for row in rows
        if row.measured
    ]


def _best_set_ups(rows: list[Row]) -> list[Row]:
    """Of scenarios that choose among set-ups each backend's best for a length, and not every one that was tried."""
    if rows[0].scenario not in BEST_OF_SET_UPS:
        return rows
    known = [one for one in checked(rows) if one["metrics"]["latency_ms"]["mean"] is not None]
    # A length at which some set-ups failed still has the best of the others: later rows take the place of earlier ones.
    kept: list[Row] = [*(row for row in rows if not row.measured), *(one["row"] for one in best_rows(known))]
    return [replace(row, point={name: row.point[name] for name in row.point if name not in _SET_UP}) for row in kept]


def _group(experiment: str, model: str, scenario: str, rows: list[Row]) -> Group:
    names = dict.fromkeys([*_COLUMNS, *(name for row in rows for name in row.point)])
    # A backend that could not run at all has a row without a point, which is no point of its own.
    placed = [row for row in rows if row.point] or rows
    columns = tuple(name for name in names if len({_value(row, name) for row in placed}) > 1)

    def key(row: Row) -> Key:
        return tuple(_value(row, column) for column in columns)

    cells = {(key(row), row.backend): row for row in rows}
    points = tuple(sorted({key(row) for row in placed}, key=_sortable))
    backends = tuple(dict.fromkeys(row.backend for row in rows))
    return Group(experiment, model, scenario, tuple(rows), columns, cells, points, backends, _metric(scenario, rows))


def _metric(scenario: str, rows: Sequence[Row]) -> Metric:
    if scenario == _PRODUCTION and any(row.at("metrics", "slo") is not None for row in rows):
        return WITHIN_LIMIT  # even when nobody keeps it
    preferred = _OF_SCENARIO.get(scenario, (LATENCY, THROUGHPUT))
    return next((metric for metric in preferred if any(metric.of(row) is not None for row in rows)), preferred[0])


def _value(row: Row, column: str) -> Label:
    own = {"workload": row.workload, "launcher": row.launcher}
    return row.point.get(column, own.get(column, ""))


def _sortable(key: Key) -> tuple[tuple[bool, float, str], ...]:
    """Numbers before texts."""
    return tuple((isinstance(one, str), 0.0 if isinstance(one, str) else one, str(one)) for one in key)


def _dtype_order(dtype: str) -> tuple[int, str]:
    known = ("f32", "f16", "bf16", "f8", "int8")
    return (known.index(dtype) if dtype in known else len(known), dtype)
