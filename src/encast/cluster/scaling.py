"""How many replicas there should be: policies for Ray Serve's autoscaler, which applies bounds and delays to them."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["BUSY_SHARE", "QUEUED_TOKENS", "QUEUED_TOKENS_A_CARD", "ServersByQueuedTokens", "gateway_a_node"]

QUEUED_TOKENS = 16_384
"""That may wait at a replica."""

QUEUED_TOKENS_A_CARD = 262_144
"""The same for each card of a replica on cards: the same share of what its queue holds."""

BUSY_SHARE = 0.8
"""Of its instances' time, that a replica may be busy where nothing waits."""


class ServersByQueuedTokens:
    """As many servers as keep ``queued_tokens`` waiting at each, besides what keeps their instances busy.

    The queue alone would end servers at every moment at which nothing waits, under a load that needs them all.
    """

    def __init__(self, queued_tokens: int = QUEUED_TOKENS) -> None:
        self._queued_tokens = queued_tokens

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        metrics = context.aggregated_metrics or {}
        waiting, busy = metrics.get("queue_tokens") or {}, metrics.get("busy") or {}
        now: int = context.current_num_replicas
        silent = now > len(waiting)
        if not waiting:
            return now, {}
        # Who has no time to say how much waits has as much as the others at least.
        each = sum(busy.values()) / BUSY_SHARE + sum(waiting.values()) / self._queued_tokens
        wanted = math.ceil(each * max(1.0, now / len(waiting)))
        return max(wanted, now) if silent else wanted, {}


def gateway_a_node(context: Any) -> tuple[int, dict[str, Any]]:
    """As many gateways as there are nodes."""
    import ray

    return sum(bool(node["Alive"]) for node in ray.nodes()), {}
