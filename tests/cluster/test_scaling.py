"""How many servers there should be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from encast.cluster.scaling import ServersByQueuedTokens


@pytest.mark.parametrize(
    ("now", "waiting", "busy", "wanted"),
    [
        (1, [0], [0.0], 0),  # Ray Serve keeps to the least
        (2, [0, 0], [0.4, 0.4], 1),
        (2, [0, 0], [0.8, 0.8], 2),
        (2, [0, 0], [0.9, 0.8], 3),
        (2, [1000, 1000], [0.8, 0.8], 4),
        (2, [], [], 2),  # nobody says anything
        (4, [0, 0], [0.1, 0.1], 4),  # the others may have no time to say so
        (4, [1000, 1000], [0.8, 0.8], 8),
    ],
)
def test_servers_by_queued_tokens(now: int, waiting: list[int], busy: list[float], wanted: int) -> None:
    metrics: dict[str, Any] = {"queue_tokens": dict(enumerate(waiting)), "busy": dict(enumerate(busy))}
    context = SimpleNamespace(aggregated_metrics=metrics, current_num_replicas=now)
    assert ServersByQueuedTokens(1000)(context) == (wanted, {})


def test_no_metrics_change_nothing() -> None:
    context = SimpleNamespace(aggregated_metrics=None, current_num_replicas=3)
    assert ServersByQueuedTokens()(context) == (3, {})
