"""One core for every test of a budget: threads that wait for each other make tiny models slow on a busy machine."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def one_core() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[os.getpid() % len(before)]})
    yield
    os.sched_setaffinity(0, before)
