"""A fixture for modules that run torch in the tests' process, beside others that ask for its threads."""

from __future__ import annotations

import pytest

__all__ = ["one_operation_at_a_time"]


@pytest.fixture(scope="module", autouse=True)
def one_operation_at_a_time() -> None:
    """A process can say so once, before torch's first work; the peers of `encast bench` say so when they open."""
    try:
        import torch
    except ImportError:
        return
    if torch.get_num_interop_threads() != 1:
        try:
            torch.set_num_interop_threads(1)
        except RuntimeError:
            pytest.skip("torch already works in this process, with more threads than a peer may use")
