"""benchmarks/without_amx.py: the kernel says no to whoever asks for tiles, and to nothing else."""

from __future__ import annotations

import errno
import platform
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "without_amx.py"
ASK = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def asked(*numbers):
    return 0 if libc.syscall(158, *numbers) == 0 else ctypes.get_errno()
supported = ctypes.c_uint64()
print(asked(0x1023, 18), asked(0x1021, ctypes.byref(supported)))
from encast import _core
print(*(name for name, _, _, allowed, _ in _core.isa_levels() if allowed))
"""

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is of x86-64")


def answers(*before: str) -> tuple[list[int], list[str]]:
    done = subprocess.run([*before, sys.executable, "-c", ASK], check=True, capture_output=True, text=True)
    first, second = done.stdout.splitlines()
    return [int(number) for number in first.split()], second.split()


def test_tiles_are_refused_and_nothing_else() -> None:
    (_, other), levels = answers()
    (tiles, other_without), levels_without = answers(sys.executable, str(SCRIPT))
    assert tiles == errno.EPERM
    assert other_without == other, "another question of the same system call"
    assert levels_without == [level for level in levels if level != "amx"]


def test_the_command_s_status_is_kept_and_no_command_is_told() -> None:
    def status(*command: str) -> int:
        return subprocess.run([sys.executable, str(SCRIPT), *command], check=False, capture_output=True).returncode

    assert status(sys.executable, "-c", "raise SystemExit(7)") == 7
    assert status() == 1
