"""Scaling: one request on more and more cores, more and more instances, and one batch divided over instances.

The three figures of "Scaling up BERT-like model inference on modern CPU", part 1, and the ideal line beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from encast.bench.scenarios.base import LATENCY, Point
from encast.bench.scenarios.closed_loop import (
    BURST_SECONDS,
    ClosedLoop,
    burst_sample,
    core_count,
    fits,
    make_points,
    rate_metrics,
)
from encast.errors import InputError
from encast.measure.fields import whole_numbers
from encast.measure.statistics import latency_metrics

if TYPE_CHECKING:
    from encast.bench.launcher import Launcher
    from encast.bench.system import System
    from encast.machine import Machine
    from encast.measure.workloads import Workload

__all__ = ["OWN_DIVISION", "BatchScaling", "Scaled", "Scaling", "divisors", "ideal"]

OWN_DIVISION = {
    f"launcher.{field}": "scenario.instances=N, as far as launcher.core_list and launcher.nodes have cores"
    for field in ("instances", "cores_per_instance")
}
"""``instead`` of scenarios that divide the cores themselves. A preset counts: it says how a quota is rounded."""


def divisors(number: int) -> tuple[int, ...]:
    return tuple(part for part in range(1, number + 1) if number % part == 0)


def _doubling(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and ``most``."""
    return tuple(dict.fromkeys([*(1 << power for power in range(most.bit_length()) if 1 << power <= most), most]))


class Scaling(ClosedLoop):
    """Latency of one instance by ``threads`` (strong scaling), or throughput by ``instances``, each on cores of its own
    and with work of its own. Ideal is that twice the cores take half the time, and n instances give n times what one
    gives."""

    instead: ClassVar[Mapping[str, str]] = {
        "launcher.instances": OWN_DIVISION["launcher.instances"],
        "launcher.cores_per_instance": "scenario.threads=N, as far as launcher.core_list and launcher.nodes have cores",
    }

    def __init__(self, threads: Any = 1, instances: Any = 1, seconds: float = BURST_SECONDS) -> None:
        """``threads``: cores of each instance; ``instances``: how many; one number or several. None: 1, 2, 4, ... and
        all that the launcher has, as far as they fit."""
        super().__init__(seconds)
        self.threads = None if threads is None else whole_numbers("scenario.threads", threads)
        self.instances = None if instances is None else whole_numbers("scenario.instances", instances)

    def points(self, workload: Workload, launcher: Launcher, machine: Machine) -> Sequence[Point]:
        cores = core_count(launcher, machine)
        found = []
        for threads in sorted(self.threads or _doubling(cores)):
            for instances in sorted(self.instances or _doubling(cores // threads)):
                if self.threads and self.instances:
                    launcher.place(machine, instances=instances, threads=threads)  # raises where they do not fit
                if fits(launcher, machine, instances, threads):
                    found.append((instances, threads))
        if not found:
            # Says why, such as which numbers whole cores have.
            launcher.place(machine, instances=1, threads=min(self.threads or (1,)))
            raise InputError(f"nothing fits the {cores} cores; give a smaller scenario.threads or scenario.instances")
        return make_points(workload, found)


class BatchScaling(ClosedLoop):
    """Batch size scaling: N instances get ``batch / N`` sequences and ``cores / N`` cores each.

    The batch is answered when its last part is: its latency is the maximum over the instances, its throughput the sum
    of what they do (section 8 of the article, with a batch of 8). That sum counts an instance that waits for a slower
    one as if it went on, and flatters parts that take unequally long: ``whole_batch_sequences_per_s`` and
    ``whole_batch_tokens_per_s`` beside it are of whole batches, one after another. Instances begin each batch together,
    so the parts whose maximum is taken are those of the same batch. Systems are compared by the median batch of a
    round.
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
        divided = {batch: self._instances(batch, cores, launcher, machine) for batch in self.batch}
        found: list[Point] = []
        for count in sorted({count for counts in divided.values() for count in counts}):
            batches = [batch for batch in self.batch if count in divided[batch]]
            found += make_points(workload, [(count, cores // count)], batches, split=True)
        return found

    def _instances(self, batch: int, cores: int, launcher: Launcher, machine: Machine) -> Sequence[int]:
        even = [count for count in divisors(cores) if batch % count == 0]
        even = [count for count in even if fits(launcher, machine, count, cores // count)]
        for count in self.instances or ():
            if count not in even:
                raise InputError(
                    f"scenario.instances={count} does not divide {cores} cores and a batch of {batch} evenly; "
                    f"{', '.join(map(str, even))} do"
                )
        return self.instances or even

    def round(self, system: System, point: Point) -> dict[str, Any]:
        # Instances that keep step agree on a number of calls beforehand, and one call tells how many fill a burst.
        first = burst_sample(system, point, calls=1, in_step=True)
        longest = max(max(times) for times in first["ns"])
        return burst_sample(system, point, calls=max(3, round(self.seconds * 1e9 / longest)), in_step=True)

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
