"""What processes do, read from /proc by somebody else: a backend cannot say that it uses less than it does."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]

__all__ = [
    "CpuTime",
    "allowed_cpus",
    "cpu_time",
    "end",
    "family",
    "forget_peak",
    "peak_bytes",
    "proportional_bytes",
    "resident_bytes",
    "runnable_threads",
]

_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


@dataclass(frozen=True)
class CpuTime:
    """Processor time of some processes since they began, and when it was read; nanoseconds."""

    at: int
    cpu: int


def family(root: int) -> list[psutil.Process]:
    """The process, all of its session, and all their descendants; only those that are left when it has ended."""
    found: set[psutil.Process] = set()
    for pid in {root, *filter(lambda pid: _session(pid) == root, psutil.pids())}:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            found |= {process, *process.children(recursive=True)}
    return sorted(found, key=lambda process: process.pid)


def end(known: Iterable[psutil.Process], root: int) -> None:
    """Kills the processes ``known`` that still run, and the family of ``root``.

    All are stopped before the first is killed, so that none starts another meanwhile, nor leaves its children to
    somebody else, where they could not be found.
    """
    stopped: set[psutil.Process] = set()
    while new := {process for process in {*known, *family(root)} - stopped if process.is_running()}:
        for process in new:
            with contextlib.suppress(psutil.Error):
                process.suspend()
        stopped |= new
    for process in stopped:
        with contextlib.suppress(psutil.Error):
            process.kill()


# psutil finds processes and tells one from a later one of its number. It has no clock of a process in nanoseconds, no
# peak, and no state or CPUs of a single thread: these are read here.


def cpu_time(processes: Iterable[psutil.Process]) -> CpuTime:
    """Of all their threads, also ended ones, and of the children that they have waited for."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            times = process.cpu_times()
            # The clock of a whole process (clock_getcpuclockid): /proc counts in ticks of 10 ms.
            total += time.clock_gettime_ns(~process.pid << 3 | 2)
            total += 1e9 * (times.children_user + times.children_system)
    return CpuTime(time.perf_counter_ns(), round(total))


def runnable_threads(processes: Iterable[psutil.Process]) -> int:
    """Threads that run or wait for a processor at this moment."""
    count = 0
    for thread in _threads(processes):
        with contextlib.suppress(*_GONE), open(f"/proc/{thread}/stat") as file:
            count += file.read().rpartition(")")[2].split()[0] == "R"  # the name before may hold anything
    return count


def allowed_cpus(processes: Iterable[psutil.Process]) -> set[int]:
    """The processors that any of their threads may run on."""
    found: set[int] = set()
    for thread in _threads(processes):
        with contextlib.suppress(*_GONE):
            found |= os.sched_getaffinity(thread)
    return found


def resident_bytes(processes: Iterable[psutil.Process]) -> int:
    """Resident memory now; pages that processes share count in each."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total


def peak_bytes(processes: Iterable[psutil.Process]) -> int:
    """``resident_bytes`` at its peak, since a process began or ``forget_peak``."""
    return sum(_kilobytes(process.pid, "status", "VmHWM") for process in processes) << 10


def forget_peak(processes: Iterable[psutil.Process]) -> bool:
    """Has ``peak_bytes`` count from now on; returns whether the kernel does so, see proc(5), clear_refs."""
    for process in processes:
        try:
            with open(f"/proc/{process.pid}/clear_refs", "w") as file:
                file.write("5")
        except OSError:  # gone, another's, or a kernel without it
            return False
    return True


def proportional_bytes(processes: Iterable[psutil.Process]) -> int:
    """Proportional set size: a page that n processes have mapped counts as an n-th in each of them."""
    return sum(_kilobytes(process.pid, "smaps_rollup", "Pss") for process in processes) << 10


def _session(pid: int) -> int | None:
    with contextlib.suppress(*_GONE):
        return os.getsid(pid)
    return None


def _threads(processes: Iterable[psutil.Process]) -> Iterator[int]:
    for process in processes:
        with contextlib.suppress(*_GONE):
            yield from map(int, os.listdir(f"/proc/{process.pid}/task"))


def _kilobytes(pid: int, file: str, name: str) -> int:
    """The number of a line ``name:  N kB``; 0 when it is not there."""
    with contextlib.suppress(*_GONE), open(f"/proc/{pid}/{file}") as lines:
        for line in lines:
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    return 0
