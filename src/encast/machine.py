"""What this machine is: processors, cores, caches, memory nodes, and the limits set on this process.

Everything is read below one root folder, so that tests can point it at a made-up ``/proc`` and ``/sys``.
Files that are absent (other kernels, containers that hide ``/sys``) mean "unknown", never an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

__all__ = [
    "Cache",
    "CgroupLimits",
    "Core",
    "HugePages",
    "Machine",
    "MemoryNode",
    "cores_in_order",
    "default_threads",
    "format_cpu_list",
    "parse_cpu_list",
    "pin_order",
    "quota_alone_limits",
    "read_machine",
    "this_machine",
    "usable_cores",
]

# cgroup v1 says "no limit" with the largest multiple of the page size in 63 bits.
_V1_NO_LIMIT = 1 << 60

# More than any kernel can be built for (CONFIG_NR_CPUS).
_MOST_CPUS = 1 << 16


@dataclass(frozen=True)
class Core:
    """One physical core: the online CPUs (hardware threads) that share it.

    ``domain`` names the cores that share its last-level cache: the lowest of their CPUs. ``efficient``: one of the
    slower cores of a hybrid processor.
    """

    cpus: tuple[int, ...]
    package: int
    node: int
    domain: int = 0
    efficient: bool = False


@dataclass(frozen=True)
class Cache:
    """One kind of cache of the first online CPU: ``bytes`` of it serve ``shared_by`` online CPUs."""

    level: int
    kind: str  # data, instruction, unified
    bytes: int
    shared_by: int


@dataclass(frozen=True)
class MemoryNode:
    """A NUMA node: online CPUs and bytes of memory (None when unknown)."""

    index: int
    cpus: tuple[int, ...]
    memory_bytes: int | None


@dataclass(frozen=True)
class CgroupLimits:
    """The tightest limits along this process's control groups; None where there is none."""

    cpus: float | None = None  # quota divided by period: CPUs' worth of time
    cpuset: tuple[int, ...] | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class HugePages:
    """Transparent huge pages (``always``, ``madvise``, ``never``, None when unknown) and reserved ones.

    ``defrag``: whether a page that is not free at once is made when it is asked for (``always``, ``defer``,
    ``defer+madvise``, ``madvise``, ``never``, None when unknown).
    """

    transparent: str | None
    page_bytes: int | None
    reserved: int
    free: int
    defrag: str | None = None


@dataclass(frozen=True)
class Machine:
    """The facts; see the module's docstring for where they come from."""

    processor: str
    virtual: bool
    online: tuple[int, ...]
    affinity: tuple[int, ...]  # online CPUs that the calling thread may use
    cores: tuple[Core, ...]
    caches: tuple[Cache, ...]
    nodes: tuple[MemoryNode, ...]
    cgroup: CgroupLimits
    memory_bytes: int | None
    governor: str | None
    huge_pages: HugePages
    allocator: str  # glibc, musl, jemalloc, tcmalloc, mimalloc
    offline: tuple[int, ...] = ()  # CPUs that are there and switched off
    memory_allowed: tuple[int, ...] | None = None  # memory nodes that the cpuset leaves this process; None: unknown

    @property
    def threads_per_core(self) -> int:
        """The most hardware threads that a core has."""
        return max(len(core.cpus) for core in self.cores)

    @property
    def memory_nodes(self) -> tuple[int, ...]:
        """The nodes that have memory, as far as is known, of which this process may have some."""
        return tuple(
            node.index
            for node in self.nodes
            if node.memory_bytes != 0 and (self.memory_allowed is None or node.index in self.memory_allowed)
        )

    @property
    def allowed_cores(self) -> tuple[Core, ...]:
        """The cores of which the affinity mask leaves at least one CPU, reduced to those CPUs."""
        allowed = set(self.affinity)
        reduced = (replace(core, cpus=tuple(cpu for cpu in core.cpus if cpu in allowed)) for core in self.cores)
        return tuple(core for core in reduced if core.cpus)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The numbers of a kernel list such as ``0-3,8,10-11``; empty for an empty one.

    Raises ``ValueError`` for another text, and for numbers that no CPU or memory node can have.
    """
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if not part:
            continue
        found = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part)
        low, high = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if not low <= high < _MOST_CPUS:
            raise ValueError(f"{part!r} is no number and no range of numbers")
        numbers.update(range(low, high + 1))
    return tuple(sorted(numbers))


def format_cpu_list(numbers: Iterable[int]) -> str:
    """The kernel's way to write a list, ``0-3,8``; the reverse of ``parse_cpu_list``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def default_threads(machine: Machine) -> int:
    """One thread a physical core within the affinity mask, no more than the cgroup quota pays for, at least one.

    A quota is rounded down: threads beyond it would all be stopped for the rest of the period.
    """
    threads = len(machine.allowed_cores)
    if machine.cgroup.cpus is not None:
        threads = min(threads, int(machine.cgroup.cpus))
    return max(threads, 1)


