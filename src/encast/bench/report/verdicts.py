"""A comparison of two experiments as a section: what changed, by backend and by row."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from encast.bench.report import numbers
from encast.bench.report.axis import logarithmic
from encast.bench.report.chart import Mark, Series, dots, shape_of
from encast.bench.report.compare import Comparison, Verdict
from encast.bench.report.document import Block, Cell, Column, Figure, Section, Table, Text, cut
from encast.bench.report.groups import describe

__all__ = ["comparison_section"]

_KINDS = {"slower": "bad", "now fails": "bad", "faster": "good", "now works": "good"}
_COUNTED = ("slower", "faster", "within noise", "noisy")
_WORDS = {"noisy": "noisy: no verdict"}
_MOST_BACKENDS = 24
_MOST_MARKS = 24
"""Of one backend; the furthest on both sides and some between."""
_MOST_WITH_BARS = 3
"""Intervals of more rows of one backend would cover each other."""


def comparison_section(comparison: Comparison, colours: Mapping[str, int], most_lines: int) -> Section:
    blocks = tuple(_blocks(comparison, colours, most_lines))
    return Section(f"{comparison.new} against {comparison.old}", blocks)


def _blocks(comparison: Comparison, colours: Mapping[str, int], most_lines: int) -> Iterator[Block]:
    counts = comparison.counts()
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "No row in either"
    yield Text(
        f"{said}. A row is faster or slower when the 95 % interval of its ratio (times as fast as before) does not "
        f"hold 1 and the ratio differs by more than {comparison.margin:.0%}. A row during which the machine was noisy, "
        "in either run, has no verdict: measure it again."
    )
    for warning in comparison.warnings:
        yield Text(warning, warning=True)
    if comparison.drift is not None:
        yield Text(
            f"Backends of the same version on both sides are {numbers.ratio(comparison.drift)} as fast as before "
            "(geometric mean), which is the machine's doing."
        )
    backends: dict[str, list[Verdict]] = {}
    for one in comparison.verdicts:
        backends.setdefault(one.row.backend, []).append(one)
    backends = {name: backends[name] for name in sorted(backends, key=lambda name: _mean(backends[name]) or 1.0)}
    drawn = {name: members for name, members in backends.items() if any(one.ratio is not None for one in members)}
    if drawn:
        yield _strips(drawn, comparison.margin, colours)
    yield _by_backend(backends, most_lines)
    yield _by_row(comparison.verdicts, most_lines)


def _mean(verdicts: Sequence[Verdict]) -> float | None:
    """Of what has a verdict."""
    ratios = [one.ratio for one in verdicts if one.ratio is not None and one.verdict != "noisy"]
    return statistics.geometric_mean(ratios) if ratios else None


def _strips(backends: Mapping[str, Sequence[Verdict]], margin: float, colours: Mapping[str, int]) -> Figure:
    """A line a backend, a mark a row: filled when it counts as a difference."""
    names = list(backends)
    if len(names) > _MOST_BACKENDS:
        names = names[: _MOST_BACKENDS // 2] + names[-_MOST_BACKENDS // 2 :]
    lines = []
    values = [1 / (1 + 2 * margin), 1 + 2 * margin]
    for name in names:
        series = _strip(backends[name], colours)
        values += [value for mark in series.marks for value in (mark.x, mark.low, mark.high) if value is not None]
        lines.append((name, series))
    x = logarithmic("times as fast as before", values, margin=1.02, least=1.1)
    alt = (
        f"Ratio of new to old speed for the rows of {len(lines)} backends; left of the grey band is slower, right of "
        "it faster; the tables below have the numbers"
    )
    plot = dots(lines, x, alt, "slower < 1 < faster", (1 / (1 + margin), 1 + margin))
    left = f" Drawn: {len(names)} of {len(backends)} backends." if len(names) < len(backends) else ""
    return Figure(
        "How many times as fast as before: a mark a row (at most 24 of a backend), hollow when within noise or noisy; "
        f"the band is the difference that does not count.{left}",
        (plot,),
    )


def _strip(verdicts: Sequence[Verdict], colours: Mapping[str, int]) -> Series:
    known = sorted((one for one in verdicts if one.ratio is not None), key=lambda one: one.ratio or 1.0)
    if len(known) > _MOST_MARKS:
        known = [known[round(index * (len(known) - 1) / (_MOST_MARKS - 1))] for index in range(_MOST_MARKS)]
    marks = []
    for one in known:
        low, high = (one.interval or (None, None)) if len(known) <= _MOST_WITH_BARS else (None, None)
        note = (
            f"{one.row.scenario}, {describe(one.row.point)}: {numbers.ratio(one.ratio)} "
            f"{numbers.ratio_interval(one.interval, one.ratio)}, {one.verdict}"
        )
        counts = one.verdict in ("faster", "slower")
        marks.append(
            Mark(one.ratio or 1.0, 0.0, note if counts else "", low, high, shape_of(one.row.dtype), filled=counts)
        )
    row = verdicts[0].row
    return Series(row.backend, colours.get(row.family, 0), tuple(marks), line=False)


def _by_backend(backends: Mapping[str, Sequence[Verdict]], most_lines: int) -> Table:
    lines = []
    for name, members in backends.items():
        count = {word: sum(one.verdict == word for one in members) for word in _COUNTED}
        ratios = [one.ratio for one in members if one.ratio is not None]
        spread = f"{numbers.ratio(min(ratios))} to {numbers.ratio(max(ratios))}" if len(ratios) > 1 else ""
        lines.append(
            [
                Cell(name),
                Cell(numbers.ratio(_mean(members)), spread),
                *(Cell(str(number), kind=_KINDS.get(word, "") if number else "") for word, number in count.items()),
                Cell(str(len(members) - sum(count.values()))),
            ]
        )
    columns = [
        Column("backend", text=True),
        Column("times as fast, geometric mean"),
        *(Column(_WORDS.get(word, word)) for word in _COUNTED),
        Column("others"),
    ]
    return cut("Verdicts by backend", columns, lines, most_lines)


def _by_row(verdicts: Sequence[Verdict], most_lines: int) -> Table:
    lines = [
        [
            Cell(_WORDS.get(one.verdict, one.verdict), kind=_KINDS.get(one.verdict, "")),
            Cell(one.row.backend + (" ~" if one.row.noisy else "")),
            Cell(one.row.scenario),
            Cell(one.row.model),
            Cell(describe(one.row.point)),
            Cell(numbers.ratio(one.ratio), numbers.ratio_interval(one.interval, one.ratio)),
            Cell(one.why),
        ]
        for one in verdicts
    ]
    columns = [
        Column("verdict", text=True),
        Column("backend", text=True),
        Column("scenario", text=True),
        Column("model", text=True),
        Column("point", text=True),
        Column("times as fast"),
        Column("remark", text=True, wide=True),
    ]
    return cut("Verdict by row", columns, lines, most_lines, heads=2)
