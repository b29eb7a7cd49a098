"""The facts about a machine, read from made-up ``/proc`` and ``/sys`` trees."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from machines import ARTICLE, CGROUP2_MOUNT, EPYC, HYBRID, MadeUp
from machines import write_tree as tree

from encast import machine as machine_module
from encast.machine import (
    Core,
    default_threads,
    format_cpu_list,
    parse_cpu_list,
    pin_order,
    read_machine,
    usable_cores,
)

CPUINFO = "processor\t: 0\nmodel name\t: Made-up Processor 9000\nflags\t\t: fpu avx2\n"
MIB = 1 << 20


def topology(cores: list[str], online: str, packages: list[int] | None = None) -> dict[str, str]:
    """The files of cores given as lists of CPUs (``"0,4"``), as the kernel would write them."""
    files = {"sys/devices/system/cpu/online": online + "\n", "proc/cpuinfo": CPUINFO}
    for index, siblings in enumerate(cores):
        for cpu in parse_cpu_list(siblings):
            folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
            files[f"{folder}/thread_siblings_list"] = siblings + "\n"
            files[f"{folder}/physical_package_id"] = f"{packages[index] if packages else 0}\n"
    return files


def with_cgroup2(files: dict[str, str], group: str, limits: Mapping[str, str]) -> dict[str, str]:
    return {
        **files,
        "proc/self/cgroup": f"0::{group}\n",
        "proc/self/mountinfo": "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + CGROUP2_MOUNT,
        **{f"sys/fs/cgroup/{name}": text for name, text in limits.items()},
    }


FOUR_CORES = topology(["0", "1", "2", "3"], "0-3")


@pytest.mark.parametrize("text", ["3-1", "-2", "0-65536", "0-99999999999", "1..2", "a", "1-2-3", "1-", "٣"])
def test_what_is_no_kernel_list(text: str) -> None:
    with pytest.raises(ValueError, match="is no number and no range of numbers"):
        parse_cpu_list(text)


@pytest.mark.parametrize("text", ["0-3,8,10-11", "5", "", "0,2,4"])
def test_lists_are_written_as_the_kernel_does(text: str) -> None:
    assert format_cpu_list(parse_cpu_list(text)) == text
    assert format_cpu_list([2, 1, 2]) == "1-2"


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0-3,8,10-11\n", (0, 1, 2, 3, 8, 10, 11)), ("5", (5,)), ("\n", ()), ("3,1-2", (1, 2, 3))],
)
def test_kernel_lists(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == numbers


def test_an_empty_tree_is_unknown_and_no_error(tmp_path: Path) -> None:
    machine = read_machine(tmp_path)
    assert machine.processor == "unknown"
    assert len(machine.online) == os.cpu_count()
    assert machine.affinity == machine.online
    assert machine.cgroup == machine_module.CgroupLimits()
    assert machine.caches == ()
    assert machine.governor is None
    assert machine.memory_bytes is None
    assert default_threads(machine) >= 1


def test_damaged_files_are_unknown_too(tmp_path: Path) -> None:
    files = with_cgroup2(
        {
            **FOUR_CORES,
            "sys/devices/system/cpu/cpu0/topology/thread_siblings_list": "zero\n",
            "sys/devices/system/cpu/cpu0/topology/physical_package_id": "-1\n",
            "sys/devices/system/cpu/cpu0/cache/index0/level": "one\n",
            "sys/devices/system/cpu/cpu0/cache/index0/size": "big\n",
            "proc/self/status": "Cpus_allowed_list:\tsome\n",
        },
        "/",
        {"cpu.max": "1000 of it\n", "memory.max": "?\n"},
    )
    machine = read_machine(tree(tmp_path, files))
    assert [core.cpus for core in machine.cores] == [(0,), (1,), (2,), (3,)]
    assert machine.cores[0].package == 0
    assert machine.caches == ()
    assert machine.cgroup.cpus is None
    assert machine.affinity == (0, 1, 2, 3)


def test_siblings_numbered_side_by_side(tmp_path: Path) -> None:
    machine = read_machine(tree(tmp_path, topology(["0-1", "2-3"], "0-3")))
    assert [core.cpus for core in machine.cores] == [(0, 1), (2, 3)]
    assert machine.threads_per_core == 2
    assert default_threads(machine) == 2
    assert pin_order(machine) == (0, 2, 1, 3)
    assert usable_cores(machine) == [0, 2]


def test_siblings_numbered_apart(tmp_path: Path) -> None:
    machine = read_machine(tree(tmp_path, topology(["0,4", "1,5", "2,6", "3,7"], "0-7")))
    assert default_threads(machine) == 4
    assert pin_order(machine) == (0, 1, 2, 3, 4, 5, 6, 7)
    assert usable_cores(machine) == [0, 1, 2, 3]


def test_offline_cpus_do_not_count(tmp_path: Path) -> None:
    # CPU 5, the sibling of 1, and the whole core 2,6 are off.
    files = topology(["0,4", "1,5", "2,6", "3,7"], "0-1,3-4,7") | {"sys/devices/system/cpu/present": "0-7\n"}
    machine = read_machine(tree(tmp_path, files))
    assert machine.offline == (2, 5, 6)
    assert [core.cpus for core in machine.cores] == [(0, 4), (1,), (3, 7)]
    assert default_threads(machine) == 3
    assert pin_order(machine) == (0, 1, 3, 4, 7)


def test_affinity_leaves_single_hardware_threads(tmp_path: Path) -> None:
    files = topology(["0,4", "1,5", "2,6", "3,7"], "0-7") | {
        "proc/self/status": "Name:\tpython\nCpus_allowed:\t34\nCpus_allowed_list:\t2,4-5\n"
    }
    machine = read_machine(tree(tmp_path, files))
    assert machine.affinity == (2, 4, 5)
    assert [core.cpus for core in machine.allowed_cores] == [(4,), (5,), (2,)]
    assert default_threads(machine) == 3


def test_the_calling_threads_mask_goes_first(tmp_path: Path) -> None:
    files = FOUR_CORES | {
        "proc/self/status": "Cpus_allowed_list:\t0-3\n",
        "proc/thread-self/status": "Cpus_allowed_list:\t3\n",
    }
    assert read_machine(tree(tmp_path, files)).affinity == (3,)


def test_cpus_that_a_container_numbers_anew_go_by_the_kernels_numbers(tmp_path: Path) -> None:
    files = {**topology(["0", "1"], "0-1"), "proc/self/status": "Cpus_allowed_list:\t6-7\n"}
    machine = read_machine(tree(tmp_path, files))
    assert machine.affinity == (6, 7)
    assert usable_cores(machine) == [6, 7]


def test_memory_nodes_order_the_pinning(tmp_path: Path) -> None:
    files = topology(["0,4", "1,5", "2,6", "3,7"], "0-7", packages=[0, 1, 0, 1]) | {
        "sys/devices/system/node/node0/cpulist": "0,2,4,6\n",
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:       1024 kB\n",
        "sys/devices/system/node/node1/cpulist": "1,3,5,7\n",
        "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:       0 kB\n",
    }
    machine = read_machine(tree(tmp_path, files))
    assert [(node.index, node.cpus, node.memory_bytes) for node in machine.nodes] == [
        (0, (0, 2, 4, 6), MIB),
        (1, (1, 3, 5, 7), 0),
    ]
    assert [(core.node, core.package) for core in machine.cores] == [(0, 0), (1, 1), (0, 0), (1, 1)]
    assert pin_order(machine) == (0, 2, 1, 3, 4, 6, 5, 7)


def test_the_articles_machine() -> None:
    machine = ARTICLE.read()
    assert len(machine.cores) == 48
    assert machine.cores[24] == Core((24, 72), 1, 1, 24)
    assert default_threads(machine) == 48
    assert pin_order(machine)[:25] == (*range(24), 24)
    assert pin_order(machine)[48:] == (*range(48, 96),)


@pytest.mark.parametrize(
    ("mems", "allowed", "nodes"),
    [(None, None, (0, 1)), ("0-1", (0, 1), (0, 1)), ("1", (1,), (1,)), ("?", None, (0, 1))],
)
def test_memory_nodes_of_the_cpuset(
    mems: str | None,
    allowed: tuple[int, ...] | None,
    nodes: tuple[int, ...],
) -> None:
    machine = dataclasses.replace(ARTICLE, mems=mems).read()
    assert (machine.memory_allowed, machine.memory_nodes) == (allowed, nodes)
    assert machine.affinity == tuple(range(96))


def test_last_level_caches() -> None:
    machine = EPYC.read()
    assert [core.domain for core in machine.cores] == [8 * (core // 8) for core in range(64)]
    # Where the lowest CPU of a cache is offline, the next one names it.
    machine = dataclasses.replace(EPYC, offline=(8, 72)).read()
    assert {core.domain for core in machine.cores} == {0, 9, 16, 24, 32, 40, 48, 56}


def test_without_a_last_level_cache_the_package_counts() -> None:
    machine = MadeUp(packages=2, cores=2, cores_a_cache=0).read()
    assert [core.domain for core in machine.cores] == [0, 0, 2, 2]


def test_a_cache_for_each_virtual_cpu_is_made_up() -> None:
    """Hypervisors show that by default; on real processors it may be true."""
    made_up = MadeUp(packages=2, cores=4, cores_a_cache=1)
    machine = made_up.read()
    assert [core.domain for core in machine.cores] == list(range(8))
    machine = dataclasses.replace(made_up, virtual=True).read()
    assert [core.domain for core in machine.cores] == [0] * 4 + [4] * 4


def test_teams_fill_one_cache_after_the_other(tmp_path: Path) -> None:
    """Though the numbers go over the caches by turns."""
    files = topology(["0", "1", "2", "3"], "0-3")
    for cpu in range(4):
        folder = f"sys/devices/system/cpu/cpu{cpu}/cache/index3"
        files |= {f"{folder}/level": "3\n", f"{folder}/shared_cpu_list": f"{cpu % 2},{cpu % 2 + 2}\n"}
    assert pin_order(read_machine(tree(tmp_path, files))) == (0, 2, 1, 3)


def test_slower_cores_come_last() -> None:
    machine = HYBRID.read()
    assert [core.efficient for core in machine.cores] == [False] * 8 + [True] * 16
    assert pin_order(machine)[:9] == (0, 2, 4, 6, 8, 10, 12, 14, 16)


def test_caches(tmp_path: Path) -> None:
    files = topology(["0,2", "1,3"], "0-3")
    for index, (level, kind, size, shared) in enumerate(
        [("1", "Data", "48K", "0,2"), ("1", "Instruction", "32K", "0,2"), ("3", "Unified", "36M", "0-3")]
    ):
        folder = f"sys/devices/system/cpu/cpu0/cache/index{index}"
        for name, value in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", shared)):
            files[f"{folder}/{name}"] = value + "\n"
    caches = read_machine(tree(tmp_path, files)).caches
    assert [(cache.level, cache.kind, cache.bytes, cache.shared_by) for cache in caches] == [
        (1, "data", 48 << 10, 2),
        (1, "instruction", 32 << 10, 2),
        (3, "unified", 36 * MIB, 4),
    ]


@pytest.mark.parametrize(
    ("cpu_max", "quota", "threads"),
    [
        ("max 100000", None, 4),
        ("50000 100000", 0.5, 1),  # half a CPU still needs a thread
        ("250000 100000", 2.5, 2),
        ("800000 100000", 8.0, 4),
        ("100000", 1.0, 1),
    ],
)
def test_cgroup2_quota(tmp_path: Path, cpu_max: str, quota: float | None, threads: int) -> None:
    files = with_cgroup2(FOUR_CORES, "/kubepods/pod1", {"kubepods/pod1/cpu.max": cpu_max + "\n"})
    machine = read_machine(tree(tmp_path, files))
    assert machine.cgroup.cpus == quota
    assert default_threads(machine) == threads
    assert usable_cores(machine) == list(range(threads))


@pytest.mark.parametrize(("quota", "threads"), [(0.5, 1), (1.0, 1), (1.5, 1)])
def test_a_real_quota_is_seen(quota: float, threads: int) -> None:
    """Needs to be root where control groups can be made."""
    with _real_cgroup(quota) as group:
        code = (
            f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
            "from encast.machine import default_threads, read_machine\n"
            "machine = read_machine(); print(machine.cgroup.cpus, default_threads(machine))"
        )
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        assert done.stdout == f"{quota} {threads}\n"


@contextlib.contextmanager
def _real_cgroup(quota: float) -> Iterator[Path]:
    """A group of this machine, version 2 or 1, with a quota; skips where none can be made."""
    made = None
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        folder = Path(before.split()[4]) / f"encast-test-{os.getpid()}"
        kind = after.split()
        if kind[0] == "cgroup2":
            limits = {"cpu.max": f"{round(quota * 100_000)} 100000"}
        elif kind[0] == "cgroup" and "cpu" in kind[-1].split(","):
            limits = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": str(round(quota * 100_000))}
        else:
            continue
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            for name, text in limits.items():
                (folder / name).write_text(text)
        except OSError:  # its parent does not hand the controller down
            folder.rmdir()
            continue
        made = folder
        break
    if made is None:
        pytest.skip("no control group with a CPU quota can be made here")
    try:
        yield made
    finally:
        made.rmdir()


def test_cgroup2_the_tightest_ancestor_counts(tmp_path: Path) -> None:
    files = with_cgroup2(
        FOUR_CORES,
        "/a/b/c",
        {
            "a/cpu.max": "150000 100000\n",
            "a/b/cpu.max": "300000 100000\n",
            "a/b/c/cpu.max": "max 100000\n",
            "a/memory.max": "max\n",
            "a/b/memory.max": f"{700 * MIB}\n",
            "a/b/c/memory.max": f"{800 * MIB}\n",
            "a/b/c/cpuset.cpus.effective": "1-3\n",
            "elsewhere/cpu.max": "1000 100000\n",
        },
    )
    machine = read_machine(tree(tmp_path, files))
    assert machine.cgroup.cpus == 1.5
    assert machine.cgroup.memory_bytes == 700 * MIB
    assert machine.cgroup.cpuset == (1, 2, 3)
    assert machine.affinity == (1, 2, 3)
    assert usable_cores(machine) == [1]


def test_cgroup2_inside_a_namespace(tmp_path: Path) -> None:
    """The group is the mount's root, and the path may point above it."""
    for group in ("/", "/../other"):
        files = with_cgroup2(FOUR_CORES, group, {"cpu.max": "200000 100000\n"})
        assert read_machine(tree(tmp_path, files)).cgroup.cpus == 2.0