def quota_alone_limits(machine: Machine) -> bool:
    """Whether the cgroup quota pays for fewer cores than the affinity mask has.

    Then threads should be bound to no CPUs: every container of the host would choose the same ones, the lowest.
    """
    return default_threads(machine) < len(machine.allowed_cores)


def cores_in_order(machine: Machine) -> list[Core]:
    """The allowed cores: quick ones first, then by memory node, package, last-level cache and number."""
    return sorted(
        machine.allowed_cores, key=lambda core: (core.efficient, core.node, core.package, core.domain, core.cpus)
    )


def pin_order(machine: Machine) -> tuple[int, ...]:
    """The CPUs of the affinity mask in the order in which threads should take them.

    First one hardware thread of every core, node by node and cache by cache, so that a small team stays on one
    node and within one last-level cache, a hybrid processor's slower cores last; then the cores' second hardware
    threads in the same order, and so on.
    """
    cores = cores_in_order(machine)
    rounds = max((len(core.cpus) for core in cores), default=0)
    return tuple(core.cpus[turn] for turn in range(rounds) for core in cores if turn < len(core.cpus))


def usable_cores(machine: Machine | None = None) -> list[int]:
    """The CPUs for the threads of one process: ``default_threads`` of them, in ``pin_order``.

    Where ``quota_alone_limits``, only their number counts.
    """
    machine = machine if machine is not None else this_machine()
    return list(pin_order(machine)[: default_threads(machine)])


def this_machine() -> Machine:
    """The facts of this machine, read anew: masks and quotas may change while a process runs."""
    return read_machine()


def read_machine(root: Path | str = "/") -> Machine:
    """Reads the facts below ``root``."""
    tree = _Tree(Path(root))
    online = _online(tree)
    allowed = _allowed(tree, "Cpus") or online
    if not set(allowed) & set(online):
        # LXCFS shows a container as many CPUs as it has, numbered anew; threads are bound by the kernel's numbers.
        online = allowed
    nodes = _nodes(tree, online)
    cpuinfo = tree.text("proc/cpuinfo") or ""
    name = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    virtual = flags is not None and "hypervisor" in flags[1].split()
    limits = _cgroup_limits(tree)
    return Machine(
        processor=name[1].strip() if name else "unknown",
        virtual=virtual,
        online=online,
        affinity=_affinity(online, allowed, limits.cpuset),
        cores=_cores(tree, online, nodes, virtual),
        caches=_caches(tree, online),
        nodes=nodes,
        cgroup=limits,
        memory_bytes=_kilobytes(tree.text("proc/meminfo"), "MemTotal"),
        governor=tree.word(f"sys/devices/system/cpu/cpu{online[0]}/cpufreq/scaling_governor"),
        huge_pages=_huge_pages(tree),
        allocator=_allocator(tree),
        offline=tuple(cpu for cpu in tree.cpu_list("sys/devices/system/cpu/present") or () if cpu not in online),
        memory_allowed=_allowed(tree, "Mems") or None,
    )


