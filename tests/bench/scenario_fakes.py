"""A system without processes, on a clock that only its own calls move, and a machine of any size."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from encast.batch import Batch
from encast.bench.launcher import Launcher
from encast.bench.peers.base import BackendSpec
from encast.bench.scenarios.base import Point
from encast.bench.system import ColdStart
from encast.machine import CgroupLimits, Core, HugePages, Machine, MemoryNode

Service = Callable[[int, int, int], float]
"""(instance, number of the call, sequences) → nanoseconds."""


def machine(cores: int, nodes: int = 1, quota: float | None = None, wide: int = 1) -> Machine:
    """``wide`` hardware threads a core, the same number of cores on every node."""
    each = cores // nodes
    cpus = tuple(range(cores * wide))
    return Machine(
        processor="made up",
        virtual=False,
        online=cpus,
        affinity=cpus,
        cores=tuple(Core(tuple(range(core, cores * wide, cores)), core // each, core // each) for core in range(cores)),
        caches=(),
        nodes=tuple(MemoryNode(node, cpus[node * each : (node + 1) * each], None) for node in range(nodes)),
        cgroup=CgroupLimits(cpus=quota),
        memory_bytes=None,
        governor=None,
        huge_pages=HugePages(None, None, 0, 0),
        allocator="glibc",
    )


ONE = Launcher("one", instances=1, cross_node=True)
"""One instance on all cores."""


class FakeSystem:
    """Answers in the time that ``service`` says."""

    def __init__(self, service: Service, name: str = "fake", instances: int = 1) -> None:
        self.backend = BackendSpec(name, "nowhere:Nothing", "f32")
        self.service, self.instances = service, instances
        self.bound: list[Batch] = []
        self.split = False
        self.round_number = 0
        self.asked: list[dict[str, Any]] = []
        self.streams: list[list[int]] = []
        self._calls = itertools.count()

    def at(self, point: Point) -> FakeSystem:
        self.instances = point.instances
        self.bind(point.batches, split=point.split)
        return self

    def open(self, batches: Sequence[Batch] | None = None) -> ColdStart:
        self.bound = list(batches or [])
        turn = next(self._calls)
        return ColdStart(1.0, 2.0 + turn % 3, 0.5 if batches else 0.0)

    def bind(self, batches: Sequence[Batch], *, split: bool = False) -> None:
        self.bound, self.split = list(batches), split

    def burst(
        self, *, calls: int | None = None, seconds: float | None = None, in_step: bool = False
    ) -> list[list[int]]:
        assert (calls is None) != (seconds is None)
        assert calls is not None or not in_step
        self.asked.append({"calls": calls, "seconds": seconds, "in_step": in_step})
        times: list[list[int]] = []
        for instance in range(self.instances):
            own: list[int] = []
            while len(own) < calls if calls is not None else sum(own) < (seconds or 0) * 1e9:
                batch = self.bound[len(own) % len(self.bound)]
                share = batch.seqs // self.instances if self.split else batch.seqs
                own.append(round(self.service(instance, next(self._calls), share)))
            times.append(own)
        return times

    def stream(self, arrivals_ns: Sequence[int], batches: Sequence[Batch]) -> list[tuple[int, int, int]]:
        """First come, first served, by whichever instance is free first."""
        self.streams.append(list(arrivals_ns))
        free = [0] * self.instances
        served = []
        for number, due in enumerate(arrivals_ns):
            instance = int(np.argmin(free))
            begun = max(due, free[instance])
            ended = begun + round(self.service(instance, number, batches[number % len(batches)].seqs))
            free[instance] = ended
            served.append((due, begun, ended))
        return served


def constant(milliseconds: float) -> Service:
    return lambda instance, call, sequences: milliseconds * 1e6


def exponential(milliseconds: float, seed: int = 0) -> Service:
    rng = np.random.default_rng(seed)
    return lambda instance, call, sequences: rng.exponential(milliseconds * 1e6)
