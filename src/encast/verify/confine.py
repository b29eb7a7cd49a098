"""Keeps a process from writing files, but in one folder, from running programs and from TCP: Landlock of Linux.

A SavedModel's graph is a program, and TensorFlow has operations that write files. Source: landlock(7) and
Documentation/userspace-api/landlock.rst of Linux.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["can_confine", "confine"]

# uapi/linux/landlock.h; the numbers of these calls are the same on all processors
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE = 1 << 0, 1 << 1
_REMOVE_AND_MAKE = 0b1_1111_1111 << 4
_REFER, _TRUNCATE = 1 << 13, 1 << 14
"""Since the versions 2 and 3."""
_TCP = 0b11
"""To bind and to connect; since version 4."""
_OTHERS = 0b11
"""Abstract Unix sockets of others, and signals to them; since version 6."""

# uapi/linux/prctl.h
_PR_SET_NO_NEW_PRIVS = 38

_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def can_confine() -> bool:
    """Whether this kernel has Landlock with all rights on files, as of Linux 6.2; that on TCP is of 6.7."""
    return _version() >= 3


def confine(folder: str) -> None:
    """From here on this process, and what it starts, makes, changes and removes nothing outside of ``folder``, runs no
    program, and where the kernel can take that away has no TCP and no way to other processes. What is open stays so.

    Raises ``OSError`` where ``can_confine`` is false, and where there are other threads: those would not be bound.
    """
    if len(os.listdir("/proc/self/task")) > 1:
        raise OSError("a process with several threads cannot be confined")
    files = _EXECUTE | _WRITE_FILE | _REMOVE_AND_MAKE | _REFER | _TRUNCATE
    version = _version()
    size = _Ruleset.net.offset if version < 4 else _Ruleset.scoped.offset if version < 6 else ctypes.sizeof(_Ruleset)
    ruleset = _call(_CREATE_RULESET, ctypes.byref(_Ruleset(files, _TCP, _OTHERS)), size, 0)
    try:
        for path, allowed in ((folder, files & ~_EXECUTE), (os.devnull, _WRITE_FILE | _TRUNCATE)):
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                _call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(_Beneath(allowed, place)), 0)
            finally:
                os.close(place)
        if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "no_new_privs was refused")
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _version() -> int:
    return int(_libc.syscall(_CREATE_RULESET, None, 0, _VERSION))


def _call(number: int, *arguments: object) -> int:
    made = int(_libc.syscall(number, *arguments))
    if made < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"Landlock: {os.strerror(error)}")
    return made
