"""Rows and verdicts for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from encast.measure.statistics import Ratio, median_interval

__all__ = ["held", "middle", "ratio_text", "table"]


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    print("| " + " | ".join(heads) + " |")
    print("| " + " | ".join("---" for _ in heads) + " |")
    for row in rows:
        print("| " + " | ".join(map(_cell, row)) + " |", flush=True)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "-" if value is None else str(value)


def middle(values: Sequence[float]) -> dict[str, Any]:
    """The median of one number a round, and its interval (None with fewer than five rounds)."""
    ordered = sorted(values)
    count = len(ordered)
    return {
        "median": (ordered[(count - 1) // 2] + ordered[count // 2]) / 2,
        "interval": median_interval(values),
        "rounds": list(values),
    }


def ratio_text(ratio: Ratio) -> str:
    interval = "" if ratio.low is None else f" [{ratio.low:.3g}, {ratio.high:.3g}]"
    return f"{ratio.ratio:.3g}{interval}"


def held(bar: str, value: Any, ok: bool | None) -> dict[str, Any]:
    """Says whether a bar is held (None: it could not be told), for the document too."""
    word = {True: "held", False: "NOT HELD", None: "not measured"}[ok]
    print(f"{word}: {bar}; found {value}", flush=True)
    return {"bar": bar, "found": value, "held": ok}
