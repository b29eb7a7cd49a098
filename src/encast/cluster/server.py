"""A replica of the servers' deployment: an actor of Ray Serve that keeps one ``encast serve`` as its child.

Ray Serve says where it runs, asks how it does, replaces it, and ends it; requests go from gateways to the child.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from encast.cluster.cards import devices_of, see_held_cards
from encast.cluster.child import ChildServer
from encast.cluster.size import Size
from encast.errors import EncastError, InputError

__all__ = ["ModelServer"]

_SPARE_S = 5.0


class ModelServer:
    """``names``: of the models, whose artifacts ``reconfigure`` says; ``arguments``: of ``encast serve``; ``keys``:
    a file of API keys; ``size``: what Ray holds for the replica; ``card``: the kind of its cards, None on CPUs;
    ``drain_s``: as of ``encast serve``.
    """

    def __init__(
        self, names: Sequence[str], arguments: Sequence[str], keys: str | None, size: Size, card: str | None,
        drain_s: float,
    ) -> None:  # fmt: skip
        self._names, self._size, self._drain_s = list(names), size, drain_s
        own = list(arguments)
        if card is not None:
            see_held_cards(size.gpus)
            for device in devices_of(card, size.gpus):
                own += ["--device", device]
        alone = size.cpus >= len(os.sched_getaffinity(0))
        # Who has all of a machine may say which cores are his, and the server finds out what fits. Who has less takes
        # an instance a CPU, and leaves to the system where they run.
        if not alone:
            own.append("--no-pin")
            if not {"--instances", "--threads", "--config", "--device"} & set(own):
                own += ["--instances", str(max(1, int(size.cpus))), "--threads", "1"]
        self._child = ChildServer(ray.util.get_node_ip_address(), own, keys)
        self._models: dict[str, str] = {}
        self._watching: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()

    async def reconfigure(self, config: Mapping[str, Any]) -> None:
        """``config["models"]``: the path of each model's artifact. Called at the start, and for each update. Raises
        ``EncastError``; after the start the server then serves on what it had.
        """
        models = {name: str(path) for name, path in config["models"].items()}
        if sorted(models) != sorted(self._names):
            raise InputError(
                f"user_config has the models {', '.join(sorted(models))} and the application serves "
                f"{', '.join(sorted(self._names))}; change args too, which starts all servers anew"
            )
        async with self._changing:
            if self._watching is None:
                await self._child.start({name: models[name] for name in self._names})
                self._watching = asyncio.ensure_future(self._watch())
            else:
                await self._child.reload(models)
            self._models = models

    async def reload(self) -> str:
        """Opens the artifacts, and the keys, where they are again; returns what went wrong, "" for nothing."""
        async with self._changing:
            try:
                await self._child.reload(self._models)
            except EncastError as error:
                return f"{error} (on the node {self._child.host})"
        return ""

    def record_replica_metadata(self) -> dict[str, Any]:
        """What gateways must know."""
        return {"host": self._child.host, "port": self._child.port, "weight": self._size.weight}

    async def check_health(self) -> None:
        """Raises where the server does not answer: Ray Serve replaces the replica after three such times."""
        await self._child.live()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What ``scaling`` decides by: tokens that wait, and the busy share of the instances."""
        stats = await self._child.stats()
        return {"queue_tokens": stats["queue_tokens"], "busy": stats["busy"] / max(1, stats["instances"])}

    async def _watch(self) -> None:
        code = await self._child.wait()
        # Its gateways know already, by their connections. Without a server this actor is of no use.
        self._child.tidy()
        print(f"encast: the server ended with {code}; so does its replica", file=sys.stderr, flush=True)
        os._exit(1)

    async def __del__(self) -> None:  # Ray Serve awaits it at a replica's end
        if self._watching is not None:
            self._watching.cancel()
        await self._child.end(self._drain_s + _SPARE_S)
