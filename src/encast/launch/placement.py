"""From topology to places for instances: which CPUs each gets, on which memory node."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from encast.errors import InputError
from encast.machine import Core, Machine, cores_in_order, format_cpu_list

__all__ = ["PRESETS", "Placement", "place"]

PRESETS = ("latency", "throughput")


@dataclass(frozen=True)
class Placement:
    """The place of one instance.

    ``cpus``: one hardware thread of every core in the order in which threads should take them; with ``smt`` the
    cores' other hardware threads after these. ``node``: the memory node of all of them, None when they span several
    or this process may have no memory of it. ``threads``: how many to run. Not ``bound``: a quota pays for fewer cores
    than there are, and ``cpus`` are all hardware threads that may be used, other instances' too.
    """

    cpus: tuple[int, ...]
    node: int | None
    threads: int
    smt: bool = False
    bound: bool = True


def place(
    machine: Machine,
    *,
    instances: int | None = None,
    cores_per_instance: int | None = None,
    preset: str | None = None,
    core_list: Collection[int] | None = None,
    nodes: Collection[int] | None = None,
    smt: bool = False,
    cross_node: bool = False,
) -> tuple[Placement, ...]:
    """Places for instances, disjoint where they are bound, in the order of their nodes and CPUs.

    Cores are those of the affinity mask and the cpuset, of ``core_list`` (CPU numbers) and of ``nodes``. An instance
    stays within one last-level cache where its cores fit into one, always within one memory node unless
    ``cross_node``, and takes a hybrid processor's slower cores last. Threads of all instances together are no more
    than the cgroup quota pays for, at least one. Rounded down, since threads beyond it are all stopped for the rest of
    every period; rounded up for ``throughput``, which loses latency by that and no time. Where it pays for fewer cores
    than these, no instance is bound to some of them, since every container of the host would choose the same: it may
    use all, or those of its node where instances load all nodes alike.

    ``latency`` makes each instance as quick as can be: one a last-level cache, with all its cores (a hybrid
    processor's quick ones). Where caches differ or a quota pays for a part, with the size that leaves the fewest cores
    idle. ``throughput``: one a core, so that no thread waits for another. None: as ``latency``.
    ``instances`` or ``cores_per_instance`` go before the preset: the other one follows as the largest that fits,
    cores per instance within one last-level cache for ``latency``, within one node else. ``smt`` gives instances
    all hardware threads of their cores instead of one.

    Raises ``InputError``, saying what would fit.
    """
    for name, value in (("instances", instances), ("cores_per_instance", cores_per_instance)):
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}; it must be at least 1")
    if preset is not None and preset not in PRESETS:
        raise InputError(f"the preset is {preset!r}; {' and '.join(PRESETS)} are known")
    usable = _usable(machine, core_list, nodes)
    cores = usable if smt else [replace(core, cpus=core.cpus[:1]) for core in usable]
    quota = machine.cgroup.cpus
    paid = None if quota is None else max(1, (math.ceil if preset == "throughput" else math.floor)(quota))
    room = _Room(cores, paid, cross_node)
    bound = paid is None or paid >= sum(len(core.cpus) for core in cores)
    if preset != "throughput" and instances is None and cores_per_instance is None:
        room = room.quick().even()
    instances, cores_per_instance = _sizes(room, instances, cores_per_instance, preset)
    teams = sorted(_teams(room.cores, instances, cores_per_instance), key=lambda team: (team[0].node, team[0].cpus))
    reaches = teams if bound else _reaches(usable, teams)
    placements = []
    for team, reach in zip(teams, reaches, strict=True):
        nodes = {core.node for core in reach}
        (node,) = nodes if len(nodes) == 1 else (None,)
        threads, paid_threads = len(_in_turns(team)), room.threads(instances)
        placements.append(
            Placement(
                _in_turns(reach),
                node if node in machine.memory_nodes else None,
                threads if paid_threads is None else min(threads, paid_threads),
                smt,
                bound,
            )
        )
    return tuple(placements)


def _in_turns(cores: Sequence[Core]) -> tuple[int, ...]:
    turns = range(max(len(core.cpus) for core in cores))
    return tuple(core.cpus[turn] for turn in turns for core in cores if turn < len(core.cpus))


def _reaches(usable: Sequence[Core], teams: Sequence[Sequence[Core]]) -> list[list[Core]]:
    """The cores on which each team may run when it is not bound to its own."""
    there = Counter(core.node for core in usable)
    busy = Counter(core.node for team in teams for core in team)
    within = all(len({core.node for core in team}) == 1 for team in teams)
    # Else those of every container would be on the first node.
    if within and len({busy[node] / there[node] for node in there}) == 1:
        return [[core for core in usable if core.node == team[0].node] for team in teams]
    return [list(usable)] * len(teams)


class _Room:
    """How many instances fit: on the cores, and within the ``paid`` threads of a quota."""

    def __init__(self, cores: list[Core], paid: int | None, cross_node: bool) -> None:
        self.cores, self.cross_node, self._paid = cores, cross_node, paid
        widest = max(len(core.cpus) for core in cores)
        # Cores whose hardware threads the quota pays for; what is left of one core's is one core all the same.
        self.cores_paid = len(cores) if self._paid is None else min(len(cores), max(1, self._paid // widest))

    def quick(self) -> _Room:
        """Without a hybrid processor's slower cores, unless there are no others."""
        quick = [core for core in self.cores if not core.efficient]
        return _Room(quick or self.cores, self._paid, self.cross_node)

    def even(self) -> _Room:
        """Equally many cores of one last-level cache and the other: so many that most are busy, of equals the most."""
        caches: dict[object, list[Core]] = defaultdict(list)
        for core in self.cores:
            caches[_domain(core)].append(core)

        def busy(size: int) -> int:
            return size * min(sum(len(cores) >= size for cores in caches.values()), self.cores_paid // size)

        size = max(range(1, max(map(len, caches.values())) + 1), key=lambda size: (busy(size), size))
        chosen = [core for cores in caches.values() if len(cores) >= size for core in cores[:size]]
        return _Room(chosen, self._paid, self.cross_node)

    def threads(self, instances: int) -> int | None:
        """The most threads an instance that the quota pays for; None without quota."""
        return None if self._paid is None else max(1, self._paid // instances)

    def slots(self, size: int, *, cross_node: bool | None = None, one_cache: bool = False) -> int:
        """How many instances of ``size`` cores fit, each within a node, or within a last-level cache."""
        groups: dict[object, int] = defaultdict(int)
        across = self.cross_node if cross_node is None else cross_node
        for core in self.cores:
            groups[_domain(core) if one_cache else None if across else core.node] += 1
        return min(sum(count // size for count in groups.values()), self.cores_paid // size)

    def largest(self, instances: int, *, one_cache: bool = False) -> int:
        """The most cores an instance with which so many fit; 0 when not even one core each is left."""
        sizes = range(self.cores_paid // instances, 0, -1)
        return next((size for size in sizes if self.slots(size, one_cache=one_cache) >= instances), 0)

    def __str__(self) -> str:
        counts: dict[int, int] = defaultdict(int)
        for core in self.cores:
            counts[core.node] += 1
        here = " and ".join(f"{_cores(count)} on node {node}" for node, count in sorted(counts.items()))
        if self._paid is None:
            return f"there are {here}"
        return f"there are {here}, and the cgroup's CPU quota pays for {_cores(self.cores_paid)}"


def _sizes(room: _Room, instances: int | None, size: int | None, preset: str | None) -> tuple[int, int]:
    """The number of instances and the cores of each."""
    if instances is None and size is None:
        if preset == "throughput":
            return room.slots(1), 1
        size = room.largest(1, one_cache=True)
        return room.slots(size, one_cache=True), size
    if instances is None:
        assert size is not None
        # Nobody asked for a number: rather idle cores than an instance over two caches, where one can hold it.
        instances = room.slots(size, one_cache=True) or room.slots(size)
    elif size is None:
        size = room.largest(instances)
        if preset == "latency":
            size = room.quick().largest(instances, one_cache=True) or room.largest(instances, one_cache=True) or size
    if size == 0 or instances == 0 or room.slots(size) < instances:
        raise InputError(_misfit(room, max(instances, 1), size))
    return instances, size


def _misfit(room: _Room, instances: int, size: int) -> str:
    asked = f"{_instances(instances)} of {_cores(max(size, 1))} {'does' if instances == 1 else 'do'} not fit"
    fits = []
    if size and (most := room.slots(size)):
        fits.append(f"{_instances(most)} of {_cores(size)}")
    if largest := room.largest(instances):
        fits.append(f"{_instances(instances)} of {_cores(largest)}")
    if not fits:
        fits.append(f"{_instances(room.slots(1))} of 1 core")
    said = f"{asked}: {room}; {' or '.join(fits)} would"
    if size and not room.cross_node and room.slots(size, cross_node=True) >= instances:
        said += "; or let instances span memory nodes (--cross-node)"
    return said


def _teams(cores: Iterable[Core], instances: int, size: int) -> list[list[Core]]:
    """Cores for each instance; the caller has counted that they fit.

    Whole caches go first, those with the most room, so that few instances share little. Then instances that no
    cache holds take from few caches of one node, then from few nodes.
    """
    free: dict[tuple[int, int, bool], list[Core]] = defaultdict(list)
    for core in cores:
        free[_domain(core)].append(core)
    teams: list[list[Core]] = []
    while len(teams) < instances:
        in_node: dict[int, int] = defaultdict(int)
        for (node, _, _), left in free.items():
            in_node[node] += len(left)
        fitting = [domain for domain, left in free.items() if len(left) >= size]
        if fitting:
            best = min(fitting, key=lambda d: (d[2], -(in_node[d[0]] // size), -(len(free[d]) // size), d))
            teams.append([free[best].pop(0) for _ in range(size)])
            continue
        roomy = [node for node, count in in_node.items() if count >= size]
        order = roomy[:1] if roomy else sorted(in_node, key=lambda node: (-in_node[node], node))
        team: list[Core] = []
        for node in order:
            team += _gather({d: left for d, left in free.items() if d[0] == node}, size - len(team))
        teams.append(team)
    return teams


def _gather(free: dict[tuple[int, int, bool], list[Core]], size: int) -> list[Core]:
    """Takes up to ``size`` cores: the largest caches whole, the rest from the smallest that has enough."""
    team: list[Core] = []
    while len(team) < size and any(free.values()):
        missing = size - len(team)
        enough = [domain for domain, left in free.items() if len(left) >= missing]
        if enough:
            chosen = min(enough, key=lambda domain: (domain[2], len(free[domain]), domain))
        else:
            chosen = min((d for d in free if free[d]), key=lambda domain: (domain[2], -len(free[domain]), domain))
        count = min(missing, len(free[chosen]))
        team += [free[chosen].pop(0) for _ in range(count)]
    return team


def _domain(core: Core) -> tuple[int, int, bool]:
    """Cores of equal speed that share a node and a last-level cache: a team waits for its slowest core."""
    return core.node, core.domain, core.efficient


def _usable(machine: Machine, core_list: Collection[int] | None, nodes: Collection[int] | None) -> list[Core]:
    """The cores to choose from in the order of pinning, reduced to the CPUs that may be used."""
    wanted = set(machine.affinity if core_list is None else core_list)
    if core_list is not None:
        if not wanted:
            raise InputError(f"the list of CPUs is empty; this process may use {format_cpu_list(machine.affinity)}")
        offline = wanted & set(machine.offline)
        if offline:
            raise InputError(
                f"CPU {format_cpu_list(offline)} is offline; this process may use {format_cpu_list(machine.affinity)}"
            )
        absent = wanted - set(machine.online)
        if absent:
            raise InputError(f"there is no CPU {format_cpu_list(absent)}; there are {format_cpu_list(machine.online)}")
        barred = wanted - set(machine.affinity)
        if barred:
            raise InputError(
                f"CPU {format_cpu_list(barred)} lies outside of this process's affinity mask or cpuset; it may use "
                f"{format_cpu_list(machine.affinity)}"
            )
    if nodes is not None:
        reach = sorted({core.node for core in machine.allowed_cores})
        absent = set(nodes) - {node.index for node in machine.nodes}
        if absent or not nodes:
            named = f"there is no memory node {format_cpu_list(absent)}" if absent else "the list of nodes is empty"
            raise InputError(f"{named}; there are {format_cpu_list(node.index for node in machine.nodes)}")
        barred = set(nodes) - set(reach)
        if barred:
            raise InputError(
                f"memory node {format_cpu_list(barred)} has no CPU that this process may use; nodes "
                f"{format_cpu_list(reach)} have"
            )
    cores = []
    for core in cores_in_order(machine):
        cpus = tuple(cpu for cpu in core.cpus if cpu in wanted)
        if cpus and (nodes is None or core.node in nodes):
            cores.append(replace(core, cpus=cpus))
    if not cores:
        raise InputError(
            f"no CPU of the list {format_cpu_list(wanted)} is on memory node {format_cpu_list(nodes or ())}; name CPUs "
            "of these nodes, or no nodes"
        )
    return cores


def _cores(count: int) -> str:
    return f"{count} core{'' if count == 1 else 's'}"


def _instances(count: int) -> str:
    return f"{count} instance{'' if count == 1 else 's'}"
