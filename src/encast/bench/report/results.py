"""The measurements of a group side by side: tables with ratios, intervals and agreement."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from encast.bench.report import numbers
from encast.bench.report.document import Block, Cell, Column, Section, Table, Text, cut
from encast.bench.report.figures import group_figures
from encast.bench.report.groups import LATENCY, THROUGHPUT, WITHIN_LIMIT, Group, Key, Metric, describe, ratio_to
from encast.bench.report.load import Row
from encast.bench.report.promise import Promise, kept, promise_of, promises
from encast.bench.scenarios.scaling import ideal

__all__ = ["STATUS_WORDS", "agreement_cells", "flags", "reference_of", "result_sections", "styles", "unkept"]

STATUS_WORDS = {
    "unavailable": "not there",
    "disagrees": "wrong answers",
    "unfair": "unfair",
    "crashed": "crashed",
    "timed_out": "too slow",
    "leaked": "leaked",
    "failed": "failed",
}

_MOST_POINTS_ACROSS = 8
"""Points beside each other; with more they go below each other."""
_MOST_COLUMNS = 9
"""Backends beside each other before a table is divided by dtype."""

_SCALED = {"core_scaling": "threads", "instance_scaling": "instances"}

_OWN = "encast"

_Optional = tuple[Column, Callable[[Row], Cell], Callable[[Row], bool]]
"""A column, its cell for a row, and whether a row has anything for it; one that none has is left out."""


def styles(rows: Sequence[Row]) -> dict[str, int]:
    """Family to colour, the same on the whole page: encast's own is the first, the others follow as they appear."""
    families = list(dict.fromkeys(row.family for row in rows))
    families.sort(key=lambda family: not family.startswith(_OWN))
    others = [family for family in families if family != _OWN]
    return {_OWN: 0, **{family: index for index, family in enumerate(others, 1)}}


def flags(row: Row) -> str:
    """`` ~`` behind the number of a noisy row."""
    return " ~" if row.noisy else ""


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
    if len(first) < 2:
        return None
    if wanted in first:
        return first[wanted]
    others = [backend for backend in first if not backend.startswith(_OWN)]
    return max((first[backend] for backend in (*others, *first)), key=lambda row: len(_compared(group, row)))


def _compared(group: Group, reference: Row) -> set[str]:
    """The backends with a ratio to that one at a point at least."""
    return {row.backend for row in group.measured if ratio_to(row, reference.name) is not None}


def unkept(group: Group) -> Iterator[str]:
    """A sentence for every latency limit that no set-up keeps, with the points where that is so, if not at all."""
    if group.metric is not WITHIN_LIMIT:
        return
    for promise in promises(group.measured):
        rows = [row for row in group.measured if promise_of(row) == promise]
        points = dict.fromkeys(group.key(row) for row in rows)
        good = {group.key(row) for row in rows if group.metric.of(row) is not None}
        missed = [describe(dict(zip(group.columns, point, strict=True))) for point in points if point not in good]
        if missed:
            shown = "; ".join(missed[:_MOST_POINTS_ACROSS]) + (" ..." if len(missed) > _MOST_POINTS_ACROSS else "")
            yield f"No set-up keeps {promise}{f' at {shown}' if good else ''}."


def agreement_cells(row: Row) -> tuple[Cell, Cell]:
    """How far the answers are from the reference: 1 minus the mean cosine, and the largest difference."""
    cosine, bound = row.number("agreement", "cosine_mean"), row.number("agreement", "bound")
    note = "" if bound is None else f"of {numbers.short(1 - bound)}"
    # A cosine of 1 plus rounding is a difference of nothing.
    loss = numbers.NOTHING if cosine is None else numbers.amount(max(0.0, 1 - cosine), 2)
    return Cell(loss, note if cosine is not None else ""), Cell(
        numbers.amount(row.number("agreement", "largest_difference"), 2)
    )


def result_sections(
    groups: Sequence[Group], colours: Mapping[str, int], wanted: str | None, most_lines: int
) -> list[Section]:
    return [
        Section(_title(group, groups), tuple(_blocks(group, colours, wanted, most_lines)), level=3, bulky=True)
        for group in groups
        if group.measured
    ]


