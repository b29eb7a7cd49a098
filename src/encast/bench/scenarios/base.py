"""What a scenario is: the points it measures, one round at a point, and what many rounds say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from encast.batch import Batch
from encast.bench.peers.base import line_in, load_object
from encast.errors import EncastError, InputError

if TYPE_CHECKING:
    from encast.bench.launcher import Launcher
    from encast.bench.system import System
    from encast.machine import Machine
    from encast.measure.workloads import Workload

__all__ = [
    "COLD_START",
    "LATENCY",
    "MEAN_LATENCY",
    "THROUGHPUT",
    "Label",
    "Point",
    "Scenario",
    "blamed",
    "make_scenario",
]

Label = Mapping[str, int | float | str]

LATENCY, MEAN_LATENCY = "latency (p50)", "mean latency"
THROUGHPUT, COLD_START = "throughput", "cold start"
"""What systems are compared by, as reports call the numbers that they show."""


@dataclass(frozen=True)
class Point:
    """One row for each system. ``label`` holds its columns: batch, length, cores, rate, ..."""

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

    Nothing of a round's sample needs to be kept by the object: the same one serves all systems. What it measures for
    all of them it finds again in the rows of a comparison that was interrupted: it gets them by ``recall(rows)``, when
    it has such a method, before the first round.

    A scenario that sets itself what a workload or launcher says too has a mapping ``instead``: by the name of such a
    field (``workload.batch``) what counts in its place. A command line that gives the field is then refused, as one
    whose figures would be of something else.

    ``compared_by``, a short text such as ``mean latency``, names the quantity that ``figure`` is of: whoever reads a
    ratio is told it where another number stands beside. Without one a ratio is of "the scenario's own figure"; a class
    that inherits one and has a ``figure`` of its own sets its own.
    """

    def points(self, workload: Workload, launcher: Launcher, machine: Machine) -> Sequence[Point]:
        """What is measured, in the order in which it is. Raises ``InputError`` for what cannot be on this machine."""
        ...

    def round(self, system: System, point: Point) -> Any:
        """One burst of about 0.2 to 0.5 s; rounds interleave the systems, A B C and C B A. Plain JSON."""
        ...

    def figure(self, sample: Any) -> float:
        """The one number of a round that systems are compared by: larger is better (calls or sequences a second).

        The ratio of two systems is taken within each round. One that is not finite fails the system's row.
        """
        ...

    def summarise(self, point: Point, samples: Sequence[Any]) -> Mapping[str, Any]:
        """The row's ``metrics``; intervals by bootstrap over rounds (``encast.measure.statistics``)."""
        ...


def make_scenario(config: Mapping[str, Any]) -> Scenario:
    """The scenario that a YAML describes; raises ``InputError`` for what is none, and for fields it does not take."""
    target = config.get("scenario")
    if not isinstance(target, str):
        raise InputError(f"scenario {config.get('name')}: its YAML needs scenario, module:Class")
    options = {name: value for name, value in config.items() if name not in ("name", "scenario")}
    try:
        cls = load_object(target)
        signature(cls).bind(**options)
    except TypeError as error:
        raise InputError(f"scenario {config.get('name')}: {error}; correct its YAML") from None
    with blamed(config):
        made = cls(**options)
    if not isinstance(made, Scenario):
        raise InputError(f"{target} is no scenario; it needs points, round, figure and summarise")
    return made


@contextmanager
def blamed(config: Mapping[str, Any]) -> Iterator[None]:
    """An error that arises in the file that the user's YAML names is theirs to mend, and no defect of encast."""
    try:
        yield
    except EncastError:
        raise
    except Exception as error:
        where = line_in(str(config["scenario"]).rpartition(":")[0], error)
        if where is None:
            raise
        raise InputError(f"{where}: {type(error).__name__}: {error}; correct scenario {config['name']}") from None
