"""The measurements of a group side by side: charts over what varied, tables with ratios, intervals and agreement."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from encast.bench.report.groups import (
    LATENCY,
    OWN,
    TAIL,
    THROUGHPUT,
    WITHIN_LIMIT,
    Group,
    Key,
    Metric,
    checked,
    describe,
    mark,
    ratio_to,
    slices,
)
from encast.bench.report.load import Row, Slo
from encast.bench.scenarios.scaling import ideal
from encast.pages import numbers
from encast.pages.charts import Axis, Chart, Series
from encast.pages.document import Block, Cell, Column, Figure, Section, Table, Text, table, text

__all__ = ["STATUS_WORDS", "agreement", "missed_slos", "reference_of", "result_sections"]

STATUS_WORDS = {"unavailable": "not there", "disagrees": "wrong answers", "timed_out": "too slow"}
"""Other statuses are shown as they are."""

_MOST_POINTS_ACROSS = 8
"""Points beside each other; with more they go below each other."""
_MOST_COLUMNS = 9
"""Backends beside each other before a table is divided by dtype."""
_MOST_PANELS = 6
_MOST_LINES = 14
"""Lines in one panel; beyond that nobody tells them apart."""
_MOST_OWN = 8

_Bounds = tuple[float, float]
_Shown = tuple[Column | str, Callable[[Row], Cell | str | None]]
"""A column and its cell for a row; one in which no row has anything is left out."""


def reference_of(group: Group, wanted: str | None) -> Row | None:
    """A row of the backend that ratios are shown against: the wanted one, else the first that is not encast's.

    Where more backends were measured than take turns at once, only the one that was in all their groups has a ratio to
    every other: it goes before one that is not encast's. Only backends that were measured count; None when there are
    fewer than two.
    """
    first: dict[str, Row] = {}
    for row in group.rows:
        if row.measured:
            first.setdefault(row.backend, row)
    if len(first) < 2 or wanted in first:
        return first[wanted] if wanted in first and len(first) > 1 else None
    others = [backend for backend in first if not backend.startswith(OWN)]
    return max((first[backend] for backend in (*others, *first)), key=lambda row: len(_compared(group, row)))


def _compared(group: Group, reference: Row) -> set[str]:
    """The backends with a ratio to that one at a point at least."""
    return {row.backend for row in group.measured if ratio_to(row, reference.name) is not None}


def missed_slos(group: Group) -> Iterator[str]:
    """A sentence for every latency limit that no set-up keeps, with the points where that is so, if not at all."""
    if group.metric is not WITHIN_LIMIT:
        return
    for slo in sorted({row.slo for row in group.measured if row.slo is not None}):
        rows = [row for row in group.measured if row.slo == slo]
        good = {group.key(row) for row in rows if group.metric.of(row) is not None}
        missed = [group.place(point) for point in dict.fromkeys(map(group.key, rows)) if point not in good]
        if missed:
            shown = "; ".join(missed[:_MOST_POINTS_ACROSS]) + (" ..." if len(missed) > _MOST_POINTS_ACROSS else "")
            yield f"No set-up keeps {slo}{f' at {shown}' if good else ''}."


def agreement(row: Row) -> Cell:
    """How far the answers are from the reference: 1 minus the mean cosine, and what the dtype may be off by."""
    cosine, bound = row.number("agreement", "cosine_mean"), row.number("agreement", "bound")
    if cosine is None:
        return Cell(numbers.NOTHING)
    # A cosine of 1 plus rounding is a difference of nothing.
    return Cell(numbers.amount(max(0.0, 1 - cosine), 2), "" if bound is None else f"of {numbers.short(1 - bound)}")


def result_sections(
    groups: Sequence[Group], colour: Mapping[str, int], wanted: str | None, most_lines: int
) -> list[Section]:
    several = len({one.experiment for one in groups}) > 1
    found = []
    for group in groups:
        if group.measured:
            title = ", ".join(filter(None, (group.experiment if several else "", group.scenario, group.model)))
            blocks = tuple(_blocks(group, colour, reference_of(group, wanted), most_lines))
            found.append(Section(title, blocks, level=3, bulky=True))
    return found


def _blocks(group: Group, colour: Mapping[str, int], reference: Row | None, most_lines: int) -> Iterator[Block]:
    fixed = describe(group.fixed())
    if fixed:
        yield Text(f"Everywhere: {fixed}.")
    yield from (Text(said, warning=True) for said in missed_slos(group))
    yield from _figures(group, colour, reference)
    if len(group.points) == 1:
        yield _in_full(group, group.points[0], reference, most_lines)
    elif len(group.points) <= _MOST_POINTS_ACROSS:
        yield _by_backend(group, reference, most_lines, across=True)
    else:
        yield from _by_point(group, reference, most_lines)
        yield _by_backend(group, reference, most_lines, across=False)
    notes = " ".join(_notes(group, reference))
    if notes:
        yield Text(notes)


def _notes(group: Group, reference: Row | None) -> Iterator[str]:
    replayed = [
        (row.number("metrics", "sampled_sequences"), row.number("metrics", "sequences")) for row in group.measured
    ]
    for some, whole in dict.fromkeys(replayed):
        if some is not None and whole is not None:
            yield f"A round replays {some:,.0f} sequences, which stand for the lengths of {whole:,.0f}."
    if reference is not None and any(group.metric.of(row) is not None for row in group.measured):
        best = group.metric.of_set_ups
        how = "each with the best set-up" if best else "measured by turns, with the 95 % interval in brackets"
        yield f"Ratios say how many times as fast as {reference.backend} the backend is, {how}{' of its own' * best}."
        if group.ratios_of:
            yield (
                f"They are of {group.ratios_of}, the numbers beside them of {group.metric.title}: the two may have "
                "different winners."
            )
        apart = len({row.backend for row in group.measured} - _compared(group, reference) - {reference.backend})
        if apart and not best:
            yield (
                f"{apart} backend{'s' if apart > 1 else ''} did not take turns with {reference.backend} and "
                f"{'have' if apart > 1 else 'has'} no ratio: more than timing.together are measured in groups, with "
                "the backend named first in each, and numbers of two groups are of different minutes."
            )
    if any(row.noisy for row in group.measured):
        yield "~ marks rows during which the machine was noisy."


# Charts.

_PLOTTED: dict[str, tuple[Metric, ...]] = {
    "length": (LATENCY,),
    "batch": (LATENCY, THROUGHPUT),
    "cores": (LATENCY,),
    "threads": (LATENCY,),
    "instances": (THROUGHPUT, LATENCY),
    "rate": (TAIL, LATENCY),
    "load": (TAIL, LATENCY),
}
"""Columns that something is plotted against, when they vary."""
_IDEAL = {("cores", LATENCY): -1, ("threads", LATENCY): -1, ("instances", THROUGHPUT): 1}
"""Without losses, y goes with this power of x."""


@dataclass(frozen=True)
class _Quantity:
    """What is drawn along y: its value and interval for a row, None where the row has none."""

    title: str
    unit: str
    of: Callable[[Row], tuple[float, _Bounds | None] | None]
    higher_is_better: bool
    power: int | None = None


def _figures(group: Group, colour: Mapping[str, int], reference: Row | None) -> Iterator[Figure]:
    """A figure for each thing that varies and each number that there is."""
    for x in _PLOTTED:
        if x not in group.columns or (x == "threads" and {"cores", "instances"} & set(group.columns)):
            continue
        for quantity in _quantities(group, x, reference):
            rows = [row for row in group.measured if _along(row, x) > 0 and quantity.of(row) is not None]
            yield from _figure(group, x, quantity, rows, colour)


def _quantities(group: Group, x: str, reference: Row | None) -> Iterator[_Quantity]:
    metrics = _PLOTTED[x]
    if x == "length" and group.metric is not LATENCY:
        metrics = (group.metric,)
    elif x in ("rate", "load"):
        metrics = tuple(one for one in metrics if any(one.of(row) for row in group.measured))[:1]
    # What is divided between instances, and not added to, has no ideal to rise to.
    more_cores = len({_along(row, "instances") * _along(row, "threads") for row in group.measured}) > 1
    for metric in metrics:
        power = _IDEAL.get((x, metric)) if x != "instances" or more_cores else None
        yield _Quantity(metric.title, metric.unit, partial(_value, metric), metric.higher_is_better, power)
    # Over a length a latency spans decades, in which a third more or less is lost to the eye; a ratio shows it.
    if reference is not None and x == "length" and group.metric in (LATENCY, THROUGHPUT):
        by = f", by {group.ratios_of}" if group.ratios_of else ""
        yield _Quantity(f"times as fast as {reference.backend}{by}", "", partial(_ratio, reference), True)


def _value(metric: Metric, row: Row) -> tuple[float, _Bounds | None] | None:
    value = metric.of(row)
    return None if value is None else (value, metric.interval_of(row))


def _ratio(reference: Row, row: Row) -> tuple[float, _Bounds | None] | None:
    return (1.0, None) if row.backend == reference.backend else ratio_to(row, reference.name)


def _figure(group: Group, x: str, quantity: _Quantity, rows: list[Row], colour: Mapping[str, int]) -> Iterator[Figure]:
    found = [one for one in slices(rows, group.columns, x) if len({_along(row, x) for row in one[2]}) > 1]
    if not found:
        return
    chosen = _chosen([(dtype, describe(rest)) for dtype, rest, _ in found])
    drawn = [(*found[at][:2], found[at][2], *_series(found[at][2], x, quantity, colour)) for at in chosen]
    across = tuple({_along(row, x) for at in chosen for row in found[at][2]})
    said = f"{quantity.title}, {quantity.unit}" if quantity.unit else quantity.title
    charts = []
    for dtype, rest, _, series, _ in drawn:
        # Panels that differ in the dtype alone are read against each other.
        beside = tuple(value for _, other, _, lines, _ in drawn if other == rest for value in _heights(lines))
        place = ", ".join(filter(None, (describe(rest), dtype))) or group.scenario
        alt = (
            f"{said} over {x}, {place}, both axes logarithmic; {', '.join(line.name for line in series)}. "
            "The numbers are in the tables below."
        )
        charts.append(Chart(place, alt, Axis(x, "values", holds=across), Axis(said, holds=beside), series))
    said = f"{quantity.title} in {quantity.unit}" if quantity.unit else quantity.title
    caption = f"{said[:1].upper()}{said[1:]} against {x}, both axes logarithmic; bars are 95 % intervals."
    if quantity.power is not None:
        caption += " Dotted: ideal scaling from the first point."
    if any(row.noisy for _, _, members, _, _ in drawn for row in members):
        caption += " Hollow: the machine was noisy."
    if len(found) > len(chosen):
        caption += f" Drawn: {len(chosen)} of {len(found)} panels; the tables have all."
    missing = sum(missing for *_, missing in drawn)
    if missing:
        caption += f" {missing} slower line{'s' if missing > 1 else ''} not drawn."
    yield Figure(caption, tuple(charts))


def _heights(lines: Sequence[Series]) -> Iterator[float]:
    for line in lines:
        for point in line.marks:
            yield from (one for one in (point.y, point.low, point.high) if isinstance(one, float))
        yield from (y for _, y in line.ideal)


def _along(row: Row, x: str) -> float:
    """The place on the axis ``x``; 0 for a label that is no number."""
    value = row.point.get(x, 0)
    return 0.0 if isinstance(value, str) else float(value)


def _chosen(found: Sequence[tuple[str, str]]) -> list[int]:
    """Indices of at most so many panels (dtype, place), the dtypes of a place beside each other."""
    places = list(dict.fromkeys(place for _, place in found))
    room = max(1, _MOST_PANELS // len({dtype for dtype, _ in found}))
    if len(found) > _MOST_PANELS:
        places = places[:: math.ceil(len(places) / room)]
    return [at for place in places for at, one in enumerate(found) if one[1] == place][:_MOST_PANELS]


def _series(
    rows: Sequence[Row], x: str, quantity: _Quantity, colour: Mapping[str, int]
) -> tuple[tuple[Series, ...], int]:
    """A line a backend, the best first, and how many are left out."""
    lines: dict[str, dict[float, Row]] = {}
    for row in rows:
        lines.setdefault(row.backend, {})[_along(row, x)] = row
    found = []
    for backend, members in lines.items():
        marks = []
        for at, row in sorted(members.items()):
            value, bounds = quantity.of(row) or (1.0, None)
            note = f"{backend}, {x} {numbers.plain(at)}: {numbers.amount(value)} {quantity.unit or 'x'}{row.flag}"
            marks.append(mark(row, at, value, note, bounds, filled=not row.noisy))
        ideal_line: tuple[_Bounds, ...] = ()
        if quantity.power is not None and len(marks) > 1:
            (x0, y0), x1 = (min(members), float(marks[0].y)), max(members)
            ideal_line = ((x0, y0), (x1, y0 * (x1 / x0) ** quantity.power))
        family = next(iter(members.values())).family
        found.append((Series(family, colour.get(family, 0), tuple(marks), ideal=ideal_line), marks[-1].y))
    sign = -1 if quantity.higher_is_better else 1
    found.sort(key=lambda one: (one[0].colour != 0, sign * float(one[1])))
    return tuple(one for one, _ in found[:_MOST_LINES]), max(0, len(found) - _MOST_LINES)


# Tables.


def _in_full(group: Group, point: Key, reference: Row | None, most_lines: int) -> Table:
    """Everything about the backends at one point, the best first."""
    found = [group.cells.get((point, backend)) for backend in group.backends]
    members = [row for row in found if row is not None and row.measured]
    members.sort(key=lambda row: -group.metric.speed(row) if group.metric.of(row) is not None else math.inf)
    columns: list[_Shown] = []
    if group.metric.of_set_ups:
        columns.append((text("batch, instances x threads"), _best_set_up))
    if group.metric is WITHIN_LIMIT:
        slos = sorted({row.slo for row in members if row.slo is not None})
        columns += [(text(str(slo)), partial(_slo_cell, slo)) for slo in slos]
        columns.append(("sequences/s within the limit", lambda row: numbers.amount(WITHIN_LIMIT.of(row))))
    columns.append(("p50, ms", LATENCY.cell))
    for name in ("mean", "p90", "p99", "p99_9"):
        columns.append((f"{name.replace('_', '.')}, ms", partial(_number, ("latency_ms", name))))
    columns += [("sequences/s", THROUGHPUT.cell), ("tokens/s", partial(_number, ("tokens_per_s",)))]
    if reference is not None:
        best_ratio = partial(_best_ratio, group.metric, reference)
        against = best_ratio if group.metric.of_set_ups else partial(_ratio_cell, reference)
        columns.append((f"against {reference.backend}", against))
    columns += [
        ("of the limit", lambda row: None if (part := row.number("limit", "fraction")) is None else f"{part:.0%}"),
        ("1 - cosine", lambda row: agreement(row) if row.at("agreement") is not None else None),
        ("largest difference", partial(_number, ("largest_difference",), part="agreement", digits=2)),
        *_own_columns(members),
    ]
    used = [one for one in columns if any(one[1](row) is not None for row in members)]
    lines = []
    for index, row in enumerate(members):
        # A row without what the scenario is about has won nothing, even where no other has it.
        best = not index and group.metric.of(row) is not None
        cells = [cell(row) for _, cell in used]
        shown = [numbers.NOTHING if cell is None else cell for cell in cells]
        lines.append([Cell(row.backend + row.flag, kind="best" if best else ""), *shown])
    place = group.place(point)
    heads = [text("backend"), *(column for column, _ in used)]
    return table(f"{group.scenario}{': ' + place if place else ''}", heads, lines, most_lines)


def _number(path: tuple[str, ...], row: Row, part: str = "metrics", digits: int = 3) -> str | None:
    value = row.number(part, *path)
    return None if value is None else numbers.amount(value, digits)


def _slo_cell(slo: Slo, row: Row) -> Cell:
    if row.slo != slo:
        return Cell("")
    said = {True: "kept", False: "not kept", None: "unknown, too few calls"}[row.slo_met]
    note = "" if row.slo_latency is None else f"{numbers.amount(row.slo_latency)} ms"
    return Cell(said, note, "bad" if row.slo_met is False else "")


def _best_set_up(row: Row) -> str:
    """The batch and the division of the cores, which a group leaves out of the points of this scenario."""
    return f"batch {row.text('point', 'batch')}, {row.text('point', 'instances')} x {row.text('point', 'threads')}"


def _best_ratio(metric: Metric, reference: Row, row: Row) -> str | None:
    """Of two best set-ups, which may be different ones, so that no rounds can be paired."""
    value, base = metric.of(row), metric.of(reference)
    return numbers.NOTHING if value is None or base is None else numbers.ratio(value / base)


def _ratio_cell(reference: Row, row: Row) -> Cell:
    if row.backend == reference.backend:
        return Cell("1x")
    value, bounds = ratio_to(row, reference.name) or (None, None)
    return Cell(numbers.ratio(value), numbers.ratio_interval(bounds, value))


_COMMON = ("latency_ms", "sequences_per_s", "tokens_per_s", "latency_samples", "slo")


def _own_columns(rows: Sequence[Row]) -> list[_Shown]:
    """Numbers that the scenario has beside the common ones, those one level down included."""
    paths: dict[tuple[str, ...], None] = {}
    for row in rows:
        metrics = row.at("metrics")
        for name, value in metrics.items() if isinstance(metrics, Mapping) else ():
            for part in value if isinstance(value, Mapping) else ("",):
                path: tuple[str, ...] = (name, part) if part else (name,)
                if not name.startswith(_COMMON) and row.number("metrics", *path) is not None:
                    paths[path] = None
    return [(" ".join(path).replace("_", " "), partial(_number, path)) for path in list(paths)[:_MOST_OWN]]


def _cells_at(group: Group, point: Key, backends: Sequence[str], reference: Row | None) -> list[Cell]:
    """A cell a backend, the best of them marked."""
    rows = [group.cells.get((point, backend)) for backend in backends]
    speeds = [group.metric.speed(row) for row in rows if row and row.measured and group.metric.of(row) is not None]
    best = max(speeds) if len(speeds) > 1 else None
    against = group.cells.get((point, reference.backend)) if reference is not None else None
    return [_point_cell(group.metric, row, best, against) if row else Cell("") for row in rows]


def _point_cell(metric: Metric, row: Row, best: float | None, against: Row | None) -> Cell:
    """The number of a backend at a point; below it the ratio to the reference, or else the interval."""
    if not row.measured:
        return Cell(STATUS_WORDS.get(row.status, row.status), kind="bad")
    value = metric.of(row)
    kind = "best" if value is not None and metric.speed(row) == best else ""
    if metric.of_set_ups:
        setting = _best_set_up(row)
        if value is None and row.slo_met is None:
            return Cell("unknown", f"{setting}, too few calls")
        if value is None:
            return Cell(f"over: {numbers.amount(row.slo_latency or LATENCY.of(row))} ms", setting, "bad")
        base = metric.of(against) if against is not None and against is not row else None
        ratio = "" if base is None else f"{numbers.ratio(value / base)}, "
        tail = f", {row.slo.name} {numbers.amount(row.slo_latency)} ms" if row.slo and row.slo_latency else ""
        return Cell(numbers.amount(value) + row.flag, ratio + setting + tail, kind)
    if value is None:
        return Cell(numbers.NOTHING)
    note = numbers.interval(metric.interval_of(row), value)
    found = ratio_to(row, against.name) if against is not None and against is not row else None
    if found is not None:
        note = f"{numbers.ratio(found[0])} {numbers.ratio_interval(found[1], found[0])}".rstrip()
    return Cell(numbers.amount(value) + row.flag, note, kind)


def _by_point(group: Group, reference: Row | None, most_lines: int) -> Iterator[Table]:
    """A line a point, a column a backend: the number with its ratio below. A table a dtype when backends are many."""
    measured = {row.backend: row.dtype for row in group.measured}
    backends = [backend for backend in group.backends if backend in measured]
    many = len(backends) > _MOST_COLUMNS
    for dtype in dict.fromkeys(measured[backend] for backend in backends) if many else [""]:
        shown = [backend for backend in backends if not many or measured[backend] == dtype]
        lines = [[*map(numbers.plain, point), *_cells_at(group, point, shown, reference)] for point in group.points]
        caption = f"{group.metric.title}, {group.metric.unit}{f', {dtype}' if dtype else ''}"
        yield table(caption, [*group.columns, *shown], lines, most_lines, heads=len(group.columns))


def _by_backend(group: Group, reference: Row | None, most_lines: int, *, across: bool) -> Table:
    """A line a backend: its number at every point (``across``) or its ratio over all of them; and the worst that its
    answers were off."""
    backends = [backend for backend in group.backends if group.of(backend)]
    if across:  # the fastest over all points first
        backends.sort(key=lambda backend: _rank(group, backend))
        by_point = [_cells_at(group, point, backends, reference) for point in group.points]
        columns: list[Column | str] = [text("backend"), *map(group.place, group.points)]
    else:
        against = f"against {reference.backend}, geometric mean" if reference is not None else "ratio"
        columns = [text("backend"), "points", against]
    efficiency = _efficiency(group)
    lines: list[list[Cell | str]] = []
    for index, backend in enumerate(backends):
        rows = group.of(backend)
        line: list[Cell | str] = [backend]
        if across:
            line += [cells[index] for cells in by_point]
        else:
            line += [f"{len(rows)} of {len(group.points)}", _mean_ratio(rows, backend, reference)]
        noisy = sum(row.noisy for row in rows)
        differences = [one for row in rows if (one := row.number("agreement", "largest_difference")) is not None]
        line += [shares.get(backend, numbers.NOTHING) for shares in efficiency.values()]
        line.append(agreement(min(rows, key=lambda row: row.number("agreement", "cosine_mean") or math.inf)))
        line.append(numbers.amount(max(differences), 2) if differences else numbers.NOTHING)
        lines.append([*line, Cell(str(noisy), kind="bad" if noisy else "")])
    columns += [", ".join(filter(None, ("of the ideal", series))) for series in efficiency]
    columns += ["1 - cosine, worst", "largest difference", "noisy rows"]
    caption = f"{group.metric.title}, {group.metric.unit}" if across else "Over all points"
    return table(caption, columns, lines, most_lines)


def _rank(group: Group, backend: str) -> tuple[int, float]:
    speeds = [math.log(group.metric.speed(row)) for row in group.of(backend) if group.metric.of(row) is not None]
    return -len(speeds), -statistics.fmean(speeds) if speeds else 0.0


def _mean_ratio(rows: Sequence[Row], backend: str, reference: Row | None) -> Cell:
    if reference is None or backend == reference.backend:
        return Cell(numbers.NOTHING if reference is None else "1x")
    found = [one[0] for row in rows if (one := ratio_to(row, reference.name)) is not None]
    spread = f"{numbers.ratio(min(found))} to {numbers.ratio(max(found))}" if len(found) > 1 else ""
    return Cell(numbers.ratio(statistics.geometric_mean(found)) if found else numbers.NOTHING, spread)


def _efficiency(group: Group) -> dict[str, dict[str, str]]:
    """Of a scaling scenario: by series (a length, say) and backend, the share of ideal scaling at the last point."""
    axis = {"core_scaling": "threads", "instance_scaling": "instances"}.get(group.scenario, "")
    found: dict[str, dict[str, str]] = {}
    # Rising along the axis, so the last of a series stays.
    for one in ideal(checked(row for row in group.measured if axis and _along(row, axis) > 0), axis):
        point = one.row["point"]
        series = describe({column: point[column] for column in group.columns if column != axis and column in point})
        found.setdefault(series, {})[str(one.row["backend"]["name"])] = f"{one.efficiency:.0%}"
    return found