def _title(group: Group, groups: Sequence[Group]) -> str:
    several = len({one.experiment for one in groups}) > 1
    return ", ".join(part for part in (group.experiment if several else "", group.scenario, group.model) if part)


def _blocks(group: Group, colours: Mapping[str, int], wanted: str | None, most_lines: int) -> Iterator[Block]:
    fixed = describe(group.fixed())
    if fixed:
        yield Text(f"Everywhere: {fixed}.")
    yield from (Text(said, warning=True) for said in unkept(group))
    reference = reference_of(group, wanted)
    yield from group_figures(group, colours, reference)
    if len(group.points) == 1:
        yield _in_full(group, group.points[0], reference, most_lines)
    elif len(group.points) <= _MOST_POINTS_ACROSS:
        yield _across(group, reference, most_lines)
    else:
        for backends, dtype in _divided(group):
            yield _by_point(group, backends, dtype, reference, most_lines)
        yield _by_backend(group, reference, most_lines)
    notes = list(_samples(group.measured))
    if reference is not None and any(group.metric.of(row) is not None for row in group.measured):
        notes.append(
            f"Ratios say how many times as fast as {reference.backend} the backend is"
            + (
                ", each with the best set-up of its own."
                if group.metric is WITHIN_LIMIT
                else ", measured by turns, with the 95 % interval in brackets."
            )
        )
        if group.ratios_of:
            notes.append(
                f"They are of {group.ratios_of}, the numbers beside them of {group.metric.title}: the two may have "
                "different winners."
            )
        apart = len({row.backend for row in group.measured} - _compared(group, reference) - {reference.backend})
        if apart and group.metric is not WITHIN_LIMIT:
            notes.append(
                f"{apart} backend{'s' if apart > 1 else ''} did not take turns with {reference.backend} and "
                f"{'have' if apart > 1 else 'has'} no ratio: more than timing.together are measured in groups, with "
                "the backend named first in each, and numbers of two groups are of different minutes."
            )
    if any(row.noisy for row in group.measured):
        notes.append("~ marks rows during which the machine was too noisy to trust them.")
    if notes:
        yield Text(" ".join(notes))


def _samples(rows: Sequence[Row]) -> Iterator[str]:
    """How much of its file a replay stands for."""
    found = [(row.number("metrics", "sampled_sequences"), row.number("metrics", "sequences")) for row in rows]
    for some, whole in dict.fromkeys((some, whole) for some, whole in found if some is not None and whole is not None):
        yield f"A round replays {some:,.0f} sequences, which stand for the lengths of {whole:,.0f}."


def _in_full(group: Group, point: Key, reference: Row | None, most_lines: int) -> Block:
    """Everything about the backends at one point, the best first."""
    members = [group.cells[point, backend] for backend in group.backends if (point, backend) in group.cells]
    members = [row for row in members if row.measured]
    sign = -1 if group.metric.higher_is_better else 1
    members.sort(key=lambda row: sign * (group.metric.of(row) or sign * math.inf))
    optional: list[_Optional] = [
        *_limit_columns(group, members),
        (Column("p50, ms"), _cell(LATENCY), lambda row: LATENCY.of(row) is not None),
        _optional("mean, ms", "latency_ms", "mean"),
        _optional("p90, ms", "latency_ms", "p90"),
        _optional("p99, ms", "latency_ms", "p99"),
        _optional("p99.9, ms", "latency_ms", "p99_9"),
        (Column("sequences/s"), _cell(THROUGHPUT), lambda row: THROUGHPUT.of(row) is not None),
        _optional("tokens/s", "tokens_per_s"),
        (
            Column(f"against {reference.backend}" if reference is not None else ""),
            lambda row: _best_ratio(row, reference) if group.metric is WITHIN_LIMIT else _ratio_cell(row, reference),
            lambda row: reference is not None,
        ),
        (
            Column("of the limit"),
            lambda row: Cell("" if (part := row.number("limit", "fraction")) is None else f"{part:.0%}"),
            lambda row: row.number("limit", "fraction") is not None,
        ),
        (Column("1 - cosine"), lambda row: agreement_cells(row)[0], lambda row: row.at("agreement") is not None),
        (
            Column("largest difference"),
            lambda row: agreement_cells(row)[1],
            lambda row: row.number("agreement", "largest_difference") is not None,
        ),
        *_own_columns(members),
    ]
    used = [(column, cell) for column, cell, has in optional if any(has(row) for row in members)]
    lines = [
        [
            # A row without what the scenario is about has won nothing, even where no other has it.
            Cell(row.backend + flags(row), kind="best" if not index and group.metric.of(row) is not None else ""),
            *(cell(row) for _, cell in used),
        ]
        for index, row in enumerate(members)
    ]
    place = describe(dict(zip(group.columns, point, strict=True)))
    caption = f"{group.scenario}{': ' + place if place else ''}"
    return cut(caption, [Column("backend", text=True), *(column for column, _ in used)], lines, most_lines)