V1_MOUNTS = (
    "30 23 0:26 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "31 23 0:27 {root} /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
    "32 23 0:28 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "33 23 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)
V1_GROUPS = "4:memory:{group}\n3:cpuset:{group}\n2:cpu,cpuacct:{group}\n1:name=systemd:{group}\n0::/\n"


@pytest.mark.parametrize(
    ("root", "group", "inside"),
    [("/", "/docker/f00", "docker/f00/"), ("/docker/f00", "/docker/f00", ""), ("/", "/", "")],
    ids=["host", "container that sees the host's path", "root group"],
)
def test_cgroup1_limits(tmp_path: Path, root: str, group: str, inside: str) -> None:
    files = FOUR_CORES | {
        "proc/self/mountinfo": V1_MOUNTS.format(root=root),
        "proc/self/cgroup": V1_GROUPS.format(group=group),
        f"sys/fs/cgroup/cpu,cpuacct/{inside}cpu.cfs_quota_us": "50000\n",
        f"sys/fs/cgroup/cpu,cpuacct/{inside}cpu.cfs_period_us": "20000\n",
        f"sys/fs/cgroup/cpuset/{inside}cpuset.cpus": "0-2\n",
        f"sys/fs/cgroup/memory/{inside}memory.limit_in_bytes": f"{256 * MIB}\n",
    }
    machine = read_machine(tree(tmp_path, files))
    assert machine.cgroup == machine_module.CgroupLimits(2.5, (0, 1, 2), 256 * MIB)
    assert default_threads(machine) == 2


