"""The roofline of a profile as one HTML file that loads nothing: a point a step below the machine's ceilings.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore architectures", 2009.
"""

from __future__ import annotations

from encast.pages.charts import Axis, Chart, Guide, Mark, Series
from encast.pages.document import Cell, Document, Figure, Section, Table, Text, table, text, to_html
from encast.profile.report import Profile, Row
from encast.profile.table import time_unit

__all__ = ["to_page"]

_KINDS = ("linear", "sparse", "attention", "norm", "narrow", "elementwise", "embed", "other")
"""Each has its own colour."""


def to_page(profile: Profile) -> str:
    """The page; names come from the artifact, and are escaped. Raises ``InputError`` without the extra ``plot``."""
    return to_html(_document(profile))


def _document(profile: Profile) -> Document:
    unit, scale = time_unit(profile.total)
    forward = profile.measured.forward
    said = (
        f"{profile.workload.what}, {profile.threads} thread{'s' if profile.threads > 1 else ''}, "
        f"{profile.ceilings.fingerprint.processor}; forward {forward.median * scale:.4g} {unit} "
        f"[{forward.low * scale:.4g}, {forward.high * scale:.4g}], {profile.tokens_per_second:,.0f} tokens/s, "
        f"{profile.fraction:.1%} of the limit ({profile.limit.holds})"
    )
    caption = (
        "Larger points take more of the forward; each names its step. Operations are multiplications and additions, "
        "of products and of everything else, as docs/howto/profile.md counts them; bytes are those that have to move, "
        "from wherever they live."
    )
    blocks = (Figure(caption, (_roofline(profile),)), _table(profile, unit, scale))
    warnings = (Text(warning, warning=True) for warning in profile.warnings)
    return Document(f"{profile.artifact}: {profile.output}", (Text(said), *warnings), (Section("Roofline", blocks),))


def _roofline(profile: Profile) -> Chart:
    marks: dict[str, list[Mark]] = {}
    for row in sorted(profile.rows, key=lambda row: -row.share):  # the largest points below the others
        operations = row.work.products + row.work.elements
        if operations and row.work.bytes and row.seconds > 0:
            area = 40 + 2800 * max(row.share, 0.0)
            point = Mark(operations / row.work.bytes, operations / row.seconds / 1e9, _note(row), area=area)
            marks.setdefault(row.kind if row.kind in _KINDS else "other", []).append(point)
    series = tuple(Series(kind, _KINDS.index(kind), tuple(found), line=False) for kind, found in marks.items())
    roofs, slopes = _roofs(profile), _slopes(profile)
    intensities = [float(mark.x) for one in series for mark in one.marks]
    top, steepest = max(roofs.values()), max(slopes.values())
    left, right = min([*intensities, top / steepest]) * 0.7, max([*intensities, top / min(slopes.values())]) * 1.4
    guides = [
        Guide(
            ((max(left, roof / steepest), roof), (right, roof)), f"{name} {roof:,.0f} GFLOP/s", dashed=False, end=True
        )
        for name, roof in roofs.items()
    ]
    guides += [
        Guide(((left, left * slope), (top / slope, top)), f"{name} {slope:,.0f} GB/s") for name, slope in slopes.items()
    ]
    alt = "Roofline: operations a second of every step over its operations a byte, below the measured ceilings"
    x, y = Axis("operations a byte"), Axis("GFLOP/s")
    return Chart("", alt, x, y, series, tuple(guides), size=(900, 520))


def _table(profile: Profile, unit: str, scale: float) -> Table:
    lines: list[list[Cell | str]] = []
    for row in profile.rows:
        count = f" (x{len(row.steps)})" if len(row.steps) > 1 else ""
        lines.append([row.name + count, row.kernel, "x".join(map(str, row.shape)), row.dtype])
        lines[-1] += [f"{row.seconds * scale:.4g}", f"{row.share:.1%}", f"{row.waiting * scale:.3g}"]
        lines[-1] += [
            f"{row.rate:.4g} {row.unit}",
            f"{row.bound.seconds * scale:.4g}",
            f"{row.fraction:.0%}",
            row.holds,
        ]
    for name, seconds in (("waiting", profile.waiting), ("outside", profile.outside), ("total", profile.total)):
        lines.append([name, *[""] * 3, f"{seconds * scale:.4g}", f"{seconds / profile.total:.1%}", *[""] * 5])
    columns = [*map(text, ("step", "kernel", "shape", "dtype")), unit, "share", f"waiting {unit}", "rate"]
    return table("Steps", [*columns, f"bound {unit}", "of bound", text("held by")], lines)


def _roofs(profile: Profile) -> dict[str, float]:
    """The peaks that count for the profile's steps, and that of f32, which everything beside products has: GFLOP/s."""
    dtypes = ["f32", *(row.dtype for row in profile.rows if row.work.products)]
    return {dtype: profile.ceilings.peak(dtype, profile.threads) / 1e9 for dtype in dtypes}


def _slopes(profile: Profile) -> dict[str, float]:
    """Read bandwidth by level of memory: GB/s."""
    ceilings = profile.ceilings
    count = ceilings.threads if profile.threads >= ceilings.threads else 1
    return {level: rate / 1e9 for (level, threads), rate in ceilings.bandwidth.items() if threads == count}


def _note(row: Row) -> str:
    unit, scale = time_unit(row.seconds)
    return (
        f"{row.name}\n{row.kernel}, {row.dtype}, {'x'.join(map(str, row.shape))}\n"
        f"{row.seconds * scale:.4g} {unit}, {row.share:.1%} of the forward\n{row.rate:.4g} {row.unit}, "
        f"{row.fraction:.0%} of its bound ({row.bound.holds})"
    )
