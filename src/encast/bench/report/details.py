"""Behind the numbers: what could not run, how fair and quiet it was, cold starts, backends, machine and files."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from encast.bench.config import available
from encast.bench.report.groups import describe
from encast.bench.report.load import Loaded, Row
from encast.bench.report.overview import machine_of
from encast.bench.report.results import STATUS_WORDS
from encast.bench.rows import flatten
from encast.pages import numbers
from encast.pages.document import Block, Cell, Column, Listing, Section, Text, prose, table, text

__all__ = ["detail_sections"]

_MOST_REASON = 300
_MOST_FACTS = 600
_MOST_SETTINGS = 8
_MOST_MACHINES = 8
_MACHINE_LINES = 60


def detail_sections(loaded: Loaded, most_lines: int) -> list[Section]:
    """What there is no data for has no section."""
    rows = loaded.rows
    parts: tuple[tuple[str, Iterable[Block]], ...] = (
        ("What could not run", _failures(rows, most_lines)),
        ("Fairness and noise", _fairness(rows, most_lines)),
        ("Cold start and memory", _cold(rows, most_lines)),
        ("Backends", _backends(rows, most_lines)),
        ("Machine and settings", _machine(loaded)),
        ("Broken rows", _broken(loaded, most_lines)),
    )
    found = [(title, tuple(blocks)) for title, blocks in parts]
    return [Section(title, blocks) for title, blocks in found if blocks]


def _failures(rows: Sequence[Row], most_lines: int) -> Iterator[Block]:
    """Backends that could not run, or whose numbers do not count, each with its reason."""
    parts = _grouped((row for row in rows if not row.measured), lambda row: (row.backend, row.status, row.reason))
    lines = [
        [
            backend,
            Cell(STATUS_WORDS.get(status, status), kind="bad"),
            _places(members),
            numbers.cut(reason, _MOST_REASON) or "no reason was recorded",
        ]
        for (backend, status, reason), members in parts.items()
    ]
    if lines:
        columns = [text("backend"), text("status"), prose("where"), prose("reason")]
        yield table("Without a number, and why", columns, lines, most_lines)


def _fairness(rows: Sequence[Row], most_lines: int) -> Iterator[Block]:
    """Threads and processor time against the budget, and how quiet the machine was, a line a backend."""
    judged = [row for row in rows if row.at("fairness") is not None or row.at("noise") is not None]
    if not judged:
        return
    noisy = [row for row in judged if row.noisy]
    reasons = list(dict.fromkeys(reason for row in noisy if (reason := row.text("noise", "why"))))
    why = f": {'; '.join(numbers.cut(reason, _MOST_REASON) for reason in reasons[:4])}" if reasons else ""
    if noisy:
        said = f"During {len(noisy)} of {len(judged)} rows the machine was noisy{why}."
    else:
        said = f"During none of {len(judged)} rows was the machine noisy."
    yield Text(said, warning=bool(noisy))
    lines = []
    for backend, members in _grouped(judged, lambda row: row.backend).items():
        unfair = sum(row.at("fairness", "ok") is False or row.status == "unfair" for row in members)
        known = any(isinstance(row.at("fairness", "ok"), bool) for row in members)
        notes = "; ".join(dict.fromkeys(note for row in members if (note := row.text("fairness", "notes"))))
        count = sum(row.noisy for row in members)
        lines.append(
            [
                backend,
                Cell(f"{unfair} of {len(members)} unfair", kind="bad") if unfair else "yes" if known else "",
                *(_span(members, "fairness", name) for name in ("threads_budget", "threads_ran", "cpu_per_wall")),
                Cell(str(count), kind="bad" if count else ""),
                *(_span(members, "noise", name, percent=True) for name in ("spread", "steal", "other_cpu")),
                numbers.cut(notes, _MOST_REASON),
            ]
        )
    columns: list[Column | str] = [text("backend"), text("fair"), "threads allowed", "threads that ran"]
    columns += ["CPU time / wall time", "noisy rows", "spread of rounds", "steal", "others' CPU", prose("notes")]
    shown = len(columns) if any(line[-1] for line in lines) else len(columns) - 1  # seldom is there a note
    caption = "Least to most over the rows of each backend"
    yield table(caption, columns[:shown], [line[:shown] for line in lines], most_lines)


def _cold(rows: Sequence[Row], most_lines: int) -> Iterator[Block]:
    """Conversion, loading, first call and memory, a line a backend and model, medians and the peak over its rows."""
    known = (row for row in rows if row.measured and (row.at("cold") is not None or row.at("memory") is not None))
    lines = []
    for (model, backend), members in _grouped(known, lambda row: (row.model, row.backend)).items():
        times = [_median(members, "cold", name) for name in ("export_s", "import_s", "load_s")]
        first = _median(members, "cold", "first_call_ms")
        times.append(None if first is None else first / 1e3)
        peak = max(_known(members, "memory", "peak_rss_bytes"), default=None)
        sizes = (peak, _median(members, "memory", "pss_bytes"))
        lines.append([backend, model, *map(numbers.seconds, times), *map(numbers.size, sizes)])
    if lines:
        columns = [text("backend"), text("model"), "conversion, once", "import", "load and compile", "first call"]
        caption = "Before the first answer, and memory (medians over rows; peak: the most)"
        yield table(caption, [*columns, "peak resident", "proportional"], lines, most_lines, heads=2)


def _backends(rows: Sequence[Row], most_lines: int) -> Iterator[Block]:
    """What each backend is, its version, and how it was made to run: its own facts."""
    known = available("backend")
    lines = []
    for backend, members in _grouped(rows, lambda row: row.backend).items():
        row = next((row for row in members if row.measured), members[0])
        facts = row.at("backend", "facts")
        flat = flatten(facts) if isinstance(facts, Mapping) else {}
        said = "; ".join(
            f"{name}: {('no', 'yes')[value] if isinstance(value, bool) else value}"
            for name, value in flat.items()
            if name != "version" and value not in (None, "", "[]")
        )
        version = row.text("backend", "version") or numbers.NOTHING
        conversion = numbers.seconds(row.number("cold", "export_s"))
        lines.append([backend, known.get(row.name, ""), version, conversion, numbers.cut(said, _MOST_FACTS)])
    if lines:
        columns = [text("backend"), prose("what it is"), text("version"), "conversion"]
        yield table(
            "What was compared", [*columns, prose("how it was converted, settings in force")], lines, most_lines
        )


def _machine(loaded: Loaded) -> Iterator[Block]:
    """All that the rows say about the machine, and the configuration of every experiment."""
    described = [row for row in loaded.rows if isinstance(row.at("machine"), Mapping) and row.at("machine")]
    machines = _grouped(described, machine_of)
    for number, (name, members) in enumerate(list(machines.items())[:_MOST_MACHINES], 1):
        facts = [[str(field), numbers.cut(value)] for field, value in flatten(members[0].at("machine")).items()]
        caption = f"Machine {number}: {name}" if len(machines) > 1 else "Machine"
        yield table(caption, [text("fact"), prose("value")], facts, _MACHINE_LINES)
    if (over := len(machines) - _MOST_MACHINES) > 0:
        yield Text(f"And {over:,} more machine{'s' if over > 1 else ''}.")
    models = _grouped((row for row in loaded.rows if row.model), lambda row: (row.model, row.text("model", "sha")))
    if models:
        lines = [
            [name, members[0].text("model", "layers"), members[0].text("model", "hidden"), numbers.cut(sha, 16)]
            for (name, sha), members in models.items()
        ]
        yield table("Models", [text("model"), "layers", "hidden", text("files' hash")], lines, _MACHINE_LINES)
    sized = (row for row in loaded.rows if row.workload and row.at("workload", "sequences") is not None)
    workloads = _grouped(sized, lambda row: row.workload)
    if workloads:
        fields = ("sequences", "tokens", "lengths")
        lines = [
            [name, *(_sizes(members[0].at("workload", field)) for field in fields)]
            for name, members in workloads.items()
        ]
        columns = [text("workload"), "sequences", "tokens", "least, median, most"]
        yield table("Workloads (of the first row of each)", columns, lines, _MACHINE_LINES)
    settings = list(loaded.settings.items())
    yield from (Listing(f"Settings: {name}", said) for name, said in settings[:_MOST_SETTINGS])
    if len(settings) > _MOST_SETTINGS:
        others = [name for name, _ in settings[_MOST_SETTINGS:][:_MACHINE_LINES]]
        yield Text(f"Settings also: {', '.join(others)}.")


def _broken(loaded: Loaded, most_lines: int) -> Iterator[Block]:
    """Lines that are no rows. They are left out of everything above."""
    if loaded.replaced:
        yield Text(f"{loaded.replaced} rows were measured again later in the same file; the later ones count.")
    if loaded.broken:
        yield Text("These lines are left out of everything else on this page.", warning=True)
        lines = [[one.file, str(one.line or ""), numbers.cut(one.reason, _MOST_REASON)] for one in loaded.broken]
        columns = [text("file"), "line", prose("what is wrong")]
        yield table(f"{len(loaded.broken)} broken lines", columns, lines, most_lines)


def _grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def _places(rows: Sequence[Row]) -> str:
    scenarios = ", ".join(dict.fromkeys(row.scenario for row in rows))
    points = list(dict.fromkeys(describe(row.point) for row in rows if row.point))
    more = f" and {len(points) - 2} more" if len(points) > 2 else ""
    return f"{scenarios}: {'; '.join(points[:2])}{more}" if points else scenarios


def _span(rows: Sequence[Row], *path: str, percent: bool = False) -> str:
    found = [value for row in rows if (value := row.number(*path)) is not None]
    ends = (min(found), max(found)) if found else ()
    shown = (f"{value:.1%}" if percent else numbers.plain(round(value, 2)) for value in ends)
    return " to ".join(dict.fromkeys(shown)) or numbers.NOTHING


def _known(rows: Sequence[Row], *path: str) -> list[float]:
    return [value for row in rows if (value := row.number(*path)) is not None and value >= 0]


def _median(rows: Sequence[Row], *path: str) -> float | None:
    found = _known(rows, *path)
    return statistics.median(found) if found else None


def _sizes(value: object) -> str:
    """A whole number, or several of them in a line."""
    found = value if isinstance(value, list) else [value]
    return ", ".join(numbers.plain(one) if isinstance(one, float) else numbers.cut(one, 20) for one in found)
