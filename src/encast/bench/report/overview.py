"""What was measured, on what, with which backends, and who was fastest."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from encast.bench.config import available
from encast.bench.report import numbers
from encast.bench.report.document import Block, Cell, Column, Listing, Section, Table, Text, cut
from encast.bench.report.groups import WITHIN_LIMIT, Group, Metric, ratio_to
from encast.bench.report.load import Loaded, Row
from encast.bench.report.results import unkept
from encast.bench.rows import flatten

__all__ = ["backends_section", "glance_section", "machine_section", "method_section", "summary"]

_MOST_FACTS = 600
_MOST_SETTINGS = 8


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def summary(loaded: Loaded) -> tuple[Text, ...]:
    """The lines under the title: what there is, and above all what is wrong with it."""
    rows = loaded.rows
    measured = [row for row in rows if row.measured]
    failed = {row.backend for row in rows} - {row.backend for row in measured}
    said = (
        f"{_counted(len(rows), 'row')} of {_counted(len({row.experiment for row in rows}), 'experiment')}, "
        f"{_counted(len({row.backend for row in measured}), 'backend')} measured"
    )
    times = sorted(_hour(time) for row in rows if (time := row.text("time")))
    if times:
        said += f", {times[0]} to {times[-1]}" if times[0] != times[-1] else f", {times[0]}"
    lines = [Text(said + "."), *(Text(f"Machine: {machine}.") for machine in _machines(rows))]
    if failed:
        lines.append(Text(f"Could not run at all: {', '.join(sorted(failed))}.", warning=True))
    noisy, unfair = sum(row.noisy for row in measured), sum(row.status == "unfair" for row in rows)
    if noisy:
        lines.append(Text(f"The machine was noisy during {noisy} of {len(measured)} measured rows (~).", warning=True))
    if unfair:
        some = f"{unfair} rows" if unfair > 1 else "1 row"
        lines.append(Text(f"{some} broke the rules of fairness: no numbers of theirs stand here.", warning=True))
    if len(_machines(rows)) > 1:
        lines.append(Text("These rows are of several machines, which must not be compared.", warning=True))
    if loaded.broken:
        count = len(loaded.broken)
        lines.append(Text(f"{count} line{'s' if count > 1 else ''} could not be read; see the end.", warning=True))
    return tuple(lines)


def glance_section(groups: Sequence[Group], most_lines: int) -> Section | None:
    """For every scenario, model and dtype the backend that is fastest at most points, and by how much."""
    lines = []
    for group in groups:
        for dtype in dict.fromkeys(row.dtype for row in group.measured):
            line = _fastest(group, dtype)
            if line is not None:
                lines.append([Cell(group.experiment), Cell(group.scenario), Cell(group.model), Cell(dtype), *line])
    limits = [
        Text(f"{', '.join(filter(None, (group.scenario, group.model)))}: {said}", warning=True)
        for group in groups
        for said in unkept(group)
    ]
    if not lines:
        return Section("At a glance", tuple(limits)) if limits else None
    columns = [
        Column("experiment", text=True),
        Column("scenario", text=True),
        Column("model", text=True),
        Column("dtype", text=True),
        Column("fastest", text=True),
        Column("at points"),
        Column("of them clearly"),
        Column("against the next", text=True),
    ]
    table = cut("The fastest of each dtype", columns, lines, most_lines, heads=4)
    note = (
        "Clearly: the next best was measured by turns with it, neither row was noisy, and the 95 % interval of their "
        "ratio lies above 1."
    )
    return Section("At a glance", (*limits, table, Text(note)))


def _fastest(group: Group, dtype: str) -> list[Cell] | None:
    """The cells of one dtype; None when fewer than two backends have it."""
    wins: dict[str, list[tuple[float, bool, str]]] = {}
    by = ""
    points = 0
    for point in group.points:
        rows = [group.cells.get((point, backend)) for backend in group.backends]
        found = [row for row in rows if row is not None and row.measured and row.dtype == dtype]
        ranked = sorted(
            (one for one in found if group.metric.of(one) is not None), key=lambda row: _speed(group.metric, row)
        )
        if len(ranked) < 2:
            continue
        points += 1
        best, next_one = ranked[-1], ranked[-2]
        # Best set-ups within a limit may be different ones, which were not measured by turns.
        paired = None if group.metric is WITHIN_LIMIT else ratio_to(best, next_one.name)
        ratio = paired[0] if paired else _speed(group.metric, best) / _speed(group.metric, next_one)
        by = group.ratios_of if paired else by
        steady = not best.noisy and not next_one.noisy
        clear = steady and paired is not None and paired[1] is not None and paired[1][0] > 1
        wins.setdefault(best.backend, []).append((ratio, clear, next_one.backend))
    if not wins:
        return None
    winner = max(wins, key=lambda backend: len(wins[backend]))
    ratios = [ratio for ratio, _, _ in wins[winner]]
    spread = numbers.ratio(min(ratios))
    if numbers.ratio(max(ratios)) != spread:
        spread += f" to {numbers.ratio(max(ratios))}"
    rivals = list(dict.fromkeys(rival for *_, rival in wins[winner]))
    return [
        Cell(winner, kind="best"),
        Cell(f"{len(wins[winner])} of {points}"),
        Cell(numbers.NOTHING if group.metric is WITHIN_LIMIT else str(sum(clear for _, clear, _ in wins[winner]))),
        Cell(
            f"{spread} as fast as {', '.join(rivals[:3])}{' ...' if len(rivals) > 3 else ''}",
            f"by {by}; fastest by {group.metric.title}" if by else "",
        ),
    ]


def _speed(metric: Metric, row: Row) -> float:
    value = metric.of(row) or 1.0
    return value if metric.higher_is_better else 1 / value


def backends_section(rows: Sequence[Row], most_lines: int) -> Section:
    """What each backend is, its version, and how it was made to run: its own facts."""
    first: dict[str, Row] = {}
    for row in rows:
        if row.backend not in first or (row.measured and not first[row.backend].measured):
            first[row.backend] = row
    known = available("backend")
    lines = []
    for backend, row in first.items():
        facts = row.at("backend", "facts")
        flat = flatten(facts) if isinstance(facts, Mapping) else {}
        flat = {name: value for name, value in flat.items() if name != "version" and value not in (None, "", "[]")}
        text = "; ".join(f"{name}: {_fact(value)}" for name, value in flat.items())
        lines.append(
            [
                Cell(backend),
                Cell(known.get(row.name, "")),
                Cell(row.text("backend", "version") or numbers.NOTHING),
                Cell(numbers.seconds(row.number("cold", "export_s"))),
                Cell(text if len(text) <= _MOST_FACTS else text[: _MOST_FACTS - 1] + "…"),
            ]
        )
    columns = [
        Column("backend", text=True),
        Column("what it is", text=True, wide=True),
        Column("version", text=True),
        Column("conversion"),
        Column("how it was converted, settings in force", text=True, wide=True),
    ]
    return Section("Backends", (cut("What was compared", columns, lines, most_lines),))


def machine_section(loaded: Loaded, most_lines: int) -> Section | None:
    """All that the rows say about the machine, and the configuration of every experiment."""
    blocks: list[Block] = list(_machine_tables(loaded.rows, most_lines))
    settings = list(loaded.settings.items())
    blocks += [Listing(f"Settings: {name}", text) for name, text in settings[:_MOST_SETTINGS]]
    if len(settings) > _MOST_SETTINGS:
        blocks.append(Text(f"Settings also: {', '.join(name for name, _ in settings[_MOST_SETTINGS:][:most_lines])}."))
    return Section("Machine and settings", tuple(blocks)) if blocks else None


def _machine_tables(rows: Sequence[Row], most_lines: int) -> Iterator[Table]:
    seen: dict[str, Mapping[str, object]] = {}
    for row in rows:
        facts = row.at("machine")
        if isinstance(facts, Mapping) and facts:
            seen.setdefault(_machine(row), facts)
    for number, (name, facts) in enumerate(seen.items(), 1):
        lines = [[Cell(str(field)), Cell(_short(value))] for field, value in flatten(facts).items()]
        caption = f"Machine {number}: {name}" if len(seen) > 1 else "Machine"
        columns = [Column("fact", text=True), Column("value", text=True, wide=True)]
        yield cut(caption, columns, lines, most_lines)
    models: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row.model:
            models.setdefault((row.model, row.text("model", "sha")), row)
    if models:
        lines = [
            [
                Cell(name),
                Cell(row.text("model", "layers")),
                Cell(row.text("model", "hidden")),
                Cell(_short(sha, 16)),
            ]
            for (name, sha), row in models.items()
        ]
        columns = [Column("model", text=True), Column("layers"), Column("hidden"), Column("files' hash", text=True)]
        yield cut("Models", columns, lines, most_lines)
    workloads: dict[str, Row] = {}
    for row in rows:
        if row.workload and row.at("workload", "sequences") is not None:
            workloads.setdefault(row.workload, row)
    if workloads:
        lines = [
            [Cell(name), *(Cell(_sizes(row.at("workload", field))) for field in ("sequences", "tokens", "lengths"))]
            for name, row in workloads.items()
        ]
        columns = [Column("workload", text=True), Column("sequences"), Column("tokens"), Column("least, median, most")]
        yield cut("Workloads (of the first row of each)", columns, lines, most_lines)


def method_section() -> Section:
    """What the numbers mean."""
    return Section(
        "How to read this",
        (
            Text(
                "Contenders of one comparison take turns (A B A B, then B A), round by round, each in a process of its "
                "own on the same cores and with the same inputs. A number is the median over rounds; an interval "
                "holds 95 % and is made by bootstrap over rounds, since calls of one round are not independent. A "
                "ratio is taken within each round, so that what slows both cancels: times as fast, above 1 is faster. "
                "It is of what the scenario compares by, which is named where that is not the number shown."
            ),
            Text(
                "A backend is timed only when the output of the very calls that are timed agrees with a float64 "
                "reference of the model within the bound of its dtype. 1 - cosine is of a token's last hidden state, "
                "the mean over tokens, and below it is what the dtype may be off by; the largest difference is "
                "relative to the largest value of the reference. No sequence may be off by over three times the bound."
            ),
            Text(
                "Absolute times belong to this machine and this hour; ratios carry further. An empty percentile had "
                "too few calls to be known."
            ),
        ),
    )


def _machines(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows if (name := _machine(row))))


def _machine(row: Row) -> str:
    processor, cores = row.text("machine", "processor"), row.number("machine", "cores")
    count = f"{cores:g} core{'s' if cores != 1 else ''}" if cores is not None else ""
    return ", ".join(part for part in (processor, count) if part) or row.text("machine", "fingerprint")


def _hour(time: str) -> str:
    """``2026-01-02 03:04 UTC`` of an ISO time in UTC; any other text as it is."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d)(?::\d\d)?(?:\+00:00|Z)", time)
    return f"{found[1]} {found[2]} UTC" if found else _short(time, 40)


def _sizes(value: object) -> str:
    """A whole number, or several of them in a line."""
    found = value if isinstance(value, list) else [value]
    return ", ".join(numbers.plain(one) if isinstance(one, float) else _short(one, 20) for one in found)


def _fact(value: object) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def _short(value: object, letters: int = 200) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= letters else text[: letters - 1] + "…"
