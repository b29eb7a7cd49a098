"""Plots as SVG that a page holds in its text: colours by CSS, so that they follow day and night, and no library.

A figure is one or more panels with the same axes, each 420 x 300 units: three beside each other on a wide page, one
below the other on a phone, where its letters are still about nine pixels high.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from encast.bench.report.axis import Axis, thinned
from encast.web_page import escaped

__all__ = ["SHAPES", "STYLE", "Guide", "Mark", "Panel", "Series", "dots", "panel", "shape_of"]

_WIDTH, _HEIGHT = 420, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 126, 26, 44
_LETTER = 6.4
"""The width that a letter of 12 units takes on average, a little generous."""
_TAIL = 5
"""The end of a name that is too long stays: a dtype is there."""
_RADIUS = 3.6
_NAME = 15
"""The longest name beside a line, in letters."""

LIGHT = (
    "#c2410c", "#0a66b5", "#0b7a53", "#a23b86", "#0b7285", "#8a5a00", "#6b4fbb", "#5c6670", "#8c4a2f", "#4d7300",
)  # fmt: skip
DARK = (
    "#ff8a5c", "#5eb0ef", "#35c79b", "#e48ac8", "#4cc9d8", "#e6a93c", "#ada0ff", "#9fa9b4", "#d6a083", "#a8d14f",
)  # fmt: skip
"""Told apart by night and by day, each at 4.5:1 or better against the paper, since names are written in them. The first
is encast's alone; the others come again, with dashes, for lines beyond the tenth."""

STYLE = (
    ":root { " + " ".join(f"--s{index}: {colour};" for index, colour in enumerate(LIGHT)) + " }\n"
    "@media (prefers-color-scheme: dark) { :root { "
    + " ".join(f"--s{index}: {colour};" for index, colour in enumerate(DARK))
    + " } }\n"
    + "\n".join(f".s{index} {{ color: var(--s{index}); }}" for index in range(len(LIGHT)))
    + """
svg.plot { display: block; width: 100%; height: auto; }
svg.plot g[data-s] text { fill: currentColor; font-weight: 600; font-size: 11px; }
svg.plot g[data-s] > :not(text) { stroke: currentColor; stroke-width: 1.8; fill: currentColor; }
svg.plot g[data-s] > .line { fill: none; }
svg.plot g[data-s] > .dashed { fill: none; stroke-dasharray: 7 3; }
svg.plot g[data-s] > .ideal { fill: none; stroke-width: 1.1; stroke-dasharray: 2 3; }
svg.plot g[data-s] > .open { fill: var(--paper); }
svg.plot .guide { fill: none; stroke: var(--soft); stroke-dasharray: 6 4; }
svg.plot .front { fill: none; stroke: var(--ink); stroke-width: 1.2; stroke-opacity: .55; }
svg.plot .band { fill: var(--soft); fill-opacity: .14; }
svg.plot .title { font-weight: 600; }
figure.dim g[data-s]:not(.on) { opacity: .18; }
"""
)

SHAPES = {"f32": "circle", "bf16": "square", "int8": "triangle"}
"""The mark of a dtype; any other has the diamond."""


def shape_of(dtype: str) -> str:
    return SHAPES.get(dtype, "diamond")


@dataclass(frozen=True)
class Mark:
    """A measured value. ``low`` and ``high``: its interval along y. ``note``: what a pointer resting on it reads, where
    no table has it."""

    x: float
    y: float
    note: str = ""
    low: float | None = None
    high: float | None = None
    shape: str = "circle"
    filled: bool = True


@dataclass(frozen=True)
class Series:
    """Marks of one colour. ``name`` is written at the last one. ``ideal``: x and y of the line without losses."""

    name: str
    style: int
    marks: tuple[Mark, ...]
    line: bool = True
    ideal: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Guide:
    """A line that is no measurement: the Pareto front, a bound. ``text`` is written at its right end."""

    points: tuple[tuple[float, float], ...]
    kind: str = "guide"
    text: str = ""


@dataclass(frozen=True)
class Panel:
    title: str
    series: tuple[Series, ...]
    guides: tuple[Guide, ...] = ()


def panel(shown: Panel, x: Axis, y: Axis, alt: str) -> str:
    """One panel; ``alt`` says in a sentence what it shows."""
    return "\n".join(_panel(shown, x, y, alt))