def _limit_columns(group: Group, members: Sequence[Row]) -> Iterator[_Optional]:
    """Of the production scenario: which set-up is the best of a backend, and what it makes of the limit."""
    if group.metric is not WITHIN_LIMIT:
        return
    yield Column("batch, instances x threads", text=True), lambda row: Cell(_set_up(row)), lambda row: True
    for promise in promises(members):
        yield Column(str(promise), text=True), partial(_kept_cell, promise), lambda row: True
    yield (
        Column("sequences/s within the limit"),
        lambda row: Cell(numbers.amount(WITHIN_LIMIT.of(row))),
        lambda row: True,
    )


def _kept_cell(promise: Promise, row: Row) -> Cell:
    if promise_of(row) != promise:
        return Cell("")
    tail = promise.latency_ms(row)
    note = "" if tail is None else f"{numbers.amount(tail)} ms"
    return Cell(_KEPT[kept(row)], note, "bad" if kept(row) is False else "")


_KEPT = {True: "kept", False: "not kept", None: "unknown, too few calls"}


def _set_up(row: Row) -> str:
    """The batch and the division of the cores, which a group leaves out of the points of this scenario."""
    return f"batch {row.text('point', 'batch')}, {row.text('point', 'instances')} x {row.text('point', 'threads')}"


def _best_ratio(row: Row, reference: Row | None) -> Cell:
    """Of two best set-ups, which may be different ones, so that no rounds can be paired."""
    if reference is None:
        return Cell("")
    value, base = WITHIN_LIMIT.of(row), WITHIN_LIMIT.of(reference)
    return Cell(numbers.NOTHING if value is None or base is None else numbers.ratio(value / base))


_SHOWN = ("latency_ms", "sequences_per_s", "tokens_per_s", "latency_samples", "slo")
_MOST_OWN = 8


def _own_columns(rows: Sequence[Row]) -> Iterator[_Optional]:
    """Numbers that the scenario has beside the common ones, those one level down included."""
    paths: dict[tuple[str, ...], None] = {}
    for row in rows:
        metrics = row.at("metrics")
        for name, value in metrics.items() if isinstance(metrics, Mapping) else ():
            inner = value if isinstance(value, Mapping) else None
            for part in inner if inner is not None else ("",):
                path: tuple[str, ...] = (name, part) if part else (name,)
                if not name.startswith(_SHOWN) and row.number("metrics", *path) is not None:
                    paths[path] = None
    for names in list(paths)[:_MOST_OWN]:
        yield _optional(" ".join(names).replace("_", " "), *names)


def _optional(title: str, *path: str) -> _Optional:
    """The column of one number under ``metrics``."""
    return (
        Column(title),
        lambda row: Cell(numbers.amount(row.number("metrics", *path))),
        lambda row: row.number("metrics", *path) is not None,
    )


def _cell(metric: Metric) -> Callable[[Row], Cell]:
    def cell(row: Row) -> Cell:
        value = metric.of(row)
        return Cell(numbers.amount(value), numbers.interval(metric.interval_of(row), value))

    return cell


def _ratio_cell(row: Row, reference: Row | None) -> Cell:
    if reference is None:
        return Cell("")
    if row.backend == reference.backend:
        return Cell("1x")
    found = ratio_to(row, reference.name)
    if found is None:
        return Cell(numbers.NOTHING)
    return Cell(numbers.ratio(found[0]), numbers.ratio_interval(found[1], found[0]))


