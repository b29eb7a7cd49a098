"""What to choose: throughput against latency with the Pareto front, dollars per million, error against speed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from encast.bench.report import numbers
from encast.bench.report.axis import linear, logarithmic
from encast.bench.report.chart import Guide, Mark, Panel, Series, dots, panel, shape_of
from encast.bench.report.document import Block, Cell, Column, Figure, Section, Table, Text, cut
from encast.bench.report.groups import LATENCY, THROUGHPUT, describe
from encast.bench.report.load import Row
from encast.bench.report.promise import kept, promise_of, promises
from encast.bench.report.results import agreement_cells, flags
from encast.measure.price import Price, share, usd_per_million

__all__ = ["Cost", "choice_sections", "cost_of", "pareto_front"]

_MOST_SLICES = 3
_MOST_COLUMNS = 9
_MOST_CURVES = 20
_LEAST_LOSS = 1e-9
"""Below it a cosine's distance from 1 is rounding."""


@dataclass(frozen=True)
class Cost:
    """Dollars for a million sequences, and the share of the machine that they were made with (None: unknown)."""

    usd: float
    interval: tuple[float, float] | None
    share: float | None

    @property
    def text(self) -> str:
        """An upper bound says so: the idle rest of the machine was paid for."""
        return ("≤ " if self.share is not None and self.share < 1 else "") + numbers.dollars(self.usd)


