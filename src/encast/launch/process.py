"""What a child process needs before its command begins: its CPUs, its memory node, and to end with its parent."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from collections.abc import Callable
from pathlib import Path

from encast.launch.memory import MemoryBinding
from encast.launch.placement import Placement
from encast.machine import format_cpu_list

__all__ = ["adopt_orphans", "bind", "descendants", "die_with_parent", "preexec", "signal_name", "wake_promptly"]

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# linux/sched/types.h; the numbers of sched_setattr and sched_getattr are those of x86-64
_SCHED_SETATTR, _SCHED_GETATTR = 314, 315
_SCHED_FLAG_RESET_ON_FORK = 1
_SHORT_SLICE_NS = 100_000  # the shortest that the kernel takes


class _SchedAttr(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64), ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32), ("runtime", ctypes.c_uint64), ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )  # fmt: skip


_libc = ctypes.CDLL(None, use_errno=True)


def bind(pid: int, placement: Placement) -> None:
    """Binds all threads that a running process has to the placement's CPUs; threads that it starts later inherit that.

    The memory node of another process cannot be set: what it has touched before stays where it is. Raises
    ``OSError`` when the process is gone or the CPUs are out of reach.
    """
    os.sched_setaffinity(pid, placement.cpus)
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), placement.cpus)
        except ProcessLookupError:  # the thread has ended meanwhile
            continue


def preexec(
    placement: Placement, memory: MemoryBinding | None = None, *, group: bool = False, adopt: bool = False
) -> Callable[[], None]:
    """What ``subprocess.Popen`` should call in the child, as ``preexec_fn``, before the command replaces it.

    Binds the child to the placement's CPUs and, as ``memory`` can, to its node, makes it the leader of a process
    group of its own when ``group``, keeps its daemons its descendants when ``adopt`` (``adopt_orphans``), and has the
    kernel kill it when the calling *thread* ends, however that ends: start children from a thread that outlives them.
    What cannot be set ends the child with exit code 126 and a line on stderr; a memory node that is refused leaves the
    child unbound, with a line on stderr.
    """
    parent, cpus = os.getpid(), placement.cpus

    # Between fork and exec: nothing here may need a lock that another thread of the parent could have held.
    def prepare() -> None:
        try:
            if group:
                os.setpgid(0, 0)
            if adopt:
                adopt_orphans()  # holds across exec
            die_with_parent(signal.SIGKILL, parent)
            os.sched_setaffinity(0, cpus)
            problem = memory.apply(placement.node) if memory is not None else None
            if problem is not None:
                os.write(2, f"encast: memory is not bound: {problem}\n".encode())
        except OSError as error:
            text = f"encast: error: cannot be bound to CPUs {format_cpu_list(cpus)}: {error.strerror}\n"
            os.write(2, text.encode())
            os._exit(126)

    return prepare


def die_with_parent(signum: int, parent: int) -> None:
    """Has the kernel send this process the signal when its parent's thread ends; at once, if that has ended already."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def adopt_orphans() -> None:
    """Makes descendants whose parents end children of this process, instead of the system's first one."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def wake_promptly() -> bool:
    """Gives the calling thread, and none that it starts, short time slices: when it wakes it comes before threads that
    compute, while its share of the processor stays. Returns whether the kernel took it; Linux does from 6.12 on
    (Documentation/scheduler/sched-eevdf.rst), and before that it says so too, without effect.
    """
    if platform.machine() != "x86_64":
        return False
    attr = _SchedAttr()
    size = ctypes.c_uint(ctypes.sizeof(attr))
    if _libc.syscall(_SCHED_GETATTR, 0, ctypes.byref(attr), size, 0) != 0:
        return False
    attr.flags |= _SCHED_FLAG_RESET_ON_FORK
    attr.runtime = _SHORT_SLICE_NS
    return bool(_libc.syscall(_SCHED_SETATTR, 0, ctypes.byref(attr), 0) == 0)


def signal_name(number: int) -> str:
    """``SIGKILL``; ``SIGRTMIN+3`` for the real-time signals, most of which Python has no names for."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN{number - signal.SIGRTMIN:+d}"


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def descendants(ancestor: int) -> dict[int, int]:
    """The processes below one, pid to process group; those that have ended and wait to be reaped left out."""
    children: dict[int, list[tuple[int, int]]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # ended meanwhile
            continue
        # The name in parentheses may hold anything, parentheses included.
        state, parent, group = stat[stat.rindex(")") + 2 :].split()[:3]
        if state not in "ZX":
            children.setdefault(int(parent), []).append((int(entry), int(group)))
    found: dict[int, int] = {}
    parents = [ancestor]
    while parents:
        for child, own_group in children.get(parents.pop(), ()):
            found[child] = own_group
            parents.append(child)
    return found
