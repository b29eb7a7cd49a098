"""The latency that a row was to keep: which percentile, how long, and whether it did."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from encast.bench.report import numbers
from encast.bench.report.load import Row

__all__ = ["Promise", "kept", "promise_of", "promises"]


@dataclass(frozen=True, order=True)
class Promise:
    """``percentile`` (``p99``) of the latency within ``limit_ms``."""

    percentile: str
    limit_ms: float

    @property
    def name(self) -> str:
        """``p99.9``."""
        return self.percentile.replace("_", ".")

    def __str__(self) -> str:
        return f"{self.name} within {numbers.plain(self.limit_ms)} ms"

    def latency_ms(self, row: Row) -> float | None:
        """The limited percentile of the row; None with too few calls to know it."""
        value = row.number("metrics", "slo", "latency_ms")
        return value if value is not None and value > 0 else None


def promise_of(row: Row) -> Promise | None:
    """None for a row that nothing was asked of."""
    percentile, limit = row.text("metrics", "slo", "percentile"), row.number("metrics", "slo", "limit_ms")
    return None if not percentile or limit is None or limit <= 0 else Promise(percentile, limit)


def kept(row: Row) -> bool | None:
    """Whether the row keeps its promise; None where too few calls were made to know, or nothing was promised."""
    met = row.at("metrics", "slo", "met")
    return met if isinstance(met, bool) else None


def promises(rows: Iterable[Row]) -> list[Promise]:
    return sorted({promise for row in rows if (promise := promise_of(row)) is not None})
