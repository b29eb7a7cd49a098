"""Charts as SVG: a description for Vega-Lite, rendered by vl-convert, coloured by the variables of the page's style."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from xml.etree import ElementTree

__all__ = ["DARK", "LIGHT", "SHAPES", "Axis", "Chart", "Guide", "Mark", "Series", "clean", "to_svg"]

LIGHT = (
    "#c2410c", "#0a66b5", "#0b7a53", "#a23b86", "#0b7285", "#8a5a00", "#6b4fbb", "#5c6670", "#8c4a2f", "#4d7300",
)  # fmt: skip
DARK = (
    "#ff8a5c", "#5eb0ef", "#35c79b", "#e48ac8", "#4cc9d8", "#e6a93c", "#ada0ff", "#9fa9b4", "#d6a083", "#a8d14f",
)  # fmt: skip
"""Of lines by day and by night, each at 4.5:1 or better against the paper. The first is encast's alone; the others come
again, with dashes, for lines beyond the tenth."""

_WIDTH = 420
"""Of a chart that is one of several: three beside each other on a wide page, one below the other on a phone, where its
letters are still over nine pixels high."""

SHAPES = {"f32": "circle", "bf16": "square", "int8": "triangle-up"}
"""The mark of a dtype; any other has the diamond."""


@dataclass(frozen=True)
class Mark:
    """A measured value. ``low`` and ``high``: its 95 % interval. ``note``: what a pointer resting on it reads. ``area``
    in square pixels."""

    x: float | str
    y: float | str
    note: str = ""
    low: float | None = None
    high: float | None = None
    shape: str = "circle"
    filled: bool = True
    area: float = 34


@dataclass(frozen=True)
class Series:
    """Marks of one colour, joined unless ``line`` is false. ``ideal``: x and y of the line without losses."""

    name: str
    colour: int
    marks: tuple[Mark, ...]
    line: bool = True
    ideal: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Guide:
    """A line that is no measurement: the Pareto front, a bound, a ceiling. ``text`` is written at its first point, or
    at its last one (``end``)."""

    points: tuple[tuple[float, float], ...]
    text: str = ""
    dashed: bool = True
    end: bool = False


@dataclass(frozen=True)
class Axis:
    """``kind``: "log"; "values", logarithmic with the values themselves as ticks (batches, lengths, cores); "linear",
    from 0; or "names". A logarithmic axis spans at least the factor ``least``, lest values that hardly differ seem to,
    and ``holds``: values of charts beside it."""

    title: str
    kind: str = "log"
    least: float = 1.5
    holds: tuple[float, ...] = ()


@dataclass(frozen=True)
class Chart:
    """``alt`` says in a sentence what is to be seen. ``band``: a range of x that is shaded. Intervals lie along y, or
    along x where y has names."""

    title: str
    alt: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    guides: tuple[Guide, ...] = ()
    band: tuple[float, float] | None = None
    legend: bool = True
    size: tuple[int, int] = (_WIDTH, 300)


_NO_CHAR = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def clean(text: str) -> str:
    """With U+FFFD for each character that XML 1.0 (production 2, Char) and so SVG cannot hold."""
    return _NO_CHAR.sub("\ufffd", text)


def _label(text: str) -> str:
    """Clean and at most 200 letters of it: Vega takes about a millisecond a letter to measure it. The middle goes,
    since names end in their dtype and notes in the number."""
    text = clean(text)
    return text if len(text) <= 200 else f"{text[:149]}…{text[-50:]}"


@lru_cache(512)  # it takes a tenth of a second, and a page that is made again holds mostly the same charts
def to_svg(chart: Chart) -> str:
    """An element for the text of a page, the same bytes for the same chart. It has no id, script, link or font."""
    import vl_convert

    root = ElementTree.fromstring(vl_convert.vegalite_to_svg(json.dumps(_spec(chart))))
    inner = "".join(ElementTree.tostring(one, encoding="unicode") for child in root for one in _slim(child))
    kind = "plot large" if chart.size[0] > _WIDTH else "plot"
    frame = {"class": kind, "viewBox": root.attrib["viewBox"], "role": "img", "aria-label": clean(chart.alt)}
    made = ElementTree.Element("svg", frame)
    made.text = "\0"
    return ElementTree.tostring(made, encoding="unicode").replace("\0", inner)


def _spec(chart: Chart) -> dict[str, Any]:
    along = "x" if chart.y.kind == "names" else "y"
    names = [_label(series.name) for series in chart.series]
    marks = [
        {
            "name": name,
            "x": _label(mark.x) if isinstance(mark.x, str) else mark.x,
            "y": _label(mark.y) if isinstance(mark.y, str) else mark.y,
            "low": mark.low,
            "high": mark.high,
            "note": _label(mark.note),
            "shape": mark.shape,
            "fill": _colour(series) if mark.filled else "var(--paper)",
            "area": mark.area,
        }
        for name, series in zip(names, chart.series, strict=True)
        for mark in series.marks
    ]
    extra = [point for series in chart.series for point in series.ideal]
    extra += [point for guide in chart.guides for point in guide.points]
    values: dict[str, list[Any]] = {"x": [*(one["x"] for one in marks), *(x for x, _ in extra), *(chart.band or ())]}
    values["y"] = [*(one["y"] for one in marks), *(y for _, y in extra)]
    values[along] += [value for one in marks for value in (one["low"], one["high"]) if value is not None]
    at = {name: _position(name, axis, values[name]) for name, axis in (("x", chart.x), ("y", chart.y))}
    series_scale = {"domain": names, "range": [_colour(series) for series in chart.series]}
    dashes = {"domain": names, "range": [[7, 3] if series.colour >= len(LIGHT) else [] for series in chart.series]}
    legend = {"title": None, "symbolType": "stroke", "symbolStrokeWidth": 3} if chart.legend else None
    stroke = {"field": "name", "type": "nominal", "scale": series_scale, "legend": legend}
    dash = {"field": "name", "type": "nominal", "scale": dashes, "legend": legend}
    layers: list[dict[str, Any]] = []
    if chart.band is not None:
        ends: dict[str, Any] = {"x": {"datum": chart.band[0]}, "x2": {"datum": chart.band[1]}}
        layers.append({"data": {"values": [{}]}, "mark": {"type": "rect", "color": "var(--band)"}, "encoding": ends})
    for guide in chart.guides:
        layers += _guide(guide, at)
    ideal = [{"name": n, "x": x, "y": y} for n, one in zip(names, chart.series, strict=True) for x, y in one.ideal]
    if ideal:
        mark = {"type": "line", "strokeWidth": 1, "strokeDash": [2, 3]}
        layers.append({"data": {"values": ideal}, "mark": mark, "encoding": {**at, "stroke": stroke}})
    if any(one["low"] is not None for one in marks):
        other = "y" if along == "x" else "x"
        ends = {along: {**at[along], "field": "low"}, f"{along}2": {"field": "high"}, other: at[other]}
        shown = [one for one in marks if one["low"] is not None and one["high"] is not None]
        layers.append({"data": {"values": shown}, "mark": "rule", "encoding": {**ends, "stroke": stroke}})
    joined = {name for name, series in zip(names, chart.series, strict=True) if series.line and len(series.marks) > 1}
    if joined:
        lines = [one for one in marks if one["name"] in joined]
        encoding = {**at, "stroke": stroke, "strokeDash": dash, "order": {"value": 0}}
        layers.append({"data": {"values": lines}, "mark": {"type": "line"}, "encoding": encoding})
    literal: dict[str, dict[str, Any]] = {
        channel: {"field": field, "type": "nominal", "scale": None, "legend": None}
        for channel, field in (("shape", "shape"), ("fill", "fill"), ("size", "area"), ("description", "note"))
    }
    literal["size"]["type"] = "quantitative"
    del literal["description"]["scale"], literal["description"]["legend"]
    layers.append({"mark": {"type": "point", "aria": True}, "encoding": {**at, "stroke": stroke, **literal}})
    width, height = chart.size
    height = max(height, 60 + 18 * len(names)) if chart.legend else height
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "width": width,
        "height": height,
        "autosize": {"type": "fit", "contains": "padding"},
        "padding": 3,
        "background": None,
        "title": {"text": _label(chart.title), "limit": width - 24} if chart.title else None,
        "data": {"values": marks},
        "layer": layers,
        "config": _CONFIG,
    }


_LETTERS = 14
"""Vega measures texts in Helvetica of this size. The page's letters have 11 pixels, and fit where they are wide."""

