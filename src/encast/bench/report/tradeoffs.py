"""What to choose: throughput against latency with the Pareto front, dollars per million, error against speed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from encast.bench.report.groups import LATENCY, THROUGHPUT, describe, mark, set_up
from encast.bench.report.load import Row
from encast.bench.report.results import agreement
from encast.measure.price import Price, share, usd_per_million
from encast.pages import numbers
from encast.pages.charts import Axis, Chart, Guide, Mark, Series
from encast.pages.document import Block, Cell, Figure, Section, Text, table, text

__all__ = ["Cost", "cost_of", "pareto_front", "tradeoff_sections"]

_MOST_CHARTS = 3
_MOST_COLUMNS = 9
_MOST_BACKENDS = 20
"""In one chart."""
_LEAST_LOSS = 1e-9
"""Below it a cosine's distance from 1 is rounding."""

_SETTING = "batch, instances x threads"


class Cost(NamedTuple):
    """Dollars for a million sequences, and the share of the machine that they were made with (None: unknown)."""

    usd: float
    interval: tuple[float, float] | None
    share: float | None

    @property
    def text(self) -> str:
        """An upper bound says so: the idle rest of the machine was paid for."""
        return ("≤ " if self.share is not None and self.share < 1 else "") + numbers.dollars(self.usd)


@dataclass(frozen=True)
class _Part:
    """Rows that answer the same requests under the same limit: of one model, workload or length, swept fields of the
    workload, and limit."""

    title: str
    rows: list[Row]

    @property
    def backends(self) -> int:
        return len({row.backend for row in self.rows})