def _divided(group: Group) -> Iterator[tuple[list[str], str]]:
    """Backends that share a table: all, or those of a dtype when all are too many."""
    measured = {row.backend: row.dtype for row in group.measured}
    backends = [backend for backend in group.backends if backend in measured]
    if len(backends) <= _MOST_COLUMNS:
        yield backends, ""
        return
    for dtype in dict.fromkeys(measured[backend] for backend in backends):
        yield [backend for backend in backends if measured[backend] == dtype], dtype


def _cells_at(group: Group, point: Key, backends: Sequence[str], reference: Row | None) -> list[Cell]:
    """A cell a backend, the best of them marked."""
    metric = group.metric
    rows = [group.cells.get((point, backend)) for backend in backends]
    values = [value for row in rows if row and row.measured and (value := metric.of(row)) is not None]
    best = (max if metric.higher_is_better else min)(values) if len(values) > 1 else None
    against = group.cells.get((point, reference.backend)) if reference is not None else None
    return [_point_cell(metric, row, best, against) if row else Cell("") for row in rows]


def _by_point(group: Group, backends: Sequence[str], dtype: str, reference: Row | None, most_lines: int) -> Table:
    """A line a point, a column a backend: the number with its ratio below."""
    lines = [
        [*(Cell(numbers.plain(value)) for value in point), *_cells_at(group, point, backends, reference)]
        for point in group.points
    ]
    caption = f"{group.metric.title}, {group.metric.unit}{f', {dtype}' if dtype else ''}"
    columns = [Column(column) for column in group.columns] + [Column(backend) for backend in backends]
    return cut(caption, columns, lines, most_lines, heads=len(group.columns))


def _across(group: Group, reference: Row | None, most_lines: int) -> Table:
    """A line a backend, a column a point, and the answers' difference beside; the fastest over all points first."""
    backends = [backend for backend in group.backends if any(row.backend == backend for row in group.measured)]
    sign = -1 if group.metric.higher_is_better else 1

    def rank(backend: str) -> tuple[int, float]:
        rows = [row for row in group.measured if row.backend == backend]
        values = [value for row in rows if (value := group.metric.of(row)) is not None]
        return -len(values), sign * statistics.fmean(map(math.log, values)) if values else 0.0

    backends.sort(key=rank)
    by_point = [_cells_at(group, point, backends, reference) for point in group.points]
    efficiency = _efficiency(group)
    lines = []
    for index, backend in enumerate(backends):
        rows = [row for row in group.measured if row.backend == backend]
        line = [Cell(backend), *(cells[index] for cells in by_point)]
        lines.append([*line, *_efficiency_cells(efficiency, backend), *_worst(rows)])
    caption = f"{group.metric.title}, {group.metric.unit}"
    heads = [Column(describe(dict(zip(group.columns, point, strict=True)))) for point in group.points]
    columns = [Column("backend", text=True), *heads, *_efficiency_columns(efficiency), *_WORST_COLUMNS]
    return cut(caption, columns, lines, most_lines)


def _efficiency(group: Group) -> dict[str, dict[str, str]]:
    """Of a scaling scenario: by series (a length, say) and backend, the share of ideal scaling at the last point."""
    axis = _SCALED.get(group.scenario)
    if axis is None:
        return {}
    plain = [
        {
            "status": row.status,
            "scenario": row.scenario,
            "model": {"name": row.model},
            "backend": {"name": row.backend},
            "point": {**row.point, "workload": row.workload, "launcher": row.launcher},
            "metrics": {"sequences_per_s": THROUGHPUT.of(row)},
        }
        for row in group.measured
        if isinstance(row.point.get(axis), (int, float)) and float(row.point[axis]) > 0
    ]
    found: dict[str, dict[str, str]] = {}
    for one in ideal(plain, axis):  # rising along the axis, so the last of a series stays
        point = one.row["point"]
        series = describe({column: point[column] for column in group.columns if column != axis and column in point})
        found.setdefault(series, {})[str(one.row["backend"]["name"])] = f"{one.efficiency:.0%}"
    return found


