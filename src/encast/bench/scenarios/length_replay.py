"""A set of texts with all its lengths, in batches, once through a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from encast.batch import Batch
from encast.bench.scenarios.base import Point
from encast.bench.scenarios.closed_loop import ClosedLoop, burst_sample
from encast.measure.fields import whole_number
from encast.measure.workloads import padding

if TYPE_CHECKING:
    from encast.bench.contender import Contender
    from encast.bench.launcher import Launcher
    from encast.machine import Machine
    from encast.measure.workloads import Workload

__all__ = ["LEAST_BATCHES", "LengthReplay"]

LEAST_BATCHES = 8


class LengthReplay(ClosedLoop):
    """Throughput over a workload's own distribution of lengths; latency is of a batch.

    Batches hold neighbours in length, so runtimes that pad compute little in vain: ``padding`` says how much. A sample
    of the batches is replayed, the same for all contenders, and wholly in every round. It has a batch from each of as
    many equal shares of the batches, from the shortest to the longest, as the round has room for, and of
    ``LEAST_BATCHES`` shares at the least: so ``sampled_sequences`` stand for the lengths of all ``sequences``.
    """

    def __init__(self, batch_tokens: int | None = None, tokens: int = 8192) -> None:
        """``batch_tokens``: batches of as many sequences as fill so many tokens, instead of ``workload.batch``.
        ``tokens``: of a round, about; more where the fewest batches have more."""
        super().__init__()
        self.batch_tokens = None if batch_tokens is None else whole_number("scenario.batch_tokens", batch_tokens)
        self.tokens = whole_number("scenario.tokens", tokens)
        self.instead = {} if self.batch_tokens is None else {"workload.batch": "scenario.batch_tokens"}
        self._sequences: dict[tuple[Any, ...], int] = {}

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
            self._sequences[tuple(label.items())] = sum(batch.seqs for batch in batches)
            points.append(Point(self._sample(batches), len(places), places[0].threads, label))
        return points

    def _sample(self, batches: Sequence[Batch]) -> tuple[Batch, ...]:
        """The middle batch of each share, in the order in which they come, which is random."""
        each = sum(batch.tokens for batch in batches) / len(batches)
        count = min(len(batches), max(LEAST_BATCHES, int(self.tokens / each)))
        by_length = sorted(range(len(batches)), key=lambda index: batches[index].tokens / batches[index].seqs)
        chosen = {by_length[int((share + 0.5) * len(batches) / count)] for share in range(count)}
        return tuple(batch for index, batch in enumerate(batches) if index in chosen)

    def round(self, contender: Contender, point: Point) -> dict[str, Any]:
        return burst_sample(contender, point, calls=len(point.batches))

    def summarise(self, point: Point, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            **super().summarise(point, samples),
            "padding": padding(point.batches),
            "sampled_sequences": sum(batch.seqs for batch in point.batches),
            "sequences": self._sequences[tuple(point.label.items())],
        }