_CONFIG = {
    "view": {"stroke": None},
    "line": {"aria": False, "strokeWidth": 1.8, "interpolate": "linear"},
    "rule": {"aria": False, "strokeWidth": 1.6},
    "rect": {"aria": False, "opacity": 1},
    "text": {"aria": False, "fontSize": _LETTERS, "color": "var(--soft)"},
    "point": {"opacity": 1, "strokeWidth": 1.6},
    "title": {"anchor": "start", "frame": "bounds", "fontSize": _LETTERS, "color": "var(--ink)", "offset": 6},
    "axis": {
        "labelColor": "var(--soft)",
        "titleColor": "var(--soft)",
        "gridColor": "var(--grid)",
        "domainColor": "var(--grid)",
        "gridOpacity": {"condition": {"test": "datum.label", "value": 1}, "value": 0},
        "ticks": False,
        "labelPadding": 5,
        "labelFontSize": _LETTERS,
        "titleFontSize": _LETTERS,
        "titleFontWeight": "normal",
        "titleLimit": 228,
    },
    "legend": {"labelColor": "var(--ink)", "labelFontSize": _LETTERS, "labelLimit": 150, "rowPadding": 0, "offset": 8},
}


def _colour(series: Series) -> str:
    """Beyond the last colour they come again, but for the first."""
    many = len(LIGHT)
    return f"var(--c{series.colour if series.colour < many else 1 + (series.colour - many) % (many - 1)})"


