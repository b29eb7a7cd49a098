"""Architectures that stand in one file for the tests: every ``tests/NAME_family.py`` has a ``FAMILY``.

``checkpoints`` and the suites over all architectures find them here, so that a further one edits no list.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from family import Family

__all__ = ["FAMILIES"]


def _found() -> Iterator[Family]:
    for path in sorted(Path(__file__).parent.glob("*_family.py")):
        yield importlib.import_module(path.stem).FAMILY


FAMILIES = {family.arch: family for family in _found()}
