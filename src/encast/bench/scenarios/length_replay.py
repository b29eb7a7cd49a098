"""A set of texts with all its lengths, in batches, once through a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from encast.batch import Batch
from encast.bench.fields import whole_number
from encast.bench.scenarios.base import Point
from encast.bench.scenarios.closed_loop import ClosedLoop, burst_sample
from encast.bench.workloads import padding

if TYPE_CHECKING:
    from encast.bench.contender import Contender
    from encast.bench.launcher import Launcher
    from encast.bench.workloads import Workload
    from encast.machine import Machine

__all__ = ["LengthReplay"]


class LengthReplay(ClosedLoop):
    """Throughput over a workload's own distribution of lengths; latency is of a batch.

    Batches hold neighbours in length, so runtimes that pad compute little in vain: ``padding`` says how much. A sample
    of the batches is replayed, the same for all contenders, and wholly in every round.
    """

    def __init__(self, batch_tokens: int | None = None, tokens: int = 8192) -> None:
        """``batch_tokens``: batches of as many sequences as fill so many tokens, instead of ``workload.batch``.
        ``tokens``: of a round, about."""
        super().__init__()
        self.batch_tokens = None if batch_tokens is None else whole_number("scenario.batch_tokens", batch_tokens)
        self.tokens = whole_number("scenario.tokens", tokens)

    def points(self, workload: Workload, launcher: Launcher, machine: Machine) -> Sequence[Point]:
        places = launcher.place(machine)
        points = []
        for part in workload.parts():
            label = dict(part.label)
            if self.batch_tokens is not None:
                label.update(batch_tokens=self.batch_tokens)
                label.pop("batch", None)
            batches = part.replay(tokens=self.batch_tokens if self.batch_tokens else None)
            label.update(instances=len(places), threads=places[0].threads)
            points.append(Point(self._sample(batches), len(places), places[0].threads, label))
        return points

    def _sample(self, batches: Sequence[Batch]) -> tuple[Batch, ...]:
        """The first of the batches, which come in random order, until they have the tokens of a round."""
        kept: list[Batch] = []
        for batch in batches:
            if kept and sum(one.tokens for one in kept) + batch.tokens > self.tokens:
                break
            kept.append(batch)
        return tuple(kept)

    def round(self, contender: Contender, point: Point) -> dict[str, Any]:
        return burst_sample(contender, point, calls=len(point.batches))

    def summarise(self, point: Point, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {**super().summarise(point, samples), "padding": padding(point.batches)}
