"""A run as lines for a terminal, and as a page with the Pareto front."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from encast.compress.pipeline import Result
from encast.pages.charts import Axis, Chart, Guide, Mark, Series
from encast.pages.document import Cell, Document, Figure, Section, Table, Text, table, text, to_html
from encast.pages.numbers import NOTHING, amount, dollars, ratio, seconds, size

__all__ = ["lines", "to_page"]

_HEADS = ("model", "metric", "drop", "speed", "rows/s", "p99 of a row", "files", "memory", "$/M rows")


def lines(result: Result) -> Iterator[str]:
    """What was done and what came of it."""
    for name, record in result.stages.items():
        if "steps" in record:
            yield f"{name}: {_trained(record)}"
    front = _front(result)
    if front is not None:
        rows = [_HEADS, *map(_cells, front["front"])]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
        yield ""
        for row in rows:
            yield "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
        yield ""
        yield f"* no other is as good in all of {front['metric']}, speed, p99 and memory; taken: {front['chosen']}"
        if failed := front.get("failed"):
            yield (
                f"left out, since the answers to the dev rows are all equal or not finite: {', '.join(failed)} compiled"
            )
        if missed := front.get("missed"):
            yield (
                f"nothing narrower than f32 keeps the budget: the nearest, {missed['nearest']}, drops "
                f"{missed['drop']:.2%}, which is {missed['over']:.2%} over; give a wider budget, or train for longer"
            )
    yield f"{result.artifact or result.checkpoint}"


def _trained(record: Mapping[str, Any]) -> str:
    parts = [f"{record['steps']:,} steps, {seconds(record['seconds'])}"]
    if record["best"] is not None:
        parts.append(f"{record['metric']} {record['best']:.2f} at step {record['best_step']:,}")
    zeros = statistics.fmean(record["zeros"].values()) if record["zeros"] else 0.0
    if zeros > 0.005:
        parts.append(f"{zeros:.1%} zeros")
    return ", ".join(parts)


def _front(result: Result) -> Mapping[str, Any] | None:
    return next((record for record in result.stages.values() if "front" in record), None)


def _cells(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{entry['name']}{' *' if entry['best'] else ''}",
        f"{entry['metric']:.2f}",
        NOTHING if entry["drop"] is None else f"{entry['drop']:+.2%}",
        ratio(entry["speed"]),
        amount(entry["rows_per_second"]),
        seconds(entry["p99_ms"] / 1e3),
        size(entry["bytes"]),
        size(entry["peak_bytes"]),
        dollars(entry["usd_per_million"]),
    )


def to_page(result: Result) -> str:
    """One HTML file that loads nothing. Raises ``InputError`` without the extra ``plot``."""
    stages = table(
        "Stages that train",
        [text("stage"), "steps", "time", "metric", "zeros"],
        [
            [
                name,
                f"{record['steps']:,}",
                seconds(record["seconds"]),
                "" if record["best"] is None else f"{record['best']:.2f}",
                f"{statistics.fmean(record['zeros'].values()):.1%}" if record["zeros"] else "",
            ]
            for name, record in result.stages.items()
            if "steps" in record
        ],
    )
    front = _front(result)
    sections = [Section("Training", (stages,))]
    if front is not None:
        sections.insert(0, Section("What can be had", (Figure(_CAPTION, (_chart(front),)), _table(front))))
    return to_html(Document(f"{result.out.name}: compressed", (Text(_summary(result, front)),), tuple(sections)))


_CAPTION = (
    "Down and to the right is better. The line joins the models that no other equals in metric, speed, p99 and memory "
    "at once."
)


def _summary(result: Result, front: Mapping[str, Any] | None) -> str:
    if front is None:
        return f"{result.out.name}: {len(result.stages)} stages."
    chosen = next(entry for entry in front["front"] if entry["name"] == front["chosen"])
    return (
        f"{front['chosen']}: {front['metric']} {chosen['metric']:.2f}; the first model in f32 has "
        f"{front['front'][0]['metric']:.2f}; {ratio(chosen['speed'])} as fast, {size(chosen['bytes'])}."
    )


def _chart(front: Mapping[str, Any]) -> Chart:
    """Throughput against what is missing to 100 points: a metric near its end differs in that."""
    entries = front["front"]
    series = tuple(Series(entry["name"], number, (_mark(entry),), line=False) for number, entry in enumerate(entries))
    best = tuple(sorted((float(mark.x), float(mark.y)) for one in series for mark in one.marks if mark.filled))
    alt = "What each model lacks of 100 points over its throughput, with the Pareto front"
    guides = (Guide(best, "front"),) if len(best) > 1 else ()
    return Chart("", alt, Axis("rows a second"), Axis(f"100 - {front['metric']}"), series, guides, size=(900, 420))


def _mark(entry: Mapping[str, Any]) -> Mark:
    note = f"{entry['name']}: {entry['metric']:.2f}, {entry['rows_per_second']:,.0f} rows a second"
    return Mark(entry["rows_per_second"], max(100.0 - entry["metric"], 0.01), note, filled=entry["best"])


def _table(front: Mapping[str, Any]) -> Table:
    rows = [
        [Cell(cell, kind="best" if entry["best"] and not column else "") for column, cell in enumerate(_cells(entry))]
        for entry in front["front"]
    ]
    return table(f"All models of the run; metric: {front['metric']}", [text(_HEADS[0]), *_HEADS[1:]], rows)
