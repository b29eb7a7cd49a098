"""``encast launch`` in a process, for the tests beside this file."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CPUS = sorted(os.sched_getaffinity(0))
LAUNCH = [sys.executable, "-m", "encast.cli.main", "launch"]
# What a test waits for at most. Passing never waits so long.
PATIENCE_S = 60.0

two_cpus = pytest.mark.skipif(len(CPUS) < 2, reason="two instances need two CPUs")


def launch(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [*LAUNCH, *arguments],
        **{"capture_output": True, "text": True, "timeout": PATIENCE_S, "check": False, **options},
    )


def python(code: str) -> list[str]:
    return ["--", sys.executable, "-u", "-S", "-c", code]
