"""For all tests of the laboratory."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(scope="session", autouse=True)
def short_pauses() -> Iterator[None]:
    """Who is accused is asked again after pauses, since a host may have taken its processors meanwhile; a cheat of
    these tests is one whenever it is asked."""
    with mock.patch("encast.bench.fairness._PAUSE", 0.05), mock.patch("encast.bench.roofline._PAUSE", 0.05):
        yield
