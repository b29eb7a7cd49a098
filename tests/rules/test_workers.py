"""How `make test` spreads the tests over processes."""

from __future__ import annotations

import pytest


def test_tests_of_a_file_share_a_process(request: pytest.FixtureRequest) -> None:
    """Else fixtures of a module are made once in each process: pytest-xdist groups by what it adds to the id."""
    if not request.config.getoption("loadgroup", False):
        pytest.skip("not run with --dist loadgroup")
    assert request.node.nodeid.endswith(f"@{request.node.path}")