class _Tree:
    """The one door to files: text below a root, None where a file cannot be read."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def text(self, path: str) -> str | None:
        try:
            return (self.root / path.lstrip("/")).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def word(self, path: str) -> str | None:
        text = self.text(path)
        return text.strip() or None if text is not None else None

    def integer(self, path: str) -> int | None:
        try:
            return int(self.text(path) or "")
        except ValueError:
            return None

    def cpu_list(self, path: str) -> tuple[int, ...] | None:
        text = self.text(path)
        try:
            return parse_cpu_list(text) or None if text is not None else None
        except ValueError:
            return None

    def numbered(self, folder: str, prefix: str) -> Iterator[int]:
        """The numbers N of the entries ``prefixN`` of a folder, ascending."""
        try:
            names = os.listdir(self.root / folder)
        except OSError:
            return
        suffixes = (name[len(prefix) :] for name in names if name.startswith(prefix))
        yield from sorted(int(suffix) for suffix in suffixes if suffix.isdigit())


def _online(tree: _Tree) -> tuple[int, ...]:
    listed = tree.cpu_list("sys/devices/system/cpu/online")
    if listed:
        return listed
    processors = re.findall(r"^processor\s*:\s*(\d+)", tree.text("proc/cpuinfo") or "", re.MULTILINE)
    return tuple(int(number) for number in processors) or tuple(range(os.cpu_count() or 1))


def _allowed(tree: _Tree, what: str) -> tuple[int, ...]:
    """The calling thread's affinity mask (``Cpus``) or memory nodes (``Mems``) as the kernel reports them.

    They may name CPUs that are offline and nodes that are not there. Empty when unknown.
    """
    status = tree.text("proc/thread-self/status") or tree.text("proc/self/status") or ""
    listed = re.search(rf"^{what}_allowed_list:\s*(\S+)$", status, re.MULTILINE)
    try:
        return parse_cpu_list(listed[1]) if listed else ()
    except ValueError:
        return ()


def _affinity(online: tuple[int, ...], allowed: tuple[int, ...], cpuset: tuple[int, ...] | None) -> tuple[int, ...]:
    """The online CPUs of the mask. It already lies within the cpuset, except where files disagree."""
    usable = tuple(cpu for cpu in online if cpu in allowed)
    return tuple(cpu for cpu in usable if cpuset is None or cpu in cpuset) or usable


def _cores(tree: _Tree, online: tuple[int, ...], nodes: Iterable[MemoryNode], virtual: bool) -> tuple[Core, ...]:
    node_of = {cpu: node.index for node in nodes for cpu in node.cpus}
    efficient = _efficient(tree)
    seen: set[int] = set()
    cores = []
    for cpu in online:
        if cpu in seen:
            continue
        folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
        # core_cpus_list is the newer name (Linux 5.4) of thread_siblings_list.
        siblings = tree.cpu_list(f"{folder}/core_cpus_list") or tree.cpu_list(f"{folder}/thread_siblings_list")
        cpus = tuple(c for c in siblings or () if c in online and c not in seen)
        cpus = cpus if cpu in cpus else (cpu,)
        seen.update(cpus)
        package = tree.integer(f"{folder}/physical_package_id")
        cores.append(
            Core(
                cpus,
                package if package is not None and package >= 0 else 0,
                node_of.get(cpu, 0),
                _domain(tree, online, cpu),
                cpu in efficient,
            )
        )
    if virtual and len({core.domain for core in cores}) == len(cores):
        # Hypervisors that know nothing of the host's caches show every virtual CPU one of its own.
        first: dict[int, int] = {}
        cores = [replace(core, domain=first.setdefault(core.node, core.cpus[0])) for core in cores]
    return tuple(cores)


def _domain(tree: _Tree, online: tuple[int, ...], cpu: int) -> int:
    """The lowest online CPU that shares this one's third-level cache, or else its package."""
    folder = f"sys/devices/system/cpu/cpu{cpu}"
    for index in tree.numbered(f"{folder}/cache", "index"):
        if (tree.integer(f"{folder}/cache/index{index}/level") or 0) >= 3:
            shared = tree.cpu_list(f"{folder}/cache/index{index}/shared_cpu_list")
            if shared and cpu in shared:
                return min(other for other in shared if other in online)
    # package_cpus_list is the newer name (Linux 5.4) of core_siblings_list.
    package = tree.cpu_list(f"{folder}/topology/package_cpus_list") or tree.cpu_list(
        f"{folder}/topology/core_siblings_list"
    )
    return min((other for other in package or () if other in online), default=online[0])


def _efficient(tree: _Tree) -> frozenset[int]:
    """The CPUs of a hybrid processor's slower cores, which have a counter unit (PMU) of their own; none elsewhere."""
    slower = (tree.cpu_list(f"sys/devices/{unit}/cpus") for unit in ("cpu_atom", "cpu_lowpower"))
    return frozenset(cpu for cpus in slower for cpu in cpus or ())


def _caches(tree: _Tree, online: tuple[int, ...]) -> tuple[Cache, ...]:
    folder = f"sys/devices/system/cpu/cpu{online[0]}/cache"
    caches = []
    for index in tree.numbered(folder, "index"):
        level = tree.integer(f"{folder}/index{index}/level")
        size = re.fullmatch(r"(\d+)([KMG]?)", tree.word(f"{folder}/index{index}/size") or "")
        if level is None or size is None:
            continue
        shared = tree.cpu_list(f"{folder}/index{index}/shared_cpu_list") or (online[0],)
        kind = (tree.word(f"{folder}/index{index}/type") or "unified").lower()
        scale = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[size[2]]
        caches.append(Cache(level, kind, int(size[1]) * scale, len(set(shared) & set(online)) or 1))
    return tuple(caches)


