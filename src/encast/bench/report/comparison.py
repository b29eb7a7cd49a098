"""A comparison of two experiments as a section: what changed, by backend and by row."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from encast.bench.report.compare import Change, Comparison
from encast.bench.report.groups import describe, mark
from encast.pages import numbers
from encast.pages.charts import Axis, Chart, Series
from encast.pages.document import Block, Cell, Column, Figure, Section, Text, prose, table, text

__all__ = ["comparison_section"]

_KINDS = {"slower": "bad", "now fails": "bad", "faster": "good", "now works": "good"}
_COUNTED = ("slower", "faster", "within noise", "noisy")
_WORDS = {"noisy": "noisy: no conclusion"}
_MOST_BACKENDS = 24
_MOST_MARKS = 24
"""Of one backend; the furthest on both sides and some between."""
_MOST_WITH_BARS = 3
"""Intervals of more rows of one backend would cover each other."""


def comparison_section(comparison: Comparison, colour: Mapping[str, int], most_lines: int) -> Section:
    return Section(f"{comparison.new} against {comparison.old}", tuple(_blocks(comparison, colour, most_lines)))


def _blocks(comparison: Comparison, colour: Mapping[str, int], most_lines: int) -> Iterator[Block]:
    said = ", ".join(f"{count} {name}" for name, count in comparison.counts().items() if count) or "No row in either"
    yield Text(
        f"{said}. A row is faster or slower when the 95 % interval of its ratio (times as fast as before) does not "
        f"hold 1 and the ratio differs by more than {comparison.margin:.0%}. A row during which the machine was noisy, "
        "in either run, has no conclusion: measure it again."
    )
    yield from (Text(warning, warning=True) for warning in comparison.warnings)
    if comparison.drift is not None:
        yield Text(
            f"Backends of the same version on both sides are {numbers.ratio(comparison.drift)} as fast as before "
            "(geometric mean), which is the machine's doing."
        )
    found: dict[str, list[Change]] = {}
    for one in comparison.changes:
        found.setdefault(one.row.backend, []).append(one)
    backends = {name: found[name] for name in sorted(found, key=lambda name: _mean(found[name]) or 1.0)}
    drawn = {name: members for name, members in backends.items() if any(one.ratio is not None for one in members)}
    if drawn:
        yield _figure(drawn, comparison.margin, colour)
    lines = []
    for name, members in backends.items():
        count = {word: sum(one.conclusion == word for one in members) for word in _COUNTED}
        ratios = [one.ratio for one in members if one.ratio is not None]
        spread = f"{numbers.ratio(min(ratios))} to {numbers.ratio(max(ratios))}" if len(ratios) > 1 else ""
        counts = [Cell(str(number), kind=_KINDS.get(word, "") if number else "") for word, number in count.items()]
        others = str(len(members) - sum(count.values()))
        lines.append([name, Cell(numbers.ratio(_mean(members)), spread), *counts, others])
    columns: list[Column | str] = [text("backend"), "times as fast, geometric mean"]
    columns += [*(_WORDS.get(word, word) for word in _COUNTED), "others"]
    yield table("Conclusions by backend", columns, lines, most_lines)
    rows = [
        [
            Cell(_WORDS.get(one.conclusion, one.conclusion), kind=_KINDS.get(one.conclusion, "")),
            *(one.row.backend + one.row.flag, one.row.scenario, one.row.model, describe(one.row.point)),
            Cell(numbers.ratio(one.ratio), numbers.ratio_interval(one.interval, one.ratio)),
            one.why,
        ]
        for one in comparison.changes
    ]
    heads = map(text, ("conclusion", "backend", "scenario", "model", "point"))
    yield table("Conclusion by row", [*heads, "times as fast", prose("remark")], rows, most_lines, heads=2)


def _mean(changes: Sequence[Change]) -> float | None:
    """Of what has a conclusion."""
    ratios = [one.ratio for one in changes if one.ratio is not None and one.conclusion != "noisy"]
    return statistics.geometric_mean(ratios) if ratios else None


def _figure(backends: Mapping[str, Sequence[Change]], margin: float, colour: Mapping[str, int]) -> Figure:
    """A line a backend, a mark a row: filled when it counts as a difference."""
    names = list(backends)
    if len(names) > _MOST_BACKENDS:
        names = names[: _MOST_BACKENDS // 2] + names[-_MOST_BACKENDS // 2 :]
    series = []
    for name in names:
        known = sorted((one for one in backends[name] if one.ratio is not None), key=lambda one: one.ratio or 1.0)
        if len(known) > _MOST_MARKS:
            known = [known[round(index * (len(known) - 1) / (_MOST_MARKS - 1))] for index in range(_MOST_MARKS)]
        marks = []
        for one in known:
            note = (
                f"{one.row.scenario}, {describe(one.row.point)}: {numbers.ratio(one.ratio)} "
                f"{numbers.ratio_interval(one.interval, one.ratio)}, {one.conclusion}"
            )
            counts = one.conclusion in ("faster", "slower")
            interval = one.interval if len(known) <= _MOST_WITH_BARS else None
            marks.append(mark(one.row, one.ratio or 1.0, name, note, interval, filled=counts))
        series.append(Series(name, colour.get(known[0].row.family, 0), tuple(marks), line=False))
    alt = (
        f"Ratio of new to old speed for the rows of {len(names)} backends; left of the grey band is slower, right of "
        "it faster; the tables below have the numbers"
    )
    x = Axis("times as fast as before", least=1.1, holds=(1 / (1 + 2 * margin), 1 + 2 * margin))
    size = (420, 75 + 19 * len(names))
    band = (1 / (1 + margin), 1 + margin)
    title = "slower < 1 < faster"
    chart = Chart(title, alt, x, Axis("", "names"), tuple(series), band=band, legend=False, size=size)
    left = f" Drawn: {len(names)} of {len(backends)} backends." if len(names) < len(backends) else ""
    caption = (
        f"How many times as fast as before: a mark a row (at most {_MOST_MARKS} of a backend), hollow when within "
        f"noise or noisy; the band is the difference that does not count.{left}"
    )
    return Figure(caption, (chart,))
