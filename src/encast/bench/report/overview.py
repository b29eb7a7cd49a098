"""What was measured, what is wrong with it, who was fastest, and what the numbers mean."""

from __future__ import annotations

import re
from collections.abc import Sequence

from encast.bench.report.groups import Group, ratio_to
from encast.bench.report.load import Loaded, Row
from encast.bench.report.results import missed_slos
from encast.pages import numbers
from encast.pages.document import Cell, Section, Text, table, text

__all__ = ["METHOD", "fastest_section", "machine_of", "summary"]

_MOST_NAMED = 20
"""Machines, backends or limits in a list that a page always holds."""

METHOD = Section(
    "How to read this",
    (
        Text(
            "Backends of one comparison take turns (A B C, then C B A), round by round, each in a process of its "
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


def summary(loaded: Loaded) -> tuple[Text, ...]:
    """The lines under the title: what there is, and above all what is wrong with it."""
    rows = loaded.rows
    measured = [row for row in rows if row.measured]
    failed = sorted({row.backend for row in rows} - {row.backend for row in measured})
    experiments, backends = {row.experiment for row in rows}, {row.backend for row in measured}
    times = sorted(_hour(time) for row in rows if (time := row.text("time")))
    span = " to ".join(dict.fromkeys((times[0], times[-1]))) if times else ""
    said = f"{_counted(len(rows), 'row')} of {_counted(len(experiments), 'experiment')}"
    lines = [Text(f"{said}, {_counted(len(backends), 'backend')} measured{', ' if span else ''}{span}.")]
    machines = list(dict.fromkeys(name for row in rows if (name := machine_of(row))))
    if machines:
        lines.append(Text(f"Machine{'s' * (len(machines) > 1)}: {'; '.join(_first(machines, 'machine'))}."))
    noisy, unfair = sum(row.noisy for row in measured), sum(row.status == "unfair" for row in rows)
    warnings = {
        f"Could not run at all: {', '.join(_first(failed, 'backend'))}.": failed,
        f"The machine was noisy during {noisy} of {len(measured)} measured rows (~).": noisy,
        f"{_counted(unfair, 'row')} broke the rules of fairness: no numbers of theirs stand here.": unfair,
        "These rows are of several machines, which must not be compared.": len(machines) > 1,
        f"{_counted(len(loaded.broken), 'line')} could not be read; see the end.": loaded.broken,
    }
    return (*lines, *(Text(said, warning=True) for said, found in warnings.items() if found))


def fastest_section(groups: Sequence[Group], most_lines: int) -> Section | None:
    """For every scenario, model and dtype the backend that is fastest at most points, and by how much."""
    lines = []
    for group in groups:
        for dtype in dict.fromkeys(row.dtype for row in group.measured):
            cells = _fastest(group, dtype)
            if cells:
                lines.append([group.experiment, group.scenario, group.model, dtype, *cells])
    missed = [
        f"{', '.join(filter(None, (group.scenario, group.model)))}: {said}"
        for group in groups
        for said in missed_slos(group)
    ]
    limits = [Text(said, warning=True) for said in _first(missed, "missed limit")]
    if not lines:
        return Section("At a glance", tuple(limits)) if limits else None
    heads = map(text, ("experiment", "scenario", "model", "dtype", "fastest"))
    columns = [*heads, "at points", "of them clearly", text("against the next")]
    note = (
        "Clearly: the next best was measured by turns with it, neither row was noisy, and the 95 % interval of their "
        "ratio lies above 1."
    )
    found = table("The fastest of each dtype", columns, lines, most_lines, heads=4)
    return Section("At a glance", (*limits, found, Text(note)))


def _fastest(group: Group, dtype: str) -> list[Cell]:
    """The cells of one dtype; none when fewer than two backends have it."""
    metric = group.metric
    wins: dict[str, list[tuple[float, bool, str]]] = {}
    by, points = "", 0
    for point in group.points:
        rows = [group.cells.get((point, backend)) for backend in group.backends]
        found = [row for row in rows if row is not None and row.measured and row.dtype == dtype]
        ranked = sorted((row for row in found if metric.of(row) is not None), key=metric.speed)
        if len(ranked) < 2:
            continue
        points += 1
        best, next_one = ranked[-1], ranked[-2]
        paired = None if metric.of_set_ups else ratio_to(best, next_one.name)
        ratio, bounds = paired or (metric.speed(best) / metric.speed(next_one), None)
        by = group.ratios_of if paired else by
        clear = bounds is not None and bounds[0] > 1 and not best.noisy and not next_one.noisy
        wins.setdefault(best.backend, []).append((ratio, clear, next_one.backend))
    if not wins:
        return []
    winner = max(wins, key=lambda backend: len(wins[backend]))
    ratios = sorted(ratio for ratio, _, _ in wins[winner])
    spread = " to ".join(dict.fromkeys(numbers.ratio(ratio) for ratio in (ratios[0], ratios[-1])))
    rivals = list(dict.fromkeys(rival for *_, rival in wins[winner]))
    return [
        Cell(winner, kind="best"),
        Cell(f"{len(wins[winner])} of {points}"),
        Cell(numbers.NOTHING if metric.of_set_ups else str(sum(clear for _, clear, _ in wins[winner]))),
        Cell(
            f"{spread} as fast as {', '.join(rivals[:3])}{' ...' if len(rivals) > 3 else ''}",
            f"by {by}; fastest by {metric.title}" if by else "",
        ),
    ]


def machine_of(row: Row) -> str:
    processor, cores = row.text("machine", "processor"), row.number("machine", "cores")
    count = f"{cores:g} core{'s' if cores != 1 else ''}" if cores is not None else ""
    return ", ".join(filter(None, (processor, count))) or row.text("machine", "fingerprint")


def _first(found: Sequence[str], noun: str) -> list[str]:
    """The first ``_MOST_NAMED``, and as the last one how many more there are."""
    over = len(found) - _MOST_NAMED
    return [*found[:_MOST_NAMED], f"and {_counted(over, f'more {noun}')}"] if over > 0 else list(found)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def _hour(time: str) -> str:
    """``2026-01-02 03:04 UTC`` of an ISO time in UTC; any other text as it is."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d)(?::\d\d)?(?:\+00:00|Z)", time)
    return f"{found[1]} {found[2]} UTC" if found else numbers.cut(time, 40)