def cost_of(row: Row, price: Price | None) -> Cost | None:
    """By the price, or by the one that the row was measured with; None without either or without throughput."""
    rate = THROUGHPUT.of(row)
    hour = price.usd_per_hour if price is not None else row.number("cost", "usd_per_hour")
    if rate is None or hour is None or hour <= 0:
        return None
    bounds = THROUGHPUT.interval_of(row)
    interval = None if bounds is None else (usd_per_million(hour, bounds[1]), usd_per_million(hour, bounds[0]))
    threads, instances = row.number("point", "threads"), row.number("point", "instances")
    if threads is None:
        threads, instances = row.number("point", "cores"), 1
    used = (threads, instances, row.number("machine", "cores"))
    return Cost(usd_per_million(hour, rate), interval, share(*(None if one is None else int(one) for one in used)))


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points for which no other has less of the first and at least as much of the second number.

    In the order of the first, ascending: latencies and throughputs.
    """
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda index: (points[index][0], -points[index][1])):
        if not front or points[index][1] > points[front[-1]][1]:
            front.append(index)
    return front


def tradeoff_sections(
    rows: Sequence[Row], colour: Mapping[str, int], price: Price | None, most_lines: int
) -> list[Section]:
    closed = [row for row in rows if row.measured and "arrivals" not in row.point]  # offered, not what it can do
    parts = (
        ("Throughput against latency", tuple(_latencies(closed, colour, most_lines))),
        ("Dollars per million", tuple(_costs(closed, colour, price, most_lines))),
        ("Error against speed", tuple(_errors(closed, colour, most_lines))),
    )
    return [Section(title, blocks, bulky=True) for title, blocks in parts if blocks]


def _parts(rows: Sequence[Row], fewest: int = 1) -> list[_Part]:
    """By model, workload, length and limit, in this order. ``fewest``: rows that a part must have to be one."""
    models = list(dict.fromkeys(row.model for row in rows))
    limits = [None, *sorted({row.slo for row in rows if row.slo is not None})]
    parts: dict[tuple[int, str, float, str, int], list[Row]] = {}
    for row in rows:
        length = row.point.get("length")
        at = float(length) if isinstance(length, (int, float)) else 0.0
        name = "" if length is not None else row.workload
        parts.setdefault((models.index(row.model), name, at, _swept(row), limits.index(row.slo)), []).append(row)
    found = []
    for key, members in sorted(parts.items(), key=lambda part: part[0]):
        length = members[0].point.get("length")
        what = members[0].workload if length is None else f"length {numbers.plain(length)}"
        title = (members[0].model, what, _swept(members[0]), str(limits[key[-1]] or ""))
        if len(members) >= fewest:
            found.append(_Part(", ".join(filter(None, title)), members))
    return found


def _swept(row: Row) -> str:
    """What a sweep changes in the requests beside their length."""
    return describe({name: value for name, value in row.point.items() if name.startswith("workload.")})


def _within(rows: Sequence[Row]) -> list[Row]:
    """The rows that keep their latency limit or have none; ``missed_slos`` says where none keeps it."""
    return [row for row in rows if row.slo is None or row.slo_met]


def _drawn(parts: Sequence[_Part]) -> tuple[list[_Part], str]:
    """The parts with the most backends, and of these with the most rows, in their order; and what is left out."""
    ranked = sorted(range(len(parts)), key=lambda index: (-parts[index].backends, -len(parts[index].rows)))
    drawn = [parts[index] for index in sorted(ranked[:_MOST_CHARTS])]
    left = " Set-ups that do not keep their limit are left out." if any(part.rows[0].slo for part in parts) else ""
    left += f" Drawn: {len(drawn)} of {len(parts)} workloads." if len(parts) > len(drawn) else ""
    most = max((part.backends for part in drawn), default=0)
    left += f" The best {_MOST_BACKENDS} of up to {most} backends are drawn." if most > _MOST_BACKENDS else ""
    return drawn, left


# Throughput against latency.


def _limited(row: Row) -> float | None:
    """What the chart has along x: the percentile that is limited, or the median where none is."""
    return LATENCY.of(row) if row.slo is None else row.slo_latency


def _latencies(rows: Sequence[Row], colour: Mapping[str, int], most_lines: int) -> Iterator[Block]:
    usable = [row for row in _within(rows) if _limited(row) is not None and THROUGHPUT.of(row) is not None]
    drawn, left = _drawn(_parts(usable, fewest=3))
    if not drawn:
        return
    tables, charts = [], []
    for part in drawn:
        slo = part.rows[0].slo
        points = [(_limited(row) or 0.0, THROUGHPUT.of(row) or 0.0) for row in part.rows]
        front = pareto_front(points)
        charts.append(_front_chart(part, points, front, colour))
        percentile = "p99" if slo is None else slo.name
        lines = []
        for row in (part.rows[index] for index in front):
            tail = row.number("metrics", "latency_ms", "p99") if slo is None else row.slo_latency
            cells = LATENCY.cell(row) or numbers.NOTHING, numbers.amount(tail), THROUGHPUT.cell(row)
            lines.append([row.backend + row.flag, set_up(row), *cells])
        columns = [text("backend"), text(_SETTING), "p50, ms", f"{percentile}, ms", "sequences/s"]
        tables.append(table(f"On the front: {part.title}", columns, lines, most_lines, heads=2))
    yield Figure(
        "Of each backend the set-ups that none of its own beats. Filled marks on the grey steps are the Pareto front "
        f"of all: nothing measured is both sooner and more. Circles are f32, squares bf16, triangles int8.{left}",
        tuple(charts),
    )
    if any(len({row.experiment for row in part.rows}) > 1 for part in drawn):
        yield Text("These set-ups come from several experiments, hence from different times on this machine.")
    yield from tables


def _front_chart(
    part: _Part, points: Sequence[tuple[float, float]], front: Sequence[int], colour: Mapping[str, int]
) -> Chart:
    """Of every backend the set-ups that none of its own beats, joined; those on the front of all are filled."""
    members: dict[str, list[int]] = {}
    for index, row in enumerate(part.rows):
        members.setdefault(row.backend, []).append(index)
    found = []
    for backend, its in members.items():
        own = [its[index] for index in pareto_front([points[index] for index in its])]
        marks = []
        for index in own:
            row, (latency, rate) = part.rows[index], points[index]
            note = f"{backend}, {set_up(row)}: {numbers.amount(latency)} ms, {numbers.amount(rate)} sequences/s"
            marks.append(mark(row, latency, rate, note, filled=index in front))
        best = max(points[index][1] for index in own)
        found.append((best, Series(backend, colour.get(part.rows[own[0]].family, 0), tuple(marks))))
    found.sort(key=lambda one: -one[0])
    steps: list[tuple[float, float]] = []
    for index in front:
        steps += [(points[index][0], steps[-1][1])] if steps else []
        steps.append(points[index])
    slo = part.rows[0].slo
    alt = (
        f"{part.title}: throughput over latency of {len(part.rows)} set-ups, both axes logarithmic; on the Pareto "
        "front are " + ", ".join(dict.fromkeys(part.rows[index].backend for index in front))
    )
    x = Axis(f"latency ({'p50' if slo is None else slo.name}), ms")
    series = tuple(one for _, one in found[:_MOST_BACKENDS])
    return Chart(part.title, alt, x, Axis("sequences/s"), series, (Guide(tuple(steps), dashed=False),))


# Dollars per million.


def _costs(rows: Sequence[Row], colour: Mapping[str, int], price: Price | None, most_lines: int) -> Iterator[Block]:
    of = {id(row): cost for row in _within(rows) if (cost := cost_of(row, price)) is not None}
    good = [row for row in rows if id(row) in of]
    if not good:
        return
    yield from _terms(good, price)
    parts = _parts(good)
    cheapest = [_Part(part.title, _cheapest(part, of)) for part in parts]
    wanted, left = _drawn(parts)
    drawn = [part for part in cheapest if part.title in [one.title for one in wanted]]
    yield Figure(
        "The cheapest set-up of each backend; bars are 95 % intervals. Hollow: part of the machine was idle, which "
        f"makes it an upper bound.{left}",
        tuple(_cost_chart(part, of, colour) for part in drawn),
    )
    if len(cheapest) > 1:  # a line a backend, a column a workload; in the order of the last column
        shown = cheapest[:_MOST_COLUMNS]
        overview = []
        for backend in dict.fromkeys(row.backend for part in reversed(shown) for row in part.rows):
            line = [Cell(backend)]
            for part in shown:
                row = next((row for row in part.rows if row.backend == backend), None)
                kind = "best" if row is part.rows[0] else ""
                line.append(Cell(of[id(row)].text + row.flag, set_up(row), kind) if row is not None else Cell(""))
            overview.append(line)
        caption = f"Dollars per million sequences; below them {_SETTING} of the cheapest set-up"
        yield table(caption, [text("backend"), *(part.title for part in shown)], overview, most_lines)
    for part in drawn if len(cheapest) <= _MOST_CHARTS else drawn[:1]:
        lines = []
        for row in part.rows:
            cost = of[id(row)]
            dollars = Cell(cost.text, numbers.interval(cost.interval, cost.usd))
            rate, latency = numbers.amount(THROUGHPUT.of(row)), numbers.amount(LATENCY.of(row))
            used = "unknown" if cost.share is None else f"{cost.share:.0%}"
            lines.append([row.backend + row.flag, set_up(row), dollars, rate, latency, used])
        columns = [text("backend"), text(_SETTING), "per million", "sequences/s", "p50, ms", "cores used"]
        yield table(f"Dollars per million sequences: {part.title}", columns, lines, most_lines, heads=2)


def _cheapest(part: _Part, of: Mapping[int, Cost]) -> list[Row]:
    """Of every backend, the cheapest first."""
    best: dict[str, Row] = {}
    for row in sorted(part.rows, key=lambda row: of[id(row)].usd):
        best.setdefault(row.backend, row)
    return list(best.values())


def _cost_chart(part: _Part, of: Mapping[int, Cost], colour: Mapping[str, int]) -> Chart:
    rows = part.rows[:_MOST_BACKENDS]
    series = []
    for row in rows:
        cost = of[id(row)]
        whole = cost.share is None or cost.share >= 1
        point = mark(row, cost.usd, row.backend, f"{row.backend}: {cost.text}", cost.interval, filled=whole)
        series.append(Series(row.backend, colour.get(row.family, 0), (point,), line=False))
    alt = (
        f"{part.title}: dollars per million sequences, from {rows[0].backend} with {of[id(rows[0])].text} to "
        f"{rows[-1].backend} with {of[id(rows[-1])].text}"
    )
    x, y = Axis("dollars per million sequences", "linear"), Axis("", "names")
    return Chart(part.title, alt, x, y, tuple(series), legend=False, size=(420, 75 + 19 * len(rows)))


def _terms(rows: Sequence[Row], price: Price | None) -> Iterator[Text]:
    """What an hour costs, of what."""
    if price is not None:
        source = price.source if price.cpus is None else f"{price.name}; {price.source}"
        said = f"At ${price.usd_per_hour:g} an hour ({source})"
    else:
        hours = sorted({hour for row in rows if (hour := row.number("cost", "usd_per_hour")) is not None})
        said = f"At {' or '.join(f'${hour:g}' for hour in hours)} an hour, as the rows were measured with"
    yield Text(
        f"{said}, for this machine as a whole. Nothing is scaled: a run that used part of the cores is charged all of "
        "them, and marked ≤."
    )
    if price is not None and price.cpus is not None:
        sizes = [(row.number("machine", "cores"), row.number("machine", "threads_per_core")) for row in rows]
        cpus = {int(cores * each) for cores, each in sizes if cores is not None and each is not None}
        if cpus and cpus != {price.cpus}:
            yield Text(
                f"{price.name} has {price.cpus} CPUs, the machine measured here has "
                f"{', '.join(map(str, sorted(cpus)))}: the price is taken as this machine's and is not scaled.",
                warning=True,
            )


# Error against speed.


def _loss(row: Row) -> float:
    return max(_LEAST_LOSS, 1 - (row.number("agreement", "cosine_mean") or 0.0))


def _errors(rows: Sequence[Row], colour: Mapping[str, int], most_lines: int) -> Iterator[Block]:
    """Of every model the point with the most backends."""
    parts: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in rows:
        if row.number("agreement", "cosine_mean") is not None and THROUGHPUT.of(row) is not None:
            point = tuple(sorted(row.point.items()))
            parts.setdefault((row.model, row.workload, row.scenario, row.launcher, point), {})[row.backend] = row
    best: dict[str, list[Row]] = {}
    for members in sorted(parts.values(), key=lambda members: -len(members)):
        found = sorted(members.values(), key=lambda row: -(THROUGHPUT.of(row) or 0.0))
        if len(found) > 2 and len(best) < _MOST_CHARTS:
            best.setdefault(found[0].model, found)
    if not best:
        return
    charts, tables = [], []
    for model, found in best.items():
        length = describe({"length": found[0].point.get("length", "")})
        title = ", ".join(filter(None, (model, found[0].scenario, length, set_up(found[0]))))
        charts.append(_error_chart(title, found, colour))
        lines = []
        for row in found:
            difference = numbers.amount(row.number("agreement", "largest_difference"), 2)
            lines.append([row.backend + row.flag, THROUGHPUT.cell(row), agreement(row), difference])
        columns = [text("backend"), "sequences/s", "1 - cosine", "largest difference"]
        tables.append(table(f"Error against speed: {title}", columns, lines, most_lines))
    yield Figure(
        "How far a token's state is from the float64 reference (1 minus the mean cosine) against throughput, both "
        "axes logarithmic: the best is at the bottom right. Joined: a runtime's dtypes. Dashed: what a dtype may "
        "be off by.",
        tuple(charts),
    )
    yield from tables


def _error_chart(title: str, rows: Sequence[Row], colour: Mapping[str, int]) -> Chart:
    known = {row.dtype: row.number("agreement", "bound") for row in rows}
    bounds = {dtype: 1 - bound for dtype, bound in known.items() if bound is not None and bound < 1}
    rates = [THROUGHPUT.of(row) or 1.0 for row in rows]
    families: dict[str, list[Mark]] = {}
    for rate, row in sorted(zip(rates, rows, strict=True), key=lambda one: one[0]):
        note = f"{row.backend}: {numbers.amount(rate)} sequences/s, 1 - cosine {numbers.amount(_loss(row), 2)}"
        families.setdefault(row.family, []).append(mark(row, rate, _loss(row), note))
    ordered = sorted(families, key=lambda family: colour.get(family, 0))
    series = tuple(Series(family, colour.get(family, 0), tuple(families[family])) for family in ordered)
    ends = (min(rates), max(rates))
    guides = tuple(
        Guide(tuple((rate, bound) for rate in ends), f"{dtype} bound", end=True) for dtype, bound in bounds.items()
    )
    alt = f"{title}: 1 minus the mean cosine over sequences a second for {len(rows)} backends, both axes logarithmic"
    return Chart(title, alt, Axis("sequences/s"), Axis("1 - mean cosine"), series, guides)