def dots(
    rows: Sequence[tuple[str, Series]], x: Axis, alt: str, title: str, band: tuple[float, float] | None = None
) -> str:
    """Lines of names with a mark each along x, and its interval; ``band``: a range of x that is shaded."""
    return "\n".join(_dots(rows, x, alt, title, band))


def _panel(shown: Panel, x: Axis, y: Axis, alt: str) -> Iterator[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    named = any(series.name for series in shown.series) or any(guide.text for guide in shown.guides)
    right = right if named else _WIDTH - 16

    def left_of(value: float) -> float:
        return _LEFT + x.at(value) * (right - _LEFT)

    def top_of(value: float) -> float:
        return bottom - y.at(value) * (bottom - _TOP)

    def path(points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{_n(left_of(a))},{_n(top_of(b))}" for a, b in points)

    yield _open(_HEIGHT, alt)
    yield f'<text class="title" x="{_LEFT}" y="14">{escaped(_cut(shown.title, 48))}</text>'
    columns = thinned(x, right - _LEFT, _LETTER)
    grid = [f"M{_LEFT} {_n(top_of(value))}H{_n(right)}" for value, _ in y.ticks]
    grid += [f"M{_n(left_of(value))} {bottom}v4" for value, _ in columns]
    yield f'<path class="grid" d="{"".join(grid)}"/>'
    yield '<g text-anchor="end">'
    for value, text in y.ticks:
        yield f'<text class="soft" x="{_LEFT - 6}" y="{_n(top_of(value) + 4)}">{escaped(text)}</text>'
    yield '</g><g text-anchor="middle">'
    for value, text in columns:
        yield f'<text class="soft" x="{_n(left_of(value))}" y="{bottom + 17}">{escaped(text)}</text>'
    yield f'<text class="soft" x="{_n((_LEFT + right) / 2)}" y="{_HEIGHT - 8}">{escaped(x.title)}</text>'
    turned = f'transform="translate(12,{_n((_TOP + bottom) / 2)}) rotate(-90)"'
    yield f'<text class="soft" {turned}>{escaped(y.title)}</text></g>'
    labels = [(top_of(guide.points[-1][1]), guide.text) for guide in shown.guides if guide.text]
    for guide in shown.guides:
        yield f'<polyline class="{guide.kind}" points="{path(guide.points)}"/>'
    ends = [top_of(series.marks[-1].y) for series in shown.series]
    wanted = [*(at for at, _ in labels), *(at for at, one in zip(ends, shown.series, strict=True) if one.name)]
    places = _spread(wanted, _TOP, bottom)
    for (_, text), place in zip(labels, places[: len(labels)], strict=True):
        yield f'<text class="soft" x="{right + 9}" y="{_n(place + 4)}">{escaped(_cut(text, _NAME))}</text>'
    free = iter(places[len(labels) :])
    for series in shown.series:
        yield f'<g class="s{_colour(series.style)}" data-s="{escaped(series.name or str(series.style))}">'
        if series.name:
            yield f"<title>{escaped(series.name)}</title>"
        if series.ideal:
            yield f'<polyline class="ideal" points="{path(series.ideal)}"/>'
        if series.line and len(series.marks) > 1:
            kind = "dashed" if series.style >= len(LIGHT) else "line"
            yield f'<polyline class="{kind}" points="{path([(mark.x, mark.y) for mark in series.marks])}"/>'
        bars = [
            f"M{_n(left_of(mark.x))} {_n(top_of(mark.low))}V{_n(top_of(mark.high))}"
            for mark in series.marks
            # An interval that its own mark covers would not be seen.
            if mark.low is not None
            and mark.high is not None
            and max(top_of(mark.low) - top_of(mark.y), top_of(mark.y) - top_of(mark.high)) > _RADIUS
        ]
        if bars:
            yield f'<path d="{"".join(bars)}"/>'
        yield from (_shape(mark, left_of(mark.x), top_of(mark.y)) for mark in series.marks)
        if series.name:
            yield f'<text x="{right + 9}" y="{_n(next(free) + 4)}">{escaped(_cut(series.name, _NAME, _TAIL))}</text>'
        yield "</g>"
    yield "</svg>"


_DOT_LEFT, _DOT_LINE, _DOT_NAME = 168, 22, 22


def _dots(
    rows: Sequence[tuple[str, Series]], x: Axis, alt: str, title: str, band: tuple[float, float] | None
) -> Iterator[str]:
    right, bottom = _WIDTH - 20, _TOP + _DOT_LINE * len(rows) + 4

    def left_of(value: float) -> float:
        return _DOT_LEFT + x.at(value) * (right - _DOT_LEFT)

    yield _open(bottom + 40, alt)
    yield f'<text class="title" x="4" y="14">{escaped(_cut(title, 56))}</text>'
    if band is not None:
        begin, end = left_of(band[0]), left_of(band[1])
        yield (f'<rect class="band" x="{begin:.1f}" y="{_TOP}" width="{end - begin:.1f}" height="{bottom - _TOP}"/>')
    columns = thinned(x, right - _DOT_LEFT, _LETTER)
    grid = "".join(f"M{_n(left_of(value))} {_TOP}V{bottom}" for value, _ in columns)
    yield f'<path class="grid" d="{grid}"/><g text-anchor="middle">'
    for value, text in columns:
        yield f'<text class="soft" x="{_n(left_of(value))}" y="{bottom + 16}">{escaped(text)}</text>'
    yield f'<text class="soft" x="{_n((_DOT_LEFT + right) / 2)}" y="{bottom + 34}">{escaped(x.title)}</text></g>'
    for number, (name, series) in enumerate(rows):
        at = _TOP + _DOT_LINE * number + 14
        yield f'<g class="s{_colour(series.style)}" data-s="{escaped(series.name)}">'
        shown = escaped(_cut(name, _DOT_NAME, _TAIL))
        yield f'<text x="{_DOT_LEFT - 10}" y="{at + 4}" text-anchor="end">{shown}</text>'
        for mark in series.marks:
            if mark.low is not None and mark.high is not None:
                yield f'<path d="M{_n(left_of(mark.low))} {at}H{_n(left_of(mark.high))}"/>'
            yield _shape(mark, left_of(mark.x), at)
        yield "</g>"
    yield "</svg>"


def _open(height: float, alt: str) -> str:
    text = escaped(alt)
    return f'<svg class="plot" viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{text}">'


def _shape(mark: Mark, x: float, y: float) -> str:
    kind = "" if mark.filled else ' class="open"'
    title = f"<title>{escaped(mark.note)}</title>" if mark.note else ""
    if mark.shape == "circle":
        return f'<circle{kind} cx="{_n(x)}" cy="{_n(y)}" r="{_RADIUS}"' + (f">{title}</circle>" if title else "/>")
    corners = {"square": "-3.2-3.2h6.4v6.4h-6.4z", "triangle": "-4.2 3.2h8.4l-4.2-7.4z"}
    way = corners.get(mark.shape, "0-4.8l4.8 4.8-4.8 4.8-4.8-4.8z")
    return f'<path{kind} d="M{_n(x)} {_n(y)}m{way}"' + (f">{title}</path>" if title else "/>")


def _colour(style: int) -> int:
    """Beyond the last colour they come again, but for the first."""
    return style if style < len(LIGHT) else 1 + (style - len(LIGHT)) % (len(LIGHT) - 1)


def _n(value: float) -> str:
    """A coordinate to a tenth of a unit, in as few letters as it needs."""
    return f"{value:.1f}".removesuffix(".0")


def _spread(wanted: Sequence[float], top: float, bottom: float, pitch: float = 13.0) -> list[float]:
    """Places for labels near where they are wanted, ``pitch`` apart if there is room for that, in the same order."""
    if not wanted:
        return []
    pitch = min(pitch, (bottom - top) / max(1, len(wanted) - 1))
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    places = [0.0] * len(wanted)
    # Runs of labels that touch move apart about their common middle.
    runs: list[tuple[list[int], float]] = []
    for index in order:
        runs.append(([index], wanted[index]))
        while len(runs) > 1:
            (before, middle), (after, other) = runs[-2], runs[-1]
            if other - middle >= pitch * (len(before) + len(after)) / 2:
                break
            both = before + after
            centre = (middle * len(before) + other * len(after)) / len(both)
            half = pitch * (len(both) - 1) / 2
            runs[-2:] = [(both, min(max(centre, top + half), bottom - half))]
    for members, middle in runs:
        for position, index in enumerate(members):
            places[index] = middle + pitch * (position - (len(members) - 1) / 2)
    return places


def _cut(text: str, letters: int, tail: int = 0) -> str:
    """The text in so many letters; ``tail`` of its end stay."""
    if len(text) <= letters:
        return text
    return f"{text[: letters - tail - 1]}…{text[len(text) - tail :]}"
