"""Runs a pip command that builds encast, and shows how far the build is.

    python cmake/show_build.py LOG python -m pip install ...

pip is silent for minutes, or tells everything. Here a terminal has one line that changes, anything else a line a step;
LOG has all that pip said, which is printed when it fails. Ends with pip's exit code.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

# What scikit-build-core begins, and ninja's steps.
STEP = re.compile(r"\*\*\* .*|\[\d+/\d+\] .*")


def shown(line: str) -> str | None:
    """What people see of a line of the build; None for nothing."""
    found = STEP.match(line.strip())
    return found and re.sub(r"(\[\d+/\d+\]) Building CXX object .*\.dir/(.*)\.o$", r"\1 \2", found[0])


def main() -> int:
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(errors="replace")  # compilers quote with letters that a terminal may lack
    log, command = Path(sys.argv[1]), [*sys.argv[2:], "--verbose"]
    log.parent.mkdir(parents=True, exist_ok=True)
    width = shutil.get_terminal_size().columns - 1
    before, after, end = ("\r\x1b[K", "\r\x1b[K", "") if sys.stdout.isatty() else ("", "", "\n")
    with (
        log.open("w", encoding="utf-8") as everything,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as pip,
    ):
        assert pip.stdout is not None
        for line in pip.stdout:
            everything.write(line)
            if step := shown(line):
                print(before + (step[:width] if before else step), end=end, flush=True)
    print(after, end="", flush=True)
    if pip.returncode != 0:
        print(log.read_text(encoding="utf-8"))
    return pip.returncode


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
