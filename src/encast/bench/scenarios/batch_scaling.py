"""Batch size scaling: one batch divided over more and more instances, which share all cores."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from encast.bench.scenarios.base import LATENCY, Point
from encast.bench.scenarios.closed_loop import (
    BURST_SECONDS,
    OWN_DIVISION,
    ClosedLoop,
    burst_sample,
    core_count,
    divisors,
    fits,
    rate_metrics,
)
from encast.errors import InputError
from encast.measure.fields import whole_numbers
from encast.measure.statistics import latency_metrics

if TYPE_CHECKING:
    from encast.bench.contender import Contender
    from encast.bench.launcher import Launcher
    from encast.machine import Machine
    from encast.measure.workloads import Workload

__all__ = ["BatchScaling"]


class BatchScaling(ClosedLoop):
    """N instances get ``batch / N`` sequences and ``cores / N`` cores each.

    The batch is answered when its last part is: its latency is the maximum over the instances, its throughput the sum
    of what they do ("Scaling up BERT-like model inference on modern CPU", part 1, section 8, with a batch of 8). That
    sum counts an instance that waits for a slower one as if it went on, and flatters parts that take unequally long:
    ``whole_batch_sequences_per_s`` and ``whole_batch_tokens_per_s`` beside it are of whole batches, one after another.
    Instances begin each batch together, so the parts whose maximum is taken are those of the same batch. Contenders are
    compared by the median batch of a round.
    """

    compared_by = LATENCY

    instead: ClassVar[Mapping[str, str]] = {**OWN_DIVISION, "workload.batch": "scenario.batch=N"}

    def __init__(self, batch: Any = 8, instances: Any = None, seconds: float = BURST_SECONDS) -> None:
        """``batch``: sequences in total, one number or several. ``instances``: by default all that divide both the
        cores and the batch evenly."""
        super().__init__(seconds)
        self.batch = whole_numbers("scenario.batch", batch)
        self.instances = None if instances is None else whole_numbers("scenario.instances", instances)

    def points(self, workload: Workload, launcher: Launcher, machine: Machine) -> Sequence[Point]:
        cores = core_count(launcher, machine)
        points: dict[tuple[Any, ...], Point] = {}
        divided = {batch: self._instances(batch, cores, launcher, machine) for batch in self.batch}
        for instances in sorted({count for counts in divided.values() for count in counts}):
            threads = cores // instances
            for part, batch in itertools.product(workload.parts(), self.batch):
                label = {**part.label, "batch": batch, "instances": instances, "threads": threads}
                key = tuple(label.items())  # parts that differ in their batch size alone are one here
                if instances in divided[batch] and key not in points:
                    points[key] = Point(part.draw(batch=batch), instances, threads, label, split=True)
        return list(points.values())

    def _instances(self, batch: int, cores: int, launcher: Launcher, machine: Machine) -> Sequence[int]:
        if self.instances is None:
            even = [count for count in divisors(cores) if batch % count == 0]
            return [count for count in even if fits(launcher, machine, count, cores // count)]
        for count in self.instances:
            if cores % count or batch % count:
                raise InputError(
                    f"scenario.instances={count} does not divide {cores} cores and a batch of {batch} evenly; "
                    f"{', '.join(str(even) for even in divisors(cores) if batch % even == 0)} do"
                )
            launcher.place(machine, instances=count, threads=cores // count)  # raises where they do not fit
        return self.instances

    def round(self, contender: Contender, point: Point) -> dict[str, Any]:
        # Instances that keep step agree on a number of calls beforehand, and one call tells how many fill a burst.
        first = burst_sample(contender, point, calls=1, in_step=True)
        longest = max(max(times) for times in first["ns"])
        return burst_sample(contender, point, calls=max(3, round(self.seconds * 1e9 / longest)), in_step=True)

    def figure(self, sample: Mapping[str, Any]) -> float:
        return 1e9 / float(np.median(_whole(sample)))

    def summarise(self, point: Point, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        whole = [_whole(sample) for sample in samples]
        batch = point.batches[0]  # all are of one shape
        seconds = float(np.median([np.mean(times) for times in whole])) / 1e9
        return {
            **latency_metrics(whole),
            **rate_metrics([float(sample["sequences_per_s"]) for sample in samples], point.batches),
            "whole_batch_sequences_per_s": batch.seqs / seconds,
            "whole_batch_tokens_per_s": batch.tokens / seconds,
        }


def _whole(sample: Mapping[str, Any]) -> list[int]:
    """Nanoseconds of each batch: those of its slowest part."""
    return [max(parts) for parts in zip(*sample["ns"], strict=False)]
