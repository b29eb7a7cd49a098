"""How far the numbers can be trusted: fairness, noise, what could not run, and what was read of the files."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from encast.bench.report import numbers
from encast.bench.report.document import Block, Cell, Column, Section, Text, cut
from encast.bench.report.groups import describe
from encast.bench.report.load import Loaded, Row
from encast.bench.report.results import STATUS_WORDS

__all__ = ["broken_section", "cold_section", "failures_section", "trust_section"]

_MOST_REASON = 300


def failures_section(rows: Sequence[Row], most_lines: int) -> Section | None:
    """Backends that could not run, or whose numbers do not count, each with its reason."""
    parts: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if not row.measured:
            parts.setdefault((row.backend, row.status, row.reason), []).append(row)
    if not parts:
        return None
    lines = [
        [
            Cell(backend),
            Cell(STATUS_WORDS.get(status, status), kind="bad"),
            Cell(_places(members)),
            Cell(_shortened(reason) or "no reason was recorded"),
        ]
        for (backend, status, reason), members in parts.items()
    ]
    columns = [
        Column("backend", text=True),
        Column("status", text=True),
        Column("where", text=True, wide=True),
        Column("reason", text=True, wide=True),
    ]
    return Section("What could not run", (cut("Without a number, and why", columns, lines, most_lines),))


def trust_section(rows: Sequence[Row], most_lines: int) -> Section | None:
    """Threads and processor time against the budget, and how quiet the machine was, a line a backend."""
    judged = [row for row in rows if row.at("fairness") is not None or row.at("noise") is not None]
    if not judged:
        return None
    return Section("Fairness and noise", tuple(_judged(judged, most_lines)))


def _judged(rows: Sequence[Row], most_lines: int) -> Iterator[Block]:
    noisy = [row for row in rows if row.noisy]
    if noisy:
        reasons = list(dict.fromkeys(reason for row in noisy if (reason := row.text("noise", "why"))))
        said = f": {'; '.join(map(_shortened, reasons[:4]))}" if reasons else ""
        yield Text(
            f"During {len(noisy)} of {len(rows)} rows the machine was too noisy to trust them{said}.", warning=True
        )
    else:
        yield Text(f"During none of {len(rows)} rows was the machine too noisy.")
    lines = []
    for backend in dict.fromkeys(row.backend for row in rows):
        members = [row for row in rows if row.backend == backend]
        unfair = [row for row in members if row.at("fairness", "ok") is False or row.status == "unfair"]
        known = [row for row in members if isinstance(row.at("fairness", "ok"), bool)]
        notes = list(dict.fromkeys(note for row in members if (note := row.text("fairness", "notes"))))
        fair = Cell(f"{len(unfair)} of {len(members)} unfair", kind="bad") if unfair else Cell("yes" if known else "")
        lines.append(
            [
                Cell(backend),
                fair,
                _span(members, "fairness", "threads_budget"),
                _span(members, "fairness", "threads_ran"),
                _span(members, "fairness", "cpu_per_wall"),
                Cell(str(count), kind="bad") if (count := sum(row.noisy for row in members)) else Cell("0"),
                _span(members, "noise", "spread", percent=True),
                _span(members, "noise", "steal", percent=True),
                _span(members, "noise", "other_cpu", percent=True),
                Cell(_shortened("; ".join(notes))),
            ]
        )
    columns = [
        Column("backend", text=True),
        Column("fair", text=True),
        Column("threads allowed"),
        Column("threads that ran"),
        Column("CPU time / wall time"),
        Column("noisy rows"),
        Column("spread of rounds"),
        Column("steal"),
        Column("others' CPU"),
        Column("notes", text=True, wide=True),
    ]
    shown = len(columns) if any(line[-1].text for line in lines) else len(columns) - 1  # seldom is there a note
    lines = [line[:shown] for line in lines]
    yield cut("Least to most over the rows of each backend", columns[:shown], lines, most_lines)


def cold_section(rows: Sequence[Row], most_lines: int) -> Section | None:
    """Conversion, loading, first call and memory, a line a backend and model, medians and the peak over its rows."""
    parts: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.measured and (row.at("cold") is not None or row.at("memory") is not None):
            parts.setdefault((row.model, row.backend), []).append(row)
    if not parts:
        return None
    lines = []
    for (model, backend), members in parts.items():
        first = _median(members, "cold", "first_call_ms")
        lines.append(
            [
                Cell(backend),
                Cell(model),
                Cell(numbers.seconds(_median(members, "cold", "export_s"))),
                Cell(numbers.seconds(_median(members, "cold", "import_s"))),
                Cell(numbers.seconds(_median(members, "cold", "load_s"))),
                Cell(numbers.seconds(None if first is None else first / 1e3)),
                Cell(numbers.size(_most(members, "memory", "peak_rss_bytes"))),
                Cell(numbers.size(_median(members, "memory", "pss_bytes"))),
            ]
        )
    columns = [
        Column("backend", text=True),
        Column("model", text=True),
        Column("conversion, once"),
        Column("import"),
        Column("load and compile"),
        Column("first call"),
        Column("peak resident"),
        Column("proportional"),
    ]
    table = cut(
        "Before the first answer, and memory (medians over rows; peak: the most)", columns, lines, most_lines, heads=2
    )
    return Section("Cold start and memory", (table,))


def broken_section(loaded: Loaded, most_lines: int) -> Section | None:
    """Lines that are no rows. They are left out of everything above."""
    if not loaded.broken and not loaded.replaced:
        return None
    blocks: list[Block] = []
    if loaded.replaced:
        blocks.append(Text(f"{loaded.replaced} rows were measured again later in the same file; the later ones count."))
    if loaded.broken:
        blocks.append(Text("These lines are left out of everything else on this page.", warning=True))
        lines = [[Cell(one.file), Cell(str(one.line or "")), Cell(_shortened(one.reason))] for one in loaded.broken]
        columns = [Column("file", text=True), Column("line"), Column("what is wrong", text=True, wide=True)]
        blocks.append(cut(f"{len(loaded.broken)} broken lines", columns, lines, most_lines))
    return Section("Broken rows", tuple(blocks))


def _places(rows: Sequence[Row]) -> str:
    scenarios = ", ".join(dict.fromkeys(row.scenario for row in rows))
    points = list(dict.fromkeys(describe(row.point) for row in rows if row.point))
    more = f" and {len(points) - 2} more" if len(points) > 2 else ""
    return f"{scenarios}: {'; '.join(points[:2])}{more}" if points else scenarios


def _span(rows: Sequence[Row], *path: str, percent: bool = False) -> Cell:
    found = [value for row in rows if (value := row.number(*path)) is not None]
    if not found:
        return Cell(numbers.NOTHING)

    def text(value: float) -> str:
        return f"{value:.1%}" if percent else numbers.plain(round(value, 2))

    low, high = text(min(found)), text(max(found))
    return Cell(low if low == high else f"{low} to {high}")


def _median(rows: Sequence[Row], *path: str) -> float | None:
    found = [value for row in rows if (value := row.number(*path)) is not None and value >= 0]
    return statistics.median(found) if found else None


def _most(rows: Sequence[Row], *path: str) -> float | None:
    return max((value for row in rows if (value := row.number(*path)) is not None and value >= 0), default=None)


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_REASON else text[: _MOST_REASON - 1] + "…"
