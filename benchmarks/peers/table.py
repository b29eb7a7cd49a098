"""The table of a comparison: one line a workload and placement, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from peers.limits import Limit
from peers.rounds import Round, Spread, spread

__all__ = ["Row", "header"]


def header(peer: str) -> str:
    return (
        f"| workload | caches | encast, ms | {peer}, ms | times as fast | bar | fraction of the limit | bar | limit |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    )


@dataclass(frozen=True)
class Row:
    """A workload's rounds of one placement. ``bars``: the ratio and the fraction that were promised, or None."""

    workload: str
    place: str
    rounds: Sequence[Round]
    limit: Limit
    bars: tuple[float | None, float | None]
    facts: dict[str, Any]

    @property
    def ours(self) -> Spread:
        return spread([1e3 * item.ours for item in self.rounds])

    @property
    def theirs(self) -> Spread:
        return spread([1e3 * item.theirs for item in self.rounds])

    @property
    def ratio(self) -> Spread:
        """How many times as fast ours is, from neighbouring bursts."""
        return spread([item.theirs / item.ours for item in self.rounds])

    @property
    def fraction(self) -> Spread:
        """Of the limit, as the peak of the same round gives it, that ours reaches."""
        return spread([self.limit.seconds(item.peak) / item.ours for item in self.rounds])

    @property
    def peak(self) -> float:
        return float(np.median([item.peak for item in self.rounds]))

    def markdown(self) -> str:
        digits = 1 if self.ours.median >= 20 else 3
        cells = (
            self.workload,
            self.place,
            self.ours.text(digits),
            self.theirs.text(digits),
            self.ratio.text(2),
            _bar(self.ratio.median, self.bars[0]),
            self.fraction.text(2),
            _bar(self.fraction.median, self.bars[1]),
            self.limit.bound(self.peak),
        )
        return f"| {' | '.join(cells)} |"

    def json(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "caches": self.place,
            "encast_ms": asdict(self.ours),
            "peer_ms": asdict(self.theirs),
            "times_as_fast": asdict(self.ratio),
            "fraction_of_limit": asdict(self.fraction),
            "bars": self.bars,
            "limit": {
                "operations": self.limit.operations,
                "peak_ops_per_second": self.peak,
                "weights_read_seconds": self.limit.read_seconds,
            },
            **self.facts,
            "rounds": [asdict(item) for item in self.rounds],
        }


def _bar(value: float, bar: float | None) -> str:
    return "" if bar is None else f"{bar:g} {'met' if value >= bar else 'missed'}"
