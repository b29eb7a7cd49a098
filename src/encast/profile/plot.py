"""The roofline of a profile as one HTML file that loads nothing: a point a step below the machine's ceilings.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore architectures", 2009.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from encast.profile.report import Profile, Row
from encast.profile.table import time_unit
from encast.web_page import escaped, page

__all__ = ["to_html"]

_WIDTH, _HEIGHT = 1080, 620
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 190, 24, 56
# Okabe and Ito's palette, told apart with any colour vision.
_COLOURS = {
    "linear": "#0072b2",
    "attention": "#d55e00",
    "norm": "#009e73",
    "narrow": "#cc79a7",
    "elementwise": "#56b4e9",
    "embed": "#e69f00",
}
_OTHER = "#777777"

_STYLE = """
svg { width: 100%; height: auto; margin: 1rem 0; }
svg .roof { stroke: var(--ink); stroke-width: 1.4; }
svg .slope { stroke: var(--soft); stroke-width: 1.2; stroke-dasharray: 6 4; }
svg circle { fill-opacity: .55; stroke-width: 1.5; }
svg circle:hover, svg circle.on { fill-opacity: .95; stroke: var(--ink); }
tr.on { background: color-mix(in srgb, var(--soft) 22%, transparent); }
#note { position: fixed; display: none; pointer-events: none; background: var(--paper); border: 1px solid var(--soft);
  border-radius: 4px; padding: .4rem .6rem; white-space: pre; font-size: 12px; box-shadow: 0 2px 8px #0003; }