def _nodes(tree: _Tree, online: tuple[int, ...]) -> tuple[MemoryNode, ...]:
    nodes = []
    for index in tree.numbered("sys/devices/system/node", "node"):
        folder = f"sys/devices/system/node/node{index}"
        cpus = tuple(cpu for cpu in tree.cpu_list(f"{folder}/cpulist") or () if cpu in online)
        nodes.append(MemoryNode(index, cpus, _kilobytes(tree.text(f"{folder}/meminfo"), "MemTotal")))
    return tuple(nodes) or (MemoryNode(0, online, _kilobytes(tree.text("proc/meminfo"), "MemTotal")),)


def _kilobytes(meminfo: str | None, field: str) -> int | None:
    found = re.search(rf"\b{field}:\s+(\d+) kB", meminfo or "")
    return int(found[1]) << 10 if found else None


def _huge_pages(tree: _Tree) -> HugePages:
    chosen, defrag = (
        re.search(r"\[([\w+]+)\]", tree.text(f"sys/kernel/mm/transparent_hugepage/{name}") or "")
        for name in ("enabled", "defrag")
    )
    meminfo = tree.text("proc/meminfo") or ""
    total, free = (re.search(rf"^HugePages_{field}:\s+(\d+)", meminfo, re.MULTILINE) for field in ("Total", "Free"))
    return HugePages(
        chosen[1] if chosen else None,
        _kilobytes(meminfo, "Hugepagesize"),
        int(total[1]) if total else 0,
        int(free[1]) if free else 0,
        defrag[1] if defrag else None,
    )


def _allocator(tree: _Tree) -> str:
    """The malloc in use, by the libraries that this process has mapped (a preloaded one is among them)."""
    mapped = tree.text("proc/self/maps") or ""
    for name in ("jemalloc", "tcmalloc", "mimalloc"):
        if re.search(rf"/lib{name}[^/\s]*\.so", mapped):
            return name
    return "musl" if re.search(r"/ld-musl-", mapped) else "glibc"


def _cgroup_limits(tree: _Tree) -> CgroupLimits:
    """The tightest limits over every control group that this process is in, and over their ancestors.

    Version 1 has a hierarchy a controller, version 2 has one for all; some systems mount both.
    """
    quotas: list[float] = []
    cpusets: list[tuple[int, ...]] = []
    memories: list[int] = []
    for controllers, folder in _cgroup_folders(tree):
        if controllers is None:
            quota, _, period = (tree.word(f"{folder}/cpu.max") or "").partition(" ")
            period = period or "100000"
            if quota.isdecimal() and period.isdecimal() and int(period) > 0:
                quotas.append(int(quota) / int(period))
            cpuset = tree.cpu_list(f"{folder}/cpuset.cpus.effective")
            memory = tree.integer(f"{folder}/memory.max")
        else:
            if "cpu" in controllers:
                allowed = tree.integer(f"{folder}/cpu.cfs_quota_us")
                every = tree.integer(f"{folder}/cpu.cfs_period_us")
                if allowed is not None and allowed > 0 and every is not None and every > 0:
                    quotas.append(allowed / every)
            cpuset = tree.cpu_list(f"{folder}/cpuset.cpus") if "cpuset" in controllers else None
            memory = tree.integer(f"{folder}/memory.limit_in_bytes") if "memory" in controllers else None
        if cpuset is not None:
            cpusets.append(cpuset)
        if memory is not None and 0 <= memory < _V1_NO_LIMIT:
            memories.append(memory)
    common = tuple(sorted(set.intersection(*map(set, cpusets)))) if cpusets else None
    return CgroupLimits(min(quotas, default=None), common or None, min(memories, default=None))


def _cgroup_folders(tree: _Tree) -> Iterator[tuple[frozenset[str] | None, str]]:
    """The folders of this process's groups and of their ancestors: (controllers, or None for version 2; folder)."""
    mounts: list[tuple[frozenset[str] | None, str, str]] = []  # controllers, root of the mount, where it is mounted
    for line in (tree.text("proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if len(fields) < 5 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        root, where = (re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field) for field in fields[3:5])
        controllers = frozenset(kind[-1].split(",")) if kind[0] == "cgroup" else None
        mounts.append((controllers, root, where))
    for line in (tree.text("proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        names, _, group = rest.partition(":")
        wanted = None if number == "0" and not names else frozenset(names.split(","))
        for controllers, root, where in mounts:
            if (controllers is None) != (wanted is None):
                continue
            if controllers is not None and wanted is not None and not controllers & wanted:
                continue
            # A container may see its own group as the mount's root, and its path from the host's root.
            path = PurePosixPath(group)
            inside = path.relative_to(root) if path.is_relative_to(root) else PurePosixPath()
            if ".." in inside.parts:
                inside = PurePosixPath()
            for part in (inside, *inside.parents):
                yield wanted, str(PurePosixPath(where) / part)
            break