def cost_of(row: Row, price: Price | None) -> Cost | None:
    """By the price, or by the one that the row was measured with; None without either or without throughput."""
    rate = THROUGHPUT.of(row)
    hour = price.usd_per_hour if price is not None else row.number("cost", "usd_per_hour")
    if rate is None or hour is None or hour <= 0:
        return None
    bounds = THROUGHPUT.interval_of(row)
    interval = None if bounds is None else (usd_per_million(hour, bounds[1]), usd_per_million(hour, bounds[0]))
    return Cost(usd_per_million(hour, rate), interval, _share(row))


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points for which no other has less of the first and at least as much of the second number.

    In the order of the first, ascending: latencies and throughputs.
    """
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda index: (points[index][0], -points[index][1])):
        if not front or points[index][1] > points[front[-1]][1]:
            front.append(index)
    return front


def choice_sections(
    rows: Sequence[Row], colours: Mapping[str, int], price: Price | None, most_lines: int
) -> list[Section]:
    closed = [row for row in rows if row.measured and "arrivals" not in row.point]  # offered, not what it can do
    parts = (
        ("Throughput against latency", list(_trade(closed, colours, most_lines))),
        ("Dollars per million", list(_costs(closed, colours, price, most_lines))),
        ("Error against speed", list(_errors(closed, colours, most_lines))),
    )
    return [Section(title, tuple(blocks), bulky=True) for title, blocks in parts if blocks]


def _slices(rows: Sequence[Row], fewest: int = 1) -> list[tuple[str, list[Row]]]:
    """Rows that answer the same requests under the same limit, by model, workload, length, swept fields of the workload
    and limit, in this order.

    ``fewest``: rows that a part must have to be one.
    """
    models = list(dict.fromkeys(row.model for row in rows))
    limits = [None, *promises(rows)]
    parts: dict[tuple[int, str, float, str, int], list[Row]] = {}
    for row in rows:
        length = row.point.get("length")
        limit = limits.index(promise_of(row))
        name = "" if length is not None else row.workload
        key = (models.index(row.model), name, _length(length), _requests(row), limit)
        parts.setdefault(key, []).append(row)
    found = []
    for key in sorted(parts):
        members = parts[key]
        length = members[0].point.get("length")
        what = members[0].workload if length is None else f"length {numbers.plain(length)}"
        if len(members) >= fewest:
            within = str(limits[key[-1]] or "")
            found.append((", ".join(filter(None, (members[0].model, what, _requests(members[0]), within))), members))
    return found


def _requests(row: Row) -> str:
    """What a sweep changes in the requests beside their length."""
    return describe({name: value for name, value in row.point.items() if name.startswith("workload.")})


def _within(rows: Sequence[Row]) -> tuple[list[Row], list[Text]]:
    """The rows that keep their latency limit or have none, and what to say of the others."""
    good = [row for row in rows if promise_of(row) is None or kept(row)]
    said = []
    for title, members in _slices(rows):
        over, unknown = (sum(kept(row) is met for row in members) for met in (False, None))
        if promise_of(members[0]) is None or not over + unknown:
            continue
        why = " and ".join(
            filter(None, (f"{over} over the limit" if over else "", f"{unknown} with too few calls" if unknown else ""))
        )
        if over + unknown == len(members):
            said.append(Text(f"{title}: no set-up is known to keep the limit ({why}).", warning=True))
        else:
            count = f"{over + unknown} of {len(members)} set-ups"
            said.append(Text(f"{title}: {count} do not keep the limit and are left out ({why})."))
    return good, said


def _length(label: int | float | str | None) -> float:
    return float(label) if isinstance(label, (int, float)) else 0.0


def _drawn(parts: Sequence[tuple[str, list[Row]]]) -> list[tuple[str, list[Row]]]:
    """The parts with the most backends, and of these with the most rows, in their order."""
    ranked = sorted(
        range(len(parts)), key=lambda index: (-len({row.backend for row in parts[index][1]}), -len(parts[index][1]))
    )
    return [parts[index] for index in sorted(ranked[:_MOST_SLICES])]


def _trade(rows: Sequence[Row], colours: Mapping[str, int], most_lines: int) -> Iterator[Block]:
    good, said = _within(rows)
    usable = [row for row in good if _latency(row) is not None and THROUGHPUT.of(row) is not None]
    parts = _slices(usable, fewest=3)
    yield from said
    if not parts:
        return
    several = False
    tables = []
    plots = []
    for title, members in _drawn(parts):
        several = several or len({row.experiment for row in members}) > 1
        promise = promise_of(members[0])
        percentile = "p50" if promise is None else promise.name
        points = [(_latency(row) or 0.0, THROUGHPUT.of(row) or 0.0) for row in members]
        front = pareto_front(points)
        steps: list[tuple[float, float]] = []
        for index in front:
            if steps:
                steps.append((points[index][0], steps[-1][1]))
            steps.append(points[index])
        series = _curves(members, points, set(front), colours)
        x = logarithmic(f"latency ({percentile}), ms", [mark.x for one in series for mark in one.marks])
        y = logarithmic("sequences/s", [mark.y for one in series for mark in one.marks])
        alt = (
            f"{title}: throughput over latency of {len(members)} set-ups, both axes logarithmic; on the Pareto "
            "front are " + ", ".join(dict.fromkeys(members[index].backend for index in front))
        )
        plots.append(panel(Panel(title, series, (Guide(tuple(steps), "front"),)), x, y, alt))
        lines = [
            [
                Cell(members[index].backend + flags(members[index])),
                Cell(_setting(members[index])),
                Cell(
                    numbers.amount(LATENCY.of(members[index])),
                    numbers.interval(LATENCY.interval_of(members[index]), LATENCY.of(members[index])),
                ),
                Cell(numbers.amount(_tail(members[index]))),
                Cell(
                    numbers.amount(points[index][1]),
                    numbers.interval(THROUGHPUT.interval_of(members[index]), points[index][1]),
                ),
            ]
            for index in front
        ]
        columns = [
            Column("backend", text=True),
            Column("batch, instances x threads", text=True),
            Column("p50, ms"),
            Column(f"{'p99' if promise is None else promise.name}, ms"),
        ]
        tables.append(cut(f"On the front: {title}", [*columns, Column("sequences/s")], lines, most_lines, heads=2))
    left = f" Drawn: {len(plots)} of {len(parts)} workloads." if len(parts) > len(plots) else ""
    left += _fewer(len({row.backend for row in members}) for _, members in _drawn(parts))
    yield Figure(
        "Of each backend the set-ups that none of its own beats. Filled marks on the grey steps are the Pareto front "
        f"of all: nothing measured is both sooner and more. Circles are f32, squares bf16, triangles int8.{left}",
        tuple(plots),
    )
    if several:
        yield Text("These set-ups come from several experiments, hence from different times on this machine.")
    yield from tables


def _latency(row: Row) -> float | None:
    """What a plot has along x: the percentile that is limited, or the median where none is."""
    return LATENCY.of(row) if promise_of(row) is None else _tail(row)


def _tail(row: Row) -> float | None:
    """The percentile that is limited, or the 99th."""
    promise = promise_of(row)
    return row.number("metrics", "latency_ms", "p99") if promise is None else promise.latency_ms(row)


def _fewer(backends: Iterable[int]) -> str:
    """Says so when not all backends of a plot fit."""
    most = max(backends, default=0)
    return f" The best {_MOST_CURVES} of up to {most} backends are drawn." if most > _MOST_CURVES else ""


def _curves(
    rows: Sequence[Row], points: Sequence[tuple[float, float]], front: set[int], colours: Mapping[str, int]
) -> tuple[Series, ...]:
    """Of every backend the set-ups that none of its own beats, joined; those on the front of all are filled."""
    backends: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        backends.setdefault(row.backend, []).append(index)
    found = []
    for members in backends.values():
        own = [members[index] for index in pareto_front([points[index] for index in members])]
        marks = tuple(
            Mark(
                *points[index],
                f"{rows[index].backend}, {_setting(rows[index])}: {numbers.amount(points[index][0])} ms, "
                f"{numbers.amount(points[index][1])} sequences/s",
                shape=shape_of(rows[index].dtype),
                filled=index in front,
            )
            for index in own
        )
        family = rows[own[0]].family
        found.append(Series(rows[own[0]].backend, colours.get(family, 0), marks))
    # The best of too many, and the page's own colour last, so that nothing covers it.
    found.sort(key=lambda one: -one.marks[-1].y)
    return tuple(sorted(found[:_MOST_CURVES], key=lambda one: -one.style))


def _costs(rows: Sequence[Row], colours: Mapping[str, int], price: Price | None, most_lines: int) -> Iterator[Block]:
    priced = [row for row in rows if cost_of(row, price) is not None]
    good, said = _within(priced)
    yield from said
    usable = [(row, cost) for row in good if (cost := cost_of(row, price)) is not None]
    if not usable:
        return
    of = {id(row): cost for row, cost in usable}
    yield Text(_terms([row for row, _ in usable], price))
    if price is not None and price.cpus is not None:
        cpus = {count for row, _ in usable if (count := _cpus(row)) is not None}
        if cpus and cpus != {price.cpus}:
            yield Text(
                f"{price.name} has {price.cpus} CPUs, the machine measured here has "
                f"{', '.join(map(str, sorted(cpus)))}: the price is taken as this machine's and is not scaled.",
                warning=True,
            )
    parts = _slices([row for row, _ in usable])
    cheapest = {title: _cheapest(members, of) for title, members in parts}
    drawn = _drawn(parts)
    plots = [_cost_plot(title, cheapest[title][:_MOST_CURVES], of, colours) for title, _ in drawn]
    left = f" Drawn: {len(plots)} of {len(parts)} workloads." if len(parts) > len(plots) else ""
    left += _fewer(len(cheapest[title]) for title, _ in drawn)
    yield Figure(
        "The cheapest set-up of each backend; bars are 95 % intervals. Hollow: part of the machine was idle, which "
        f"makes it an upper bound.{left}",
        tuple(plots),
    )
    if len(parts) > 1:
        yield _cost_overview(list(cheapest.items())[:_MOST_COLUMNS], of, most_lines)
    for title, _ in drawn if len(parts) <= _MOST_SLICES else drawn[:1]:
        yield _cost_table(title, cheapest[title], of, most_lines)


def _cheapest(rows: Sequence[Row], of: Mapping[int, Cost]) -> list[Row]:
    """Of every backend, the cheapest first."""
    best: dict[str, Row] = {}
    for row in rows:
        if row.backend not in best or of[id(row)].usd < of[id(best[row.backend])].usd:
            best[row.backend] = row
    return sorted(best.values(), key=lambda row: of[id(row)].usd)


def _cost_overview(cheapest: Sequence[tuple[str, list[Row]]], of: Mapping[int, Cost], most_lines: int) -> Table:
    """A line a backend, a column a workload; in the order of the last column."""
    backends = dict.fromkeys(row.backend for _, rows in reversed(cheapest) for row in rows)
    rows_of = {title: {row.backend: row for row in rows} for title, rows in cheapest}
    lines = []
    for backend in backends:
        line = [Cell(backend)]
        for title, ranked in cheapest:
            row = rows_of[title].get(backend)
            kind = "best" if row is ranked[0] else ""
            line.append(Cell("") if row is None else Cell(of[id(row)].text + flags(row), _setting(row), kind))
        lines.append(line)
    columns = [Column("backend", text=True), *(Column(title) for title, _ in cheapest)]
    return cut(
        "Dollars per million sequences; below them batch, instances x threads of the cheapest set-up",
        columns,
        lines,
        most_lines,
    )


def _cost_table(title: str, rows: Sequence[Row], of: Mapping[int, Cost], most_lines: int) -> Table:
    lines = []
    for row in rows:
        cost = of[id(row)]
        lines.append(
            [
                Cell(row.backend + flags(row)),
                Cell(_setting(row)),
                Cell(cost.text, numbers.interval(cost.interval, cost.usd)),
                Cell(numbers.amount(THROUGHPUT.of(row))),
                Cell(numbers.amount(LATENCY.of(row))),
                Cell("unknown" if cost.share is None else f"{cost.share:.0%}"),
            ]
        )
    columns = [
        Column("backend", text=True),
        Column("batch, instances x threads", text=True),
        Column("per million"),
        Column("sequences/s"),
        Column("p50, ms"),
        Column("cores used"),
    ]
    return cut(f"Dollars per million sequences: {title}", columns, lines, most_lines, heads=2)


def _cost_plot(title: str, rows: Sequence[Row], of: Mapping[int, Cost], colours: Mapping[str, int]) -> str:
    costs = [of[id(row)] for row in rows]
    x = linear(
        "dollars per million sequences", 0.0, max(cost.interval[1] if cost.interval else cost.usd for cost in costs)
    )
    shown = []
    for row, cost in zip(rows, costs, strict=True):
        low, high = cost.interval or (None, None)
        whole = cost.share is None or cost.share >= 1
        mark = Mark(cost.usd, 0.0, f"{row.backend}: {cost.text}", low, high, shape_of(row.dtype), filled=whole)
        shown.append((row.backend, Series(row.family, colours.get(row.family, 0), (mark,), line=False)))
    alt = (
        f"{title}: dollars per million sequences, from {rows[0].backend} with {costs[0].text} to {rows[-1].backend} "
        f"with {costs[-1].text}"
    )
    return dots(shown, x, alt, title)


def _terms(rows: Sequence[Row], price: Price | None) -> str:
    if price is not None:
        source = price.source if price.cpus is None else f"{price.name}; {price.source}"
        said = f"At ${price.usd_per_hour:g} an hour ({source})"
    else:
        hours = sorted({hour for row in rows if (hour := row.number("cost", "usd_per_hour")) is not None})
        said = f"At {' or '.join(f'${hour:g}' for hour in hours)} an hour, as the rows were measured with"
    return (
        f"{said}, for this machine as a whole. Nothing is scaled: a run that used part of the cores is charged all of "
        "them, and marked ≤."
    )


def _errors(rows: Sequence[Row], colours: Mapping[str, int], most_lines: int) -> Iterator[Block]:
    usable = [
        row for row in rows if row.number("agreement", "cosine_mean") is not None and THROUGHPUT.of(row) is not None
    ]
    plots, tables = [], []
    parts: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in usable:
        point = tuple(sorted(row.point.items()))
        parts.setdefault((row.model, row.workload, row.scenario, row.launcher, point), {})[row.backend] = row
    ordered = sorted(parts.values(), key=lambda members: -len(members))
    seen: set[str] = set()
    for members in ordered:
        found = list(members.values())
        if len(found) < 3 or found[0].model in seen or len(seen) == _MOST_SLICES:
            continue
        seen.add(found[0].model)
        length = describe({"length": found[0].point.get("length", "")})
        title = ", ".join(filter(None, (found[0].model, found[0].scenario, length, _setting(found[0]))))
        plots.append(_error_plot(title, found, colours))
        found.sort(key=lambda row: -(THROUGHPUT.of(row) or 0.0))
        lines = [
            [
                Cell(row.backend + flags(row)),
                Cell(
                    numbers.amount(THROUGHPUT.of(row)),
                    numbers.interval(THROUGHPUT.interval_of(row), THROUGHPUT.of(row)),
                ),
                *agreement_cells(row),
            ]
            for row in found
        ]
        columns = [
            Column("backend", text=True),
            Column("sequences/s"),
            Column("1 - cosine"),
            Column("largest difference"),
        ]
        tables.append(cut(f"Error against speed: {title}", columns, lines, most_lines))
    if plots:
        yield Figure(
            "How far a token's state is from the float64 reference (1 minus the mean cosine) against throughput, both "
            "axes logarithmic: the best is at the bottom right. Joined: a runtime's dtypes. Dashed: what a dtype may "
            "be off by.",
            tuple(plots),
        )
        yield from tables


def _error_plot(title: str, rows: Sequence[Row], colours: Mapping[str, int]) -> str:
    def loss(row: Row) -> float:
        return max(_LEAST_LOSS, 1 - (row.number("agreement", "cosine_mean") or 0.0))

    bounds = {
        row.dtype: 1 - bound for row in rows if (bound := row.number("agreement", "bound")) is not None and bound < 1
    }
    rates = [THROUGHPUT.of(row) or 1.0 for row in rows]
    x = logarithmic("sequences/s", rates)
    y = logarithmic("1 - mean cosine", [*map(loss, rows), *bounds.values()])
    families: dict[str, list[Mark]] = {}
    for row, rate in zip(rows, rates, strict=True):
        note = f"{row.backend}: {numbers.amount(rate)} sequences/s, 1 - cosine {numbers.amount(loss(row), 2)}"
        families.setdefault(row.family, []).append(Mark(rate, loss(row), note, shape=shape_of(row.dtype)))
    series = sorted(
        (
            Series(family, colours.get(family, 0), tuple(sorted(marks, key=lambda mark: mark.x)))
            for family, marks in families.items()
        ),
        key=lambda one: -one.style,
    )
    guides = tuple(
        Guide(((x.low, bound), (x.high, bound)), text=f"{dtype} bound") for dtype, bound in bounds.items() if bound > 0
    )
    alt = f"{title}: 1 minus the mean cosine over sequences a second for {len(rows)} backends, both axes logarithmic"
    return panel(Panel(title, tuple(series), guides), x, y, alt)


def _setting(row: Row) -> str:
    """``batch 8, 2 x 1``: the batch, and instances by threads; other columns as they are called."""
    labels = {name: value for name, value in row.point.items() if name not in ("length", "instances", "threads")}
    instances, threads = row.point.get("instances"), row.point.get("threads")
    sizes = "" if instances is None or threads is None else f"{numbers.plain(instances)} x {numbers.plain(threads)}"
    return ", ".join(filter(None, (describe(labels), sizes))) or row.launcher


def _share(row: Row) -> float | None:
    threads, instances = row.number("point", "threads"), row.number("point", "instances")
    if threads is None:
        threads, instances = row.number("point", "cores"), 1
    cores = row.number("machine", "cores")
    return share(*(None if value is None else int(value) for value in (threads, instances, cores)))


def _cpus(row: Row) -> int | None:
    cores, each = row.number("machine", "cores"), row.number("machine", "threads_per_core")
    return None if cores is None or each is None else int(cores * each)
