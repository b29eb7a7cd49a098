"""The server that these tests ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stub_server import Stub, running

pytest.importorskip("httptools", reason="pip install 'encast[serve]'")


@pytest.fixture
def stub() -> Iterator[Stub]:
    with running() as server:
        yield server
