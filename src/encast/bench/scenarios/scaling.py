"""What scaling would be if nothing were lost: the ideal line beside measured points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Scaled", "ideal"]


@dataclass(frozen=True)
class Scaled:
    """A row, with the sequences a second that ideal scaling from the smallest of its series gives, and the share of
    them that it reaches."""

    row: Mapping[str, Any]
    ideal_sequences_per_s: float
    efficiency: float


def ideal(rows: Sequence[Mapping[str, Any]], axis: str) -> list[Scaled]:
    """The rows of each series (all columns but ``axis`` equal, one model and backend) along ``axis``: "threads" of
    core scaling, "instances" of instance scaling."""
    series: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("status") == "ok" and axis in row["point"] and row["metrics"].get("sequences_per_s"):
            others = sorted((key, value) for key, value in row["point"].items() if key != axis)
            series.setdefault((row["model"]["name"], row["backend"]["name"], row["scenario"], *others), []).append(row)
    found = []
    for members in series.values():
        members.sort(key=lambda row: row["point"][axis])
        first = members[0]
        for row in members:
            line = first["metrics"]["sequences_per_s"] * row["point"][axis] / first["point"][axis]
            found.append(Scaled(row, line, row["metrics"]["sequences_per_s"] / line))
    return found