def test_cgroup1_without_limits(tmp_path: Path) -> None:
    files = FOUR_CORES | {
        "proc/self/mountinfo": V1_MOUNTS.format(root="/"),
        "proc/self/cgroup": V1_GROUPS.format(group="/"),
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert read_machine(tree(tmp_path, files)).cgroup == machine_module.CgroupLimits()


def test_mount_points_with_spaces(tmp_path: Path) -> None:
    files = FOUR_CORES | {
        "proc/self/mountinfo": "30 23 0:26 / /sys/fs/my\\040groups rw - cgroup2 cgroup2 rw\n",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/my groups/cpu.max": "300000 100000\n",
    }
    assert read_machine(tree(tmp_path, files)).cgroup.cpus == 3.0


def test_pages_governor_allocator_and_names(tmp_path: Path) -> None:
    files = FOUR_CORES | {
        "proc/cpuinfo": CPUINFO.replace("avx2", "avx2 hypervisor"),
        "proc/meminfo": "MemTotal:    2048 kB\nHugePages_Total:   6\nHugePages_Free:    4\nHugepagesize:   2048 kB\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "sys/kernel/mm/transparent_hugepage/defrag": "always defer [defer+madvise] madvise never\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
        "proc/self/maps": "7f00-7f01 r-xp 00000000 08:01 1 /usr/lib/x86_64-linux-gnu/libjemalloc.so.2\n",
    }
    machine = read_machine(tree(tmp_path, files))
    assert (machine.processor, machine.virtual) == ("Made-up Processor 9000", True)
    assert machine.memory_bytes == 2 * MIB
    assert machine.huge_pages == machine_module.HugePages("madvise", 2 * MIB, 6, 4, "defer+madvise")
    assert machine.governor == "powersave"
    assert machine.allocator == "jemalloc"


def test_the_real_machine_agrees_with_the_kernel() -> None:
    machine = read_machine()
    assert set(machine.affinity) == os.sched_getaffinity(0)
    assert sorted(cpu for core in machine.cores for cpu in core.cpus) == list(machine.online)
    assert set(pin_order(machine)) == set(machine.affinity)


def test_a_narrower_mask_is_seen() -> None:
    code = (
        "import os; cpu = max(os.sched_getaffinity(0)); os.sched_setaffinity(0, {cpu});"
        "from encast.machine import usable_cores; assert usable_cores() == [cpu], usable_cores()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
