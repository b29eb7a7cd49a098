"""What a scenario is: the points it measures, one round at a point, and what many rounds say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from encast.batch import Batch

if TYPE_CHECKING:
    from encast.bench.contender import Contender
    from encast.bench.launcher import Launcher
    from encast.machine import Machine
    from encast.measure.workloads import Workload

__all__ = ["COLD_START", "LATENCY", "MEAN_LATENCY", "THROUGHPUT", "Label", "Point", "Scenario", "compared_by"]

Label = Mapping[str, int | float | str]

LATENCY, MEAN_LATENCY = "latency (p50)", "mean latency"
THROUGHPUT, COLD_START = "throughput", "cold start"
"""What contenders are compared by, as reports call the numbers that they show."""


@dataclass(frozen=True)
class Point:
    """One row for each contender. ``label`` holds its columns: batch, length, cores, rate, ..."""

    batches: tuple[Batch, ...]
    """Id sets, called in turn. They are of one shape, unless the scenario streams requests."""
    instances: int
    threads: int
    """Of each instance."""
    label: Label
    split: bool = False
    """Each batch is divided over the instances by whole sequences; otherwise each instance gets whole batches."""


@runtime_checkable
class Scenario(Protocol):
    """Made from the keys of its YAML beside ``name`` and ``scenario``, which are its constructor's arguments.

    Nothing of a round's sample needs to be kept by the object: the same one serves all contenders. What it measures for
    all of them it finds again in the rows of a comparison that was interrupted: it gets them by ``recall(rows)``, when
    it has such a method, before the first round.

    A scenario that sets itself what a workload or launcher says too has a mapping ``instead``: by the name of such a
    field (``workload.batch``) what counts in its place. A command line that gives the field is then refused, as one
    whose figures would be of something else.

    ``compared_by``, a short text such as ``mean latency``, names the quantity that ``figure`` is of: whoever reads a
    ratio is told it where another number stands beside. Without one a ratio is of "the scenario's own figure".
    """

    def points(self, workload: Workload, launcher: Launcher, machine: Machine) -> Sequence[Point]:
        """What is measured, in the order in which it is. Raises ``InputError`` for what cannot be on this machine."""
        ...

    def round(self, contender: Contender, point: Point) -> Any:
        """One burst of about 0.2 to 0.5 s; contenders take turns A B A B / B A, round by round. Plain JSON."""
        ...

    def figure(self, sample: Any) -> float:
        """The one number of a round that contenders are compared by: larger is better (calls or sequences a second).

        The ratio of two contenders is taken within each round.
        """
        ...

    def summarise(self, point: Point, samples: Sequence[Any]) -> Mapping[str, Any]:
        """The row's ``metrics``; intervals by bootstrap over rounds (``encast.measure.statistics``)."""
        ...


def compared_by(scenario: Scenario) -> str:
    """The quantity that its ``figure`` is of. A class that has a ``figure`` of its own inherits no name for it."""
    default = "the scenario's own figure"
    for holder in (scenario, *type(scenario).__mro__):
        own = getattr(holder, "__dict__", {})
        if "compared_by" in own:
            return str(getattr(scenario, "compared_by", default))
        if "figure" in own:
            break
    return default
