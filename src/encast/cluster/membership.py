"""Which servers there are: Ray Serve tells a deployment's handle of every replica that comes and goes, and the handle
its request router. This router routes nothing. It hands the replicas on to the gateway of its process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.serve.request_router import RequestRouter, RunningReplica

__all__ = ["Member", "MembershipRouter", "announce", "follow"]

Member = tuple[str, str, int, float]
"""A replica's id, the host and port of its server, and its weight (``size.Size``)."""

_followers: list[Callable[[list[Member]], None]] = []
_last: list[Member] = []


def follow(tell: Callable[[list[Member]], None]) -> None:
    """Has the running replicas told to ``tell``, from any thread: now, and whenever they change."""
    _followers.append(tell)
    tell(_last)


def announce(members: list[Member]) -> None:
    """Tells who follows."""
    _last[:] = members
    for tell in _followers:
        tell(list(members))


class MembershipRouter(RequestRouter):  # type: ignore[misc]  # Ray's types are not read
    """Of the deployment whose replicas are servers."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: Any = None
    ) -> list[list[RunningReplica]]:
        """For calls of methods through the handle: any replica will do."""
        return [candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """See the module."""
        # Ray Serve pickles this class by value, with copies of the globals that it uses; the process's own are meant.
        from encast.cluster import membership

        super().update_replicas(replicas)
        # Without facts is a replica that did not come to say them.
        facts = [(one.replica_id.unique_id, one.replica_metadata) for one in replicas if one.replica_metadata]
        membership.announce([(name, fact["host"], fact["port"], fact["weight"]) for name, fact in facts])
