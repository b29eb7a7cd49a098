"""Made-up machines, as ``/proc`` and ``/sys`` trees for ``encast.machine.read_machine``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from encast.machine import Machine, format_cpu_list, read_machine

_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
CGROUP2_MOUNT = "35 25 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    """Files by their paths below ``root``."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@dataclass(frozen=True)
class MadeUp:
    """A machine whose packages are alike. Caches, nodes and numbers are laid over the cores in order.

    ``numbering``: ``apart`` (siblings are c and c + cores), ``adjacent`` (2c and 2c + 1), ``in_turn`` (apart, and the
    packages take the numbers by turns). ``slower``: how many cores at the end of each package are a hybrid processor's
    slower ones, which have one hardware thread. ``cores_a_cache`` 0: the kernel shows no last-level cache.
    """

    packages: int = 1
    cores: int = 4  # of a package
    threads: int = 1  # of a core
    numbering: str = "apart"
    cores_a_cache: int | None = None  # None: one cache a package
    nodes_a_package: int = 1
    slower: int = 0
    offline: Collection[int] = ()
    allowed: str | None = None  # the affinity mask
    cpuset: str | None = None
    mems: str | None = None  # the memory nodes that the cpuset allows
    quota: str | None = None  # the text of cpu.max
    virtual: bool = False
    without_memory: Collection[int] = field(default=())

    def core_cpus(self) -> list[list[list[int]]]:
        """package → core → its CPUs, offline ones included."""
        total = self.packages * self.cores
        found: list[list[list[int]]] = []
        for package in range(self.packages):
            cores = []
            for core in range(self.cores):
                threads = 1 if core >= self.cores - self.slower else self.threads
                index = package * self.cores + core
                if self.numbering == "adjacent":
                    cpus = [index * self.threads + thread for thread in range(threads)]
                elif self.numbering == "in_turn":
                    cpus = [core * self.packages + package + thread * total for thread in range(threads)]
                else:
                    cpus = [index + thread * total for thread in range(threads)]
                cores.append(cpus)
            found.append(cores)
        return found

    def files(self) -> dict[str, str]:
        """The tree's files, as the kernel would write them."""
        online: list[int] = []
        present: list[int] = []
        efficient: list[int] = []
        cpu_folder = "sys/devices/system/cpu"
        files: dict[str, str] = {}
        for package, cores in enumerate(self.core_cpus()):
            alive = [[cpu for cpu in core if cpu not in self.offline] for core in cores]
            mates = [cpu for core in alive for cpu in core]
            online += mates
            present += [cpu for core in cores for cpu in core]
            size = self.cores if self.cores_a_cache is None else self.cores_a_cache
            for index, core in enumerate(alive):
                if index >= self.cores - self.slower:
                    efficient += core
                for cpu in core:
                    topology = f"{cpu_folder}/cpu{cpu}/topology"
                    files[f"{topology}/core_cpus_list"] = f"{format_cpu_list(core)}\n"
                    files[f"{topology}/package_cpus_list"] = f"{format_cpu_list(mates)}\n"
                    files[f"{topology}/physical_package_id"] = f"{package}\n"
                    caches = [("1", "Data", "48K", core)]
                    if size:
                        first = index // size * size
                        sharing = [other for group in alive[first : first + size] for other in group]
                        caches.append(("3", "Unified", "32M", sharing))
                    for number, (level, kind, size_text, shared) in enumerate(caches):
                        cache = f"{cpu_folder}/cpu{cpu}/cache/index{number}"
                        files[f"{cache}/level"] = f"{level}\n"
                        files[f"{cache}/type"] = f"{kind}\n"
                        files[f"{cache}/size"] = f"{size_text}\n"
                        files[f"{cache}/shared_cpu_list"] = f"{format_cpu_list(shared)}\n"
            share = self.cores // self.nodes_a_package
            for part in range(self.nodes_a_package):
                node = package * self.nodes_a_package + part
                last = self.cores if part == self.nodes_a_package - 1 else (part + 1) * share
                here = [cpu for core in alive[part * share : last] for cpu in core]
                memory = 0 if node in self.without_memory else 64 << 20
                files[f"sys/devices/system/node/node{node}/cpulist"] = f"{format_cpu_list(here)}\n"
                files[f"sys/devices/system/node/node{node}/meminfo"] = f"Node {node} MemTotal: {memory} kB\n"
        files[f"{cpu_folder}/online"] = f"{format_cpu_list(online)}\n"
        files[f"{cpu_folder}/present"] = f"{format_cpu_list(present)}\n"
        if efficient:
            files["sys/devices/cpu_atom/cpus"] = f"{format_cpu_list(efficient)}\n"
        flags = "fpu avx2" + (" hypervisor" if self.virtual else "")
        files["proc/cpuinfo"] = f"processor\t: 0\nmodel name\t: Made-up Processor 9000\nflags\t\t: {flags}\n"
        files["proc/self/status"] = f"Cpus_allowed_list:\t{self.allowed or format_cpu_list(online)}\n"
        if self.mems is not None:
            files["proc/self/status"] += f"Mems_allowed_list:\t{self.mems}\n"
        if self.quota is not None or self.cpuset is not None:
            files["proc/self/mountinfo"] = CGROUP2_MOUNT
            files["proc/self/cgroup"] = "0::/pod\n"
            files["sys/fs/cgroup/pod/cpu.max"] = f"{self.quota or 'max 100000'}\n"
            if self.cpuset is not None:
                files["sys/fs/cgroup/pod/cpuset.cpus.effective"] = f"{self.cpuset}\n"
        return files

    def read(self) -> Machine:
        """The facts that encast reads from the tree, which is made in memory: it has up to a thousand files."""
        with tempfile.TemporaryDirectory(dir=_MEMORY) as root:
            return read_machine(write_tree(Path(root), self.files()))


# The machine of the scaling article: 2 packages of 24 cores with two threads each, siblings 48 apart.
ARTICLE = MadeUp(packages=2, cores=24, threads=2)
# 8 cache complexes of 8 cores on one node.
EPYC = MadeUp(cores=64, threads=2, cores_a_cache=8)
# Quick cores with two threads, slower ones with one.
HYBRID = MadeUp(cores=24, threads=2, slower=16, numbering="adjacent")