def _efficiency_columns(efficiency: Mapping[str, Mapping[str, str]]) -> list[Column]:
    return [Column(", ".join(filter(None, ("of the ideal", series)))) for series in efficiency]


def _efficiency_cells(efficiency: Mapping[str, Mapping[str, str]], backend: str) -> list[Cell]:
    return [Cell(shares.get(backend, numbers.NOTHING)) for shares in efficiency.values()]


def _point_cell(metric: Metric, row: Row, best: float | None, against: Row | None) -> Cell:
    """The number of a backend at a point; below it the ratio to the reference, or else the interval."""
    if not row.measured:
        return Cell(STATUS_WORDS.get(row.status, row.status), kind="bad")
    value = metric.of(row)
    if metric is WITHIN_LIMIT:
        return _within_limit(row, value, value == best, against)
    if value is None:
        return Cell(numbers.NOTHING)
    ratio = Cell("") if row is against else _ratio_cell(row, against)
    note = numbers.interval(metric.interval_of(row), value)
    if ratio.text not in ("", numbers.NOTHING):
        note = f"{ratio.text} {ratio.note}".rstrip()
    return Cell(numbers.amount(value) + flags(row), note, "best" if value == best else "")


def _within_limit(row: Row, value: float | None, best: bool, against: Row | None) -> Cell:
    """A best set-up, which may differ between backends, so that their ratio has no rounds to pair."""
    setting = _set_up(row)
    if value is None:
        if kept(row) is None:
            return Cell("unknown", f"{setting}, too few calls")
        over = row.number("metrics", "slo", "latency_ms") or LATENCY.of(row)
        return Cell(f"over: {numbers.amount(over)} ms", setting, "bad")
    base = WITHIN_LIMIT.of(against) if against is not None and against is not row else None
    ratio = "" if base is None else f"{numbers.ratio(value / base)}, "
    promise = promise_of(row)
    tail = promise.latency_ms(row) if promise is not None else None
    said = "" if promise is None or tail is None else f", {promise.name} {numbers.amount(tail)} ms"
    return Cell(numbers.amount(value) + flags(row), ratio + setting + said, "best" if best else "")


def _by_backend(group: Group, reference: Row | None, most_lines: int) -> Table:
    """A line a backend over all points: its ratio, and the worst that its answers were off."""
    efficiency = _efficiency(group)
    lines = []
    for backend in group.backends:
        rows = [row for row in group.measured if row.backend == backend]
        if not rows:
            continue
        found = [one[0] for row in rows if reference and (one := ratio_to(row, reference.name)) is not None]
        ratio = Cell("1x" if reference is not None and backend == reference.backend else numbers.NOTHING)
        if found and ratio.text != "1x":
            spread = f"{numbers.ratio(min(found))} to {numbers.ratio(max(found))}" if len(found) > 1 else ""
            ratio = Cell(numbers.ratio(statistics.geometric_mean(found)), spread)
        points = Cell(f"{len(rows)} of {len(group.points)}")
        lines.append([Cell(backend), points, ratio, *_efficiency_cells(efficiency, backend), *_worst(rows)])
    against = f"against {reference.backend}, geometric mean" if reference is not None else "ratio"
    columns = [Column("backend", text=True), Column("points"), Column(against)]
    columns += [*_efficiency_columns(efficiency), *_WORST_COLUMNS]
    return cut("Over all points", columns, lines, most_lines)


_WORST_COLUMNS = (Column("1 - cosine, worst"), Column("largest difference"), Column("noisy rows"))


def _worst(rows: Sequence[Row]) -> tuple[Cell, Cell, Cell]:
    """The cells of ``_WORST_COLUMNS`` for all rows of a backend."""
    furthest = min(rows, key=lambda row: row.number("agreement", "cosine_mean") or math.inf)
    largest = [value for row in rows if (value := row.number("agreement", "largest_difference")) is not None]
    noisy = sum(row.noisy for row in rows)
    return (
        agreement_cells(furthest)[0],
        Cell(numbers.amount(max(largest), 2) if largest else numbers.NOTHING),
        Cell(str(noisy), kind="bad" if noisy else ""),
    )
