"""Binding memory to a node: by numactl where it is, else by the system call, else not at all, with the reason."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from typing import Literal

from encast.machine import Machine, format_cpu_list

__all__ = ["MemoryBinding", "memory_binding"]

# linux/mempolicy.h and the kernel's tables of system calls
_MPOL_DEFAULT = 0
_MPOL_BIND = 2
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class MemoryBinding:
    """How the memory of instances is bound to their nodes.

    ``reason`` completes "memory is bound by numactl", "by set_mempolicy", or "is not bound".
    """

    how: Literal["numactl", "set_mempolicy", "none"]
    reason: str = ""

    def prefix(self, node: int | None) -> list[str]:
        """What stands before the command."""
        return ["numactl", f"--membind={node}", "--"] if self.how == "numactl" and node is not None else []

    def apply(self, node: int | None) -> str | None:
        """Binds the calling thread, and what it becomes or starts, where that is not the prefix's work.

        Returns what the kernel has against it, None when all is well.
        """
        if self.how != "set_mempolicy" or node is None:
            return None
        return _set_mempolicy(_MPOL_BIND, node)

    def __str__(self) -> str:
        return f"memory is not bound: {self.reason}" if self.how == "none" else f"memory is bound by {self.how}"


def memory_binding(machine: Machine) -> MemoryBinding:
    """The first way that works here. With one memory node, or one that is allowed, there is nothing to bind."""
    nodes = machine.memory_nodes
    if len(nodes) <= 1:
        if sum(node.memory_bytes != 0 for node in machine.nodes) <= 1:
            return MemoryBinding("none", "there is one memory node")
        allowed = format_cpu_list(machine.memory_allowed or ())
        return MemoryBinding("none", f"this process may have memory of node {allowed} alone (cpuset.mems)")
    numactl = shutil.which("numactl")
    # In a container numactl may be there and its system calls be forbidden.
    if numactl is not None and _runs([numactl, f"--membind={nodes[0]}", "--", "true"]):
        return MemoryBinding("numactl")
    refused = _set_mempolicy(_MPOL_DEFAULT, None)
    if refused is None:
        return MemoryBinding("set_mempolicy")
    return MemoryBinding("none", f"{refused}; containers need the capability SYS_NICE for it (docker --cap-add)")


def _runs(command: list[str]) -> bool:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _set_mempolicy(mode: int, node: int | None) -> str | None:
    """None, or why the kernel refused. See set_mempolicy(2); it takes the number of bits in the mask plus one."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return f"the number of set_mempolicy on {platform.machine()} is not known"
    if node is None:
        result = _libc.syscall(ctypes.c_long(number), ctypes.c_int(mode), None, ctypes.c_ulong(0))
    else:
        mask = (ctypes.c_ulong * (node // _BITS + 1))()
        mask[node // _BITS] = 1 << node % _BITS
        bits = ctypes.c_ulong(len(mask) * _BITS + 1)
        result = _libc.syscall(ctypes.c_long(number), ctypes.c_int(mode), mask, bits)
    if result == 0:
        return None
    where = "" if node is None else f" to node {node}"
    return f"the kernel refuses set_mempolicy{where} ({os.strerror(ctypes.get_errno())})"
