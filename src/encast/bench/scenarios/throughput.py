"""How many sequences are answered in a second when every instance is always busy."""

from __future__ import annotations

from encast.bench.scenarios.closed_loop import ClosedLoop
from encast.bench.scenarios.latency import Latency

__all__ = ["Throughput"]


class Throughput(Latency):
    """As ``Latency``, and contenders are compared by the sequences a second of all instances together."""

    figure = ClosedLoop.figure
    compared_by = ClosedLoop.compared_by
