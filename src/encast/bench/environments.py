"""Where backends live whose packages do not go together with encast's: virtual environments below the cache."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from encast.bench.cache import default_cache

__all__ = ["THIS_PYTHON", "WORKER_NEEDS", "how_to_make", "interpreter", "place"]

THIS_PYTHON = f"python{sys.version_info[0]}.{sys.version_info[1]}"

WORKER_NEEDS = {"tokenizers": "tokenizers>=0.20"}
"""What encast's own modules import in a worker that opens a checkpoint, beside NumPy, which each backend brings."""


def place(name: str) -> Path:
    """The folder of the environment of that name."""
    return default_cache() / "environments" / name


def interpreter(python: str | None) -> str | None:
    """What ``python`` in a backend's YAML means; None is the interpreter that runs encast.

    A path is that interpreter. A bare name is the environment of that name (``place``) where there is one, and
    else None: the backend may be installed beside encast, and says what to do when it is not.
    """
    if python is None or os.sep in python:
        return python
    found = place(python) / "bin" / "python"
    return str(found) if os.access(found, os.X_OK) else None


def how_to_make(name: str, *requirements: str, python: str = THIS_PYTHON) -> str:
    """The command that makes the environment, with what a worker needs there.

    ``python`` is an interpreter that all requirements have wheels for.
    """
    packages = shlex.join((*requirements, *WORKER_NEEDS.values()))
    try:
        folder = place(name)
    except ImportError:  # without encast's native core, this is such an environment itself
        return f"{sys.executable} -m pip install {packages}"
    return f"{python} -m venv {folder} && {folder}/bin/pip install {packages}"