"""

_SCRIPT = """
const note = document.getElementById("note");
function light(index, on) {
  for (const one of document.querySelectorAll(`[data-row="${index}"]`)) one.classList.toggle("on", on);
}
for (const one of document.querySelectorAll("[data-row]")) {
  const index = one.dataset.row;
  one.addEventListener("mouseenter", () => light(index, true));
  one.addEventListener("mouseleave", () => { light(index, false); note.style.display = "none"; });
  if (one.dataset.note) one.addEventListener("mousemove", event => {
    note.textContent = one.dataset.note;
    note.style.display = "block";
    note.style.left = Math.min(event.clientX + 14, innerWidth - note.offsetWidth - 8) + "px";
    note.style.top = Math.min(event.clientY + 14, innerHeight - note.offsetHeight - 8) + "px";
  });
}
"""


@dataclass(frozen=True)
class _Point:
    """A row of the table that has operations: operations a byte, and operations a second."""

    index: int
    row: Row
    intensity: float
    rate: float


class _Axes:
    """Logarithmic axes over whole decades."""

    def __init__(self, xs: list[float], ys: list[float]) -> None:
        self.x0, self.x1 = _decades(xs)
        self.y0, self.y1 = _decades(ys)

    def x(self, value: float) -> float:
        return _LEFT + (math.log10(value) - self.x0) / (self.x1 - self.x0) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (math.log10(value) - self.y0) / (self.y1 - self.y0) * (_HEIGHT - _TOP - _BOTTOM)


def to_html(profile: Profile) -> str:
    """The page. Names come from the artifact: all of them are escaped."""
    unit, scale = time_unit(profile.total)
    forward = profile.measured.forward
    title = f"{profile.artifact}: {profile.output}"
    head = [
        f"<h1>{escaped(title)}</h1>",
        f"<p>{escaped(profile.workload.what)}, {profile.threads} thread{'s' if profile.threads > 1 else ''}, "
        f"{escaped(profile.ceilings.fingerprint.processor)}; forward {forward.median * scale:.4g} {unit} "
        f"[{forward.low * scale:.4g}, {forward.high * scale:.4g}], {profile.tokens_per_second:,.0f} tokens/s, "
        f"{profile.fraction:.1%} of the limit ({escaped(profile.limit.holds)})</p>",
        *(f'<p class="warning">{escaped(warning)}</p>' for warning in profile.warnings),
    ]
    body = [*head, *_svg(profile), *_table(profile, unit, scale), '<div id="note"></div>']
    return page(title, _STYLE, body, _SCRIPT)


def _svg(profile: Profile) -> Iterator[str]:
    points = _points(profile)
    roofs = _roofs(profile)
    slopes = _slopes(profile)
    xs = [point.intensity for point in points] + [roof / slope for _, roof in roofs for _, slope in slopes]
    ys = [point.rate for point in points] + [roof for _, roof in roofs]
    axes = _Axes(xs, ys)
    yield (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Roofline: operations a second of every step '
        'over its operations a byte, below the measured ceilings">'
    )
    yield from _grid(axes)
    top = max(roof for _, roof in roofs)
    bottom, right = 10**axes.y0, 10**axes.x1
    used: list[float] = []
    for name, roof in sorted(roofs, key=lambda one: -one[1]):
        y = axes.y(roof)
        begin = max(10**axes.x0, roof / max(slope for _, slope in slopes))
        yield f'<line class="roof" x1="{axes.x(begin):.1f}" y1="{y:.1f}" x2="{axes.x(right):.1f}" y2="{y:.1f}"/>'
        at = _free(y + 4, used)
        yield f'<text x="{_WIDTH - _RIGHT + 8}" y="{at:.1f}">{escaped(name)} {roof / 1e9:,.0f} GFLOP/s</text>'
    for number, (name, slope) in enumerate(slopes):
        x0, x1 = max(10**axes.x0, bottom / slope), min(right, top / slope)
        if x0 >= x1:
            continue
        ends = [axes.x(x0), axes.y(x0 * slope), axes.x(x1), axes.y(x1 * slope)]
        yield '<line class="slope" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>'.format(*ends)
        along = 0.12 + 0.1 * number
        x, y = ends[0] + along * (ends[2] - ends[0]), ends[1] + along * (ends[3] - ends[1])
        turn = math.degrees(math.atan2(ends[3] - ends[1], ends[2] - ends[0]))
        yield (
            f'<text class="soft" transform="translate({x:.1f},{y:.1f}) rotate({turn:.1f})" dy="-5">'
            f"{escaped(name)} {slope / 1e9:,.0f} GB/s</text>"
        )
    for point in sorted(points, key=lambda one: -one.row.share):
        colour = _COLOURS.get(point.row.kind, _OTHER)
        radius = 4 + 30 * math.sqrt(max(point.row.share, 0.0))
        yield (
            f'<circle cx="{axes.x(point.intensity):.1f}" cy="{axes.y(point.rate):.1f}" r="{radius:.1f}" '
            f'fill="{colour}" stroke="{colour}" data-row="{point.index}" data-note="{escaped(_note(point.row))}"/>'
        )
    kinds = list(dict.fromkeys(point.row.kind if point.row.kind in _COLOURS else "other" for point in points))
    for number, kind in enumerate(kinds):
        y = _HEIGHT - _BOTTOM - 20 * (len(kinds) - number)
        colour = _COLOURS.get(kind, _OTHER)
        yield f'<circle cx="{_WIDTH - _RIGHT + 16}" cy="{y}" r="6" fill="{colour}" stroke="{colour}"/>'
        yield f'<text x="{_WIDTH - _RIGHT + 30}" y="{y + 4}">{escaped(kind)}</text>'
    yield "</svg>"
    yield (
        "<p>Larger points take more of the forward. Operations are multiplications and additions, of products and of "
        "everything else, as docs/howto/profile.md counts them; bytes are those that have to move, from wherever they "
        "live.</p>"
    )


def _grid(axes: _Axes) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for decade in range(axes.x0, axes.x1 + 1):
        x = axes.x(10.0**decade)
        yield f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}"/>'
        yield f'<text class="soft" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{10.0**decade:,.10g}</text>'
    for decade in range(axes.y0, axes.y1 + 1):
        y = axes.y(10.0**decade)
        yield f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
        yield (
            f'<text class="soft" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0 ** (decade - 9):,.10g}</text>'
        )
    yield f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 12}" text-anchor="middle">operations a byte</text>'
    yield (f'<text transform="translate(16,{(_TOP + bottom) / 2}) rotate(-90)" text-anchor="middle">GFLOP/s</text>')


def _table(profile: Profile, unit: str, scale: float) -> Iterator[str]:
    yield '<div class="scroll"><table><thead><tr>'
    for name, text in (
        ("step", True),
        ("kernel", True),
        ("shape", True),
        ("dtype", True),
        (unit, False),
        ("share", False),
        (f"waiting {unit}", False),
        ("rate", False),
        (f"bound {unit}", False),
        ("of bound", False),
        ("held by", True),
    ):
        yield f"<th{' class=text' if text else ''}>{name}</th>"
    yield "</tr></thead><tbody>"
    for index, row in enumerate(profile.rows):
        count = f" (x{len(row.steps)})" if len(row.steps) > 1 else ""
        texts = [row.name + count, row.kernel, "x".join(map(str, row.shape)), row.dtype]
        numbers = [
            f"{row.seconds * scale:.4g}",
            f"{row.share:.1%}",
            f"{row.waiting * scale:.3g}",
            f"{row.rate:.4g} {row.unit}",
            f"{row.bound.seconds * scale:.4g}",
            f"{row.fraction:.0%}",
        ]
        yield (
            f'<tr data-row="{index}">'
            + "".join(f"<td class=text>{escaped(cell)}</td>" for cell in texts)
            + "".join(f"<td>{cell}</td>" for cell in numbers)
            + f"<td class=text>{escaped(row.holds)}</td></tr>"
        )
    for name, seconds in (("waiting", profile.waiting), ("outside", profile.outside), ("total", profile.total)):
        share = seconds / profile.total
        yield (
            f"<tr><td class=text>{name}</td><td></td><td></td><td></td><td>{seconds * scale:.4g}</td>"
            f"<td>{share:.1%}</td><td></td><td></td><td></td><td></td><td></td></tr>"
        )
    yield "</tbody></table></div>"


def _points(profile: Profile) -> list[_Point]:
    points = []
    for index, row in enumerate(profile.rows):
        operations = row.work.products + row.work.elements
        if operations and row.work.bytes and row.seconds > 0:
            points.append(_Point(index, row, operations / row.work.bytes, operations / row.seconds))
    return points


def _roofs(profile: Profile) -> list[tuple[str, float]]:
    """The peaks that count for the profile's steps, and that of f32, which everything beside products has."""
    dtypes = ["f32", *(row.dtype for row in profile.rows if row.work.products)]
    ceilings = profile.ceilings
    return [(dtype, ceilings.peak(dtype, profile.threads)) for dtype in dict.fromkeys(dtypes)]


def _slopes(profile: Profile) -> list[tuple[str, float]]:
    ceilings = profile.ceilings
    count = ceilings.threads if profile.threads >= ceilings.threads else 1
    return [(level, rate) for (level, threads), rate in ceilings.bandwidth.items() if threads == count]


def _note(row: Row) -> str:
    unit, scale = time_unit(row.seconds)
    return (
        f"{row.name}\n{row.kernel}, {row.dtype}, {'x'.join(map(str, row.shape))}\n"
        f"{row.seconds * scale:.4g} {unit}, {row.share:.1%} of the forward\n{row.rate:.4g} {row.unit}, "
        f"{row.fraction:.0%} of its bound ({row.bound.holds})"
    )


def _decades(values: list[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values) * 0.8)), math.ceil(math.log10(max(values) * 1.25))
    return low, max(high, low + 1)


def _free(y: float, used: list[float]) -> float:
    """The nearest place below for a label that covers no other."""
    while any(abs(y - other) < 14 for other in used):
        y += 1
    used.append(y)
    return y
