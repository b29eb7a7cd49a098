"""The profile as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from encast.profile.ablate import Ablated
from encast.profile.report import NOISY, Profile, Row

__all__ = ["ablation_lines", "align", "figure", "table_lines", "time_unit"]

_HEADER = ("step", "kernel", "shape", "dtype", "{unit}", "share", "wait", "rate", "", "of bound", "held by")
_LEFT = {0, 1, 2, 3, 8, 10}


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit in which such a time reads well, and how many of it make a second."""
    return ("ms", 1e3) if seconds >= 0.01 else ("us", 1e6)


def align(rows: Sequence[Sequence[str]], left: set[int]) -> Iterator[str]:
    """Cells in columns, ``left`` of them flush left and the rest flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def table_lines(profile: Profile) -> Iterator[str]:
    """Warnings, a line a row, what is left over, and the bottom line."""
    unit, scale = time_unit(profile.total)
    forward, limit = profile.measured.forward, profile.limit
    for warning in profile.warnings:
        yield f"WARNING: {warning}"
    threads = f"{profile.threads} thread{'s' if profile.threads > 1 else ''}"
    yield f"{profile.artifact}: {profile.output} of {profile.workload.what}, {threads}"
    if profile.ceilings_note is not None:
        yield profile.ceilings_note
    yield ""
    share = profile.total or 1.0

    def extra(name: str, seconds: float) -> tuple[str, ...]:
        return (name, "", "", "", figure(seconds * scale), f"{seconds / share:.1%}", "", "", "", "", "")

    yield from align(
        [
            tuple(cell.format(unit=unit) for cell in _HEADER),
            *(_cells(row, scale) for row in profile.rows),
            extra("waiting", profile.waiting),
            extra("outside", profile.outside),
            extra("total", profile.total),
        ],
        _LEFT,
    )
    yield ""
    yield (
        f"forward     {figure(forward.median * scale)} {unit} "
        f"[{figure(forward.low * scale)}, {figure(forward.high * scale)}], median and quartiles of {forward.count} "
        f"runs; {profile.tokens_per_second:,.0f} tokens/s"
    )
    yield (
        f"limit       {figure(limit.seconds * scale)} {unit} ({limit.holds}); {profile.fraction:.1%} of it is reached"
    )
    attention = [row for row in profile.rows if row.kind == "attention" and row.head_rows is not None]
    if attention:
        by_heads = sum((row.head_rows or 0) * len(row.steps) for row in attention)
        rows = sum(row.shape[0] * len(row.steps) for row in attention)
        yield f"heads       {by_heads / rows:.1%} of attention ran in tasks of heads, with the product before it"
    yield (
        f"accounting  steps {profile.busy:.1%}, waiting {profile.waiting / share:.1%}, outside "
        f"{profile.outside / share:.1%}; the trace itself cost {profile.measured.trace_cost:.1%}"
    )


def ablation_lines(ablations: Sequence[Ablated]) -> Iterator[str]:
    """A line an optimisation: how much longer the workload takes without it, and whether the answers stay."""
    rows = [("without", "time", "quartiles", "answers", "")]
    for one in ablations:
        if one.ratio is None:
            rows.append((one.name, "-", "", "", one.note))
            continue
        ratio = one.ratio
        note = "; ".join(part for part in (one.what, one.note) if part)
        rows.append((one.name, f"{ratio.median:.3f}x", f"[{ratio.low:.3f}, {ratio.high:.3f}]", _answers(one), note))
    yield from align(rows, {0, 2, 3, 4})
    noisy = [one.name for one in ablations if one.ratio is not None and one.ratio.spread > NOISY]
    if noisy:
        yield f"WARNING: quartiles more than {NOISY:.0%} apart, not to be trusted: {', '.join(noisy)}"


def _answers(one: Ablated) -> str:
    if one.difference is None:
        return "not compared"
    if one.difference == 0:
        return "same bits"
    return f"differ by {one.difference:.1e}" + (f", MORE THAN {one.bound:.1e}" if one.wrong else "")


def _cells(row: Row, scale: float) -> tuple[str, ...]:
    count = f" (x{len(row.steps)})" if len(row.steps) > 1 else ""
    return (
        row.name + count,
        row.kernel,
        "x".join(map(str, row.shape)),
        row.dtype,
        figure(row.seconds * scale),
        f"{row.share:.1%}",
        figure(row.waiting * scale),
        figure(row.rate),
        row.unit,
        f"{row.fraction:.0%}",
        row.holds,
    )


def figure(value: float) -> str:
    """Three digits or more."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
