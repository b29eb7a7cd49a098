"""Runs a command as on a machine without AMX: the kernel refuses it and its children the tile registers.

    python benchmarks/without_amx.py encast bench study=sparse experiment=sparse

A process has to ask Linux for the tiles before it may use them (``arch_prctl(ARCH_REQ_XCOMP_PERM)``,
https://docs.kernel.org/arch/x86/xstate.html). A seccomp filter answers EPERM, so that a runtime which asks takes its
next best kernels; one which does not ask ends by SIGILL at its first tile instruction and cannot pass unseen. CPUID
still names AMX: a runtime that decides by it alone needs its own switch beside this (oneDNN: ``ONEDNN_MAX_CPU_ISA``).
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER_MODE = 38, 22, 2
_X86_64, _ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM = 0xC000003E, 158, 0x1023
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
_ALLOW, _EPERM = 0x7FFF0000, 0x00050001  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO | EPERM


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def refuse_tiles() -> None:
    """Takes the right to ask for AMX from this process and all that it starts, for good.

    Raises:
        OSError: the kernel takes no filter.
    """
    # struct seccomp_data: the call's number at 0, the architecture at 4, the first argument at 16.
    rules = (
        (_LOAD, 0, 0, 4),
        (_JUMP_EQUAL, 0, 5, _X86_64),
        (_LOAD, 0, 0, 0),
        (_JUMP_EQUAL, 0, 3, _ARCH_PRCTL),
        (_LOAD, 0, 0, 16),
        (_JUMP_EQUAL, 0, 1, _ARCH_REQ_XCOMP_PERM),
        (_RETURN, 0, 0, _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    )
    program = _Program(len(rules), b"".join(struct.pack("=HBBI", *rule) for rule in rules))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_PR_SET_SECCOMP, _FILTER_MODE, ctypes.byref(program)):
        raise OSError(ctypes.get_errno(), "prctl: no seccomp filter")


if __name__ == "__main__":
    if len(sys.argv) < 2 or platform.machine() != "x86_64":
        sys.exit("usage, on x86_64: python benchmarks/without_amx.py COMMAND [ARGUMENT...]")
    refuse_tiles()
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error.strerror}")