def _guide(guide: Guide, at: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    values = [{"x": x, "y": y, "order": index} for index, (x, y) in enumerate(guide.points)]
    mark = {"type": "line", "color": "var(--soft)", "strokeWidth": 1.2, "strokeDash": [6, 4] if guide.dashed else []}
    order = {"order": {"field": "order", "type": "quantitative"}}
    yield {"data": {"values": values}, "mark": mark, "encoding": {**at, **order}}
    if guide.text:
        # Above a level line's end, right of the beginning of one that rises.
        place = {"align": "right", "dy": -6} if guide.end else {"align": "left", "dx": 12, "dy": 6}
        text = {"type": "text", "text": _label(guide.text), **place}
        yield {"data": {"values": [values[-1 if guide.end else 0]]}, "mark": text, "encoding": at}


def _position(field: str, axis: Axis, values: Sequence[Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {"title": _label(axis.title) or None}
    if axis.kind == "names":
        names = {"labelLimit": 180, "labelColor": "var(--ink)", "grid": True}
        return {"field": field, "type": "nominal", "sort": None, "axis": {**shown, **names}}
    shown |= {
        "format": ",~f" if axis.kind == "linear" else ",~g",
        "labelOverlap": "greedy",
        "tickCount": 5,
        "grid": axis.kind != "values",
    }
    scale: dict[str, Any] = {"type": "linear", "zero": True}
    if axis.kind != "linear":
        values = [*values, *axis.holds]
        low, high = min(values), max(values)
        spare = 1.12 if axis.kind == "log" and axis.least >= 1.5 else max((high / low) ** 0.04, 1.02)
        low, high = low / spare, high * spare
        if high / low < axis.least:
            middle = math.sqrt(low * high)
            low, high = middle / math.sqrt(axis.least), middle * math.sqrt(axis.least)
        scale = {"type": "log", "domain": [low, high], "nice": False}
    if axis.kind == "values":
        shown |= {"values": sorted(set(values))}
    return {"field": field, "type": "quantitative", "scale": scale, "axis": shown}


_SVG = "{http://www.w3.org/2000/svg}"
_KEPT = {"transform", "d", "stroke-dasharray", "text-anchor", "x2", "y2", "x", "y", "width", "height", "font-weight"}
_DEFAULTS = {("text-anchor", "start"), ("stroke-dasharray", ""), ("x2", "0"), ("y2", "0"), ("font-weight", "normal")}
_CIRCLE = re.compile(r"M([\d.]+),0A")


def _slim(element: ElementTree.Element) -> Iterator[ElementTree.Element]:
    """What is to be seen of an element, with classes of the page's style for its colours: Vega writes eight times as
    much. A description becomes the title that a browser shows when a pointer rests on the mark."""
    shape = element.get("d", "")
    unseen = element.tag == f"{_SVG}path" and not (shape and (element.get("fill") or element.get("stroke")))
    if unseen or element.get("opacity") == "0":
        return
    made = ElementTree.Element(element.tag.removeprefix(_SVG))
    classes = [name for channel in ("stroke", "fill") if (name := _class(element, channel))]
    if classes:
        made.set("class", " ".join(classes))
    for name in sorted(_KEPT & set(element.keys())):
        value = element.attrib[name]
        if (name, value) not in _DEFAULTS:
            made.set(name, re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), value))
    if (circle := _CIRCLE.match(made.get("d", ""))) is not None:
        made.tag = "circle"
        made.attrib["r"] = circle[1]
        del made.attrib["d"]
    made.text = element.text
    if element.get("aria-roledescription") == "point" and element.get("aria-label"):
        ElementTree.SubElement(made, "title").text = element.get("aria-label")
    for child in element:
        made.extend(_slim(child))
    if made.tag == "g" and made.get("transform") in (None, "translate(0,0)") and len(made.attrib) < 2:
        yield from made
    elif made.tag not in ("g", "text") or len(made) or made.text:
        yield made


def _class(element: ElementTree.Element, channel: str) -> str:
    """``c0`` and so on, ``grid`` or ``soft`` for a stroke; of a fill whether it is that of the stroke, and of text."""
    value = element.get(channel, "").removeprefix("var(--").removesuffix(")")
    if channel == "fill" and re.fullmatch(r"c\d", value):
        return "full"
    return "" if value in ("", "none", "transparent") or (value == "soft" and channel == "fill") else value
