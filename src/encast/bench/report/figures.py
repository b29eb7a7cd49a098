"""Plots of a group over what varied: lengths, batches, cores, instances, rates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from encast.bench.report.axis import categories, logarithmic
from encast.bench.report.chart import Mark, Panel, Series, panel, shape_of
from encast.bench.report.document import Figure
from encast.bench.report.groups import (
    AXES,
    LATENCY,
    TAIL,
    THROUGHPUT,
    Group,
    Metric,
    Slice,
    describe,
    ratio_to,
    slices,
)
from encast.bench.report.load import Row

__all__ = ["group_figures"]

_MOST_PANELS = 6
_MOST_LINES = 14
"""Lines in one panel; beyond that nobody tells them apart."""

Bounds = tuple[float, float]

_PLOTTED: dict[str, tuple[Metric, ...]] = {
    "length": (LATENCY,),
    "batch": (LATENCY, THROUGHPUT),
    "cores": (LATENCY,),
    "threads": (LATENCY,),
    "instances": (THROUGHPUT, LATENCY),
    "rate": (TAIL, LATENCY),
    "load": (TAIL, LATENCY),
}
_IDEAL = {("cores", LATENCY): -1, ("threads", LATENCY): -1, ("instances", THROUGHPUT): 1}
"""Without losses, y goes with this power of x."""
_WITH_RATIO = "length"
"""Over it a latency spans decades, in which a third more or less is lost to the eye; a ratio shows it."""


@dataclass(frozen=True)
class _Quantity:
    """What is drawn along y: its value and interval for a row, None where the row has none."""

    title: str
    unit: str
    of: Callable[[Row], tuple[float, Bounds | None] | None]
    higher_is_better: bool
    power: int | None = None


def group_figures(group: Group, colours: Mapping[str, int], reference: Row | None) -> Iterator[Figure]:
    """A figure for each thing that varies and each number that there is. ``reference``: a row of the backend that
    ratios are against."""
    for x in AXES:
        if x not in group.columns or (x == "threads" and {"cores", "instances"} & set(group.columns)):
            continue
        for quantity in _quantities(group, x, reference):
            rows = [row for row in group.measured if _along(row, x) > 0 and quantity.of(row) is not None]
            figure = _figure(group, x, quantity, rows, colours) if rows else None
            if figure is not None:
                yield figure


def _quantities(group: Group, x: str, reference: Row | None) -> Iterator[_Quantity]:
    metrics = _PLOTTED[x]
    if x == "length" and group.metric is not LATENCY:
        metrics = (group.metric,)
    elif x in ("rate", "load"):
        metrics = tuple(one for one in metrics if any(one.of(row) for row in group.measured))[:1]
    for metric in metrics:
        power = _IDEAL.get((x, metric)) if x != "instances" or _more_cores(group) else None
        yield _Quantity(metric.title, metric.unit, _measured(metric), metric.higher_is_better, power)
    if reference is not None and x == _WITH_RATIO and group.metric in (LATENCY, THROUGHPUT):
        name, backend = reference.name, reference.backend

        def of(row: Row) -> tuple[float, Bounds | None] | None:
            return (1.0, None) if row.backend == backend else ratio_to(row, name)

        by = f", by {group.ratios_of}" if group.ratios_of else ""
        yield _Quantity(f"times as fast as {backend}{by}", "", of, higher_is_better=True)


def _more_cores(group: Group) -> bool:
    """Whether more instances have more cores in all; what is divided between them has no ideal to rise to."""
    return len({_along(row, "instances") * _along(row, "threads") for row in group.measured}) > 1


def _measured(metric: Metric) -> Callable[[Row], tuple[float, Bounds | None] | None]:
    def of(row: Row) -> tuple[float, Bounds | None] | None:
        value = metric.of(row)
        return None if value is None else (value, metric.interval_of(row))

    return of


def _figure(group: Group, x: str, quantity: _Quantity, rows: list[Row], colours: Mapping[str, int]) -> Figure | None:
    found = [one for one in slices(rows, group.columns, x) if len({_along(row, x) for row in one.rows}) > 1]
    if not found:
        return None
    chosen = _chosen(found)
    horizontal = categories(x, (_along(row, x) for one in chosen for row in one.rows))
    drawn = [(one, *_series(one, x, quantity, colours)) for one in chosen]
    said = f"{quantity.title}, {quantity.unit}" if quantity.unit else quantity.title
    plots = []
    for one, series, _ in drawn:
        # Panels that differ in the dtype alone are read against each other.
        beside = [lines for other, lines, _ in drawn if other.rest == one.rest]
        vertical = logarithmic(said, _values(line for lines in beside for line in lines))
        place = ", ".join(part for part in (describe(one.rest), one.dtype) if part) or group.scenario
        alt = (
            f"{said} over {x}, {place}, both axes logarithmic; {', '.join(line.name for line in series)}. "
            "The numbers are in the tables below."
        )
        plots.append(panel(Panel(place, series), horizontal, vertical, alt))
    said = f"{quantity.title} in {quantity.unit}" if quantity.unit else quantity.title
    caption = f"{said[:1].upper()}{said[1:]} against {x}, both axes logarithmic; bars are 95 % intervals."
    if quantity.power is not None:
        caption += " Dotted: ideal scaling from the first point."
    if any(row.noisy for one in chosen for row in one.rows):
        caption += " Hollow: the machine was noisy."
    if len(found) > len(chosen):
        caption += f" Drawn: {len(chosen)} of {len(found)} panels; the tables have all."
    missing = sum(missing for *_, missing in drawn)
    if missing:
        caption += f" {missing} slower line{'s' if missing > 1 else ''} not drawn."
    return Figure(caption, tuple(plots))


def _values(lines: Iterator[Series]) -> Iterator[float]:
    for line in lines:
        for mark in line.marks:
            yield from (value for value in (mark.y, mark.low, mark.high) if value is not None)
        yield from (y for _, y in line.ideal)


def _along(row: Row, x: str) -> float:
    """The place on the axis ``x``; 0 for a label that is no number."""
    value = row.point.get(x, 0)
    return 0.0 if isinstance(value, str) else float(value)


def _chosen(found: Sequence[Slice]) -> list[Slice]:
    """At most so many panels, a line of dtypes beside each other for each of: the first, the last, those between."""
    rests = list(dict.fromkeys(tuple(one.rest.values()) for one in found))
    if len(found) > _MOST_PANELS:
        room = max(1, _MOST_PANELS // len({one.dtype for one in found}))
        steps = [round(index * (len(rests) - 1) / max(1, room - 1)) for index in range(min(room, len(rests)))]
        rests = [rests[step] for step in dict.fromkeys(steps)]
    return [one for rest in rests for one in found if tuple(one.rest.values()) == rest][:_MOST_PANELS]


def _series(one: Slice, x: str, quantity: _Quantity, colours: Mapping[str, int]) -> tuple[tuple[Series, ...], int]:
    """A line a backend, and how many are left out."""
    lines: dict[str, dict[float, Row]] = {}
    for row in one.rows:
        lines.setdefault(row.backend, {})[_along(row, x)] = row
    found = []
    for members in lines.values():
        marks = tuple(_mark(at, members[at], quantity) for at in sorted(members))
        ideal: tuple[tuple[float, float], ...] = ()
        if quantity.power is not None and len(marks) > 1:
            first, last = marks[0], marks[-1]
            ideal = ((first.x, first.y), (last.x, first.y * (last.x / first.x) ** quantity.power))
        family = next(iter(members.values())).family
        found.append(Series(family, colours.get(family, 0), marks, ideal=ideal))
    sign = -1 if quantity.higher_is_better else 1
    ordered = sorted(found, key=lambda line: (line.style != 0, sign * line.marks[-1].y))
    kept = ordered[:_MOST_LINES]
    # The page's own colour is drawn last, so that nothing covers it.
    return tuple(sorted(kept, key=lambda line: -line.style)), len(ordered) - len(kept)


def _mark(at: float, row: Row, quantity: _Quantity) -> Mark:
    value, bounds = quantity.of(row) or (1.0, None)
    low, high = bounds or (None, None)
    return Mark(at, value, "", low, high, shape_of(row.dtype), not row.noisy)
