"""The build backend: scikit-build-core, plus a compiler from the package index when the machine has none.

``python cmake/build_backend.py`` prints everything that a build without isolation needs, one requirement a line.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The clang that the wheels of this version bring is the one the kernels are checked with.
ZIGLANG = "ziglang==0.17.0"
CLANG_MINIMUM = 16


def clang_from_path() -> str | None:
    """The path of clang++ of at least ``CLANG_MINIMUM``, or None; the rule of cmake/compiler.cmake."""
    for name in ["clang++", *(f"clang++-{version}" for version in range(30, CLANG_MINIMUM - 1, -1))]:
        path = shutil.which(name)
        if path is None:
            continue
        answer = subprocess.run([path, "-dumpversion"], capture_output=True, text=True, check=False).stdout
        if (major := re.match(r"\d+", answer)) and int(major[0]) >= CLANG_MINIMUM:
            return path
    return None


def compiler_requirements() -> Iterator[str]:
    if not os.environ.get("CXX") and clang_from_path() is None:
        yield ZIGLANG


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    from scikit_build_core import build

    return [*build.get_requires_for_build_wheel(config_settings), *compiler_requirements()]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    from scikit_build_core import build

    return [*build.get_requires_for_build_editable(config_settings), *compiler_requirements()]


def __getattr__(name: str) -> Any:
    """Every other hook is scikit-build-core's own."""
    from scikit_build_core import build

    return getattr(build, name)


def main() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    section = text.split("[build-system]")[1]
    requires = re.search(r"requires = \[(.*?)\]", section, re.DOTALL)
    assert requires is not None, "pyproject.toml: [build-system] has no requires"
    print(*re.findall(r'"([^"]+)"', requires[1]), "cmake>=3.26", "ninja", *compiler_requirements(), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
