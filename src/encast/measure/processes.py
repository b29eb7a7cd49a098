"""What processes do, read from /proc by somebody else: a backend cannot say that it uses less than it does."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

__all__ = [
    "CpuTime",
    "allowed_cpus",
    "cpu_time",
    "end",
    "family",
    "forget_peak",
    "proportional_bytes",
    "resident_bytes",
    "runnable_threads",
    "started",
]

_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class CpuTime:
    """Processor time of some processes since they began, and when it was read; nanoseconds."""

    at: int
    cpu: int


def family(root: int) -> list[int]:
    """The process, all of its session, and all their descendants; only those that are left when it has ended."""
    parents: dict[int, int] = {}
    members: set[int] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(*_GONE):
            fields = _stat(f"/proc/{name}")
            parents[int(name)] = int(fields[1])
            if int(fields[3]) == root:
                members.add(int(name))
    if root in parents:
        members.add(root)
    grown = True
    while grown:
        children = {pid for pid, parent in parents.items() if parent in members} - members
        members |= children
        grown = bool(children)
    return sorted(members)


def started(pid: int) -> int | None:
    """When a process began, in clock ticks since the machine did; None when it is gone. Numbers are used again."""
    with contextlib.suppress(*_GONE):
        return int(_stat(f"/proc/{pid}")[19])
    return None


def end(known: Mapping[int, int | None], root: int) -> None:
    """Kills the processes of ``known`` (number to ``started``) that still run, and the family of ``root``.

    All are stopped before the first is killed, so that none starts another meanwhile, nor leaves its children to
    somebody else, where they could not be found.
    """
    stopped: set[int] = set()
    while True:
        found = {pid for pid, began in known.items() if began is not None and started(pid) == began}
        new = (found | set(family(root))) - stopped
        if not new:
            break
        for pid in new:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= new
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def cpu_time(processes: Iterable[int]) -> CpuTime:
    """Of all their threads, also ended ones, and of the children that they have waited for."""
    total = 0
    for pid in processes:
        with contextlib.suppress(*_GONE, OSError):
            reaped = sum(int(ticks) for ticks in _stat(f"/proc/{pid}")[13:15])
            # The clock of a whole process (clock_getcpuclockid): utime and stime in /proc count in ticks of 10 ms.
            total += time.clock_gettime_ns(~pid << 3 | 2) + reaped * _TICK_NS
    return CpuTime(time.perf_counter_ns(), total)


def runnable_threads(processes: Iterable[int]) -> int:
    """Threads that run or wait for a processor at this moment."""
    count = 0
    for task in _tasks(processes):
        with contextlib.suppress(*_GONE):
            count += _stat(task)[0] == "R"
    return count


def allowed_cpus(processes: Iterable[int]) -> set[int]:
    """The processors that any of their threads may run on."""
    found: set[int] = set()
    for task in _tasks(processes):
        with contextlib.suppress(*_GONE):
            found |= os.sched_getaffinity(int(task.rpartition("/")[2]))
    return found


def resident_bytes(processes: Iterable[int], *, peak: bool = False) -> int:
    """Resident memory, now or at its peak (``VmHWM``); pages that processes share count in each."""
    return sum(_field(f"/proc/{pid}/status", "VmHWM" if peak else "VmRSS") for pid in processes)


def forget_peak(processes: Iterable[int]) -> bool:
    """Has ``resident_bytes`` count peaks from now on; returns whether the kernel does so, see proc(5), clear_refs."""
    for pid in processes:
        try:
            with open(f"/proc/{pid}/clear_refs", "w") as file:
                file.write("5")
        except OSError:  # gone, another's, or a kernel without it
            return False
    return True


def proportional_bytes(processes: Iterable[int]) -> int:
    """Proportional set size: a page that n processes have mapped counts as an n-th in each of them."""
    return sum(_field(f"/proc/{pid}/smaps_rollup", "Pss") for pid in processes)


def _stat(folder: str) -> list[str]:
    """The fields of ``stat`` after the name, which may hold anything: state, ppid, pgrp, session, ..."""
    with open(f"{folder}/stat") as file:
        return file.read().rpartition(")")[2].split()


def _tasks(processes: Iterable[int]) -> Iterator[str]:
    for pid in processes:
        with contextlib.suppress(*_GONE):
            yield from (f"/proc/{pid}/task/{name}" for name in os.listdir(f"/proc/{pid}/task"))


def _field(path: str, name: str) -> int:
    """A line ``name:  N kB`` in bytes; 0 when it is not there."""
    with contextlib.suppress(*_GONE), open(path) as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0
