"""A replica of the gateways' deployment, the application's ingress: an actor of Ray Serve that listens on a port of its
own, and answers what Ray's proxy hands to it.

Through Ray's proxy each request is pickled and goes through three processes of Python; the port of its own is there
because of that.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import Any

import ray
import uvloop
from ray.serve.handle import DeploymentHandle

from encast.cluster.gateway import Gateway
from encast.cluster.membership import Member, follow
from encast.cluster.upstream import Upstreams
from encast.errors import ResourceError
from encast.serve.http import HttpServer
from encast.serve.service import RequestLimits

__all__ = ["Ingress"]

_BACKLOG = 2048
_EVERYWHERE = {"0.0.0.0", "::"}


class Ingress:
    """Before the replicas of ``servers``. ``limits``: as theirs; ``drain_s``: for what was accepted at its end."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, servers: DeploymentHandle, host: str, port: int, limits: RequestLimits, drain_s: float
    ) -> None:
        self._listener = _listen(host, port)
        self._limits, self._drain_s = limits, drain_s
        self._loop = uvloop.new_event_loop()
        self._up = threading.Event()
        # Of its own: the loop of the actor has Ray's calls.
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self._thread.start()
        self._up.wait()
        # A handle's router, which is told of replicas, is made by its first use. That this first call may find no
        # replica yet does not matter.
        self._first = asyncio.ensure_future(_settled(servers.broadcast("record_replica_metadata")))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._gateway = Gateway(Upstreams(), self._limits)
        self._server = HttpServer(self._gateway, self._limits, drain_s=self._drain_s, started=self._up.set, tls=None)
        follow(self._told)
        watching = asyncio.ensure_future(self._gateway.upstreams.watch())
        await self._server.serve([self._listener])
        watching.cancel()

    def _told(self, members: list[Member]) -> None:
        self._loop.call_soon_threadsafe(self._gateway.upstreams.replace, members)

    async def __call__(self, request: Any) -> Any:
        """A request that came through Ray's proxy."""
        from starlette.responses import Response

        body = await request.body()
        scope = request.scope
        answer = await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self._gateway.answer(scope, body), self._loop)
        )
        response = Response(answer.body, answer.status)
        response.raw_headers = answer.headers
        return response

    def address(self) -> tuple[str, int]:
        """Where it listens; where that is all addresses, the node's."""
        host, port = self._listener.getsockname()[:2]
        return ray.util.get_node_ip_address() if host in _EVERYWHERE else host, port

    async def __del__(self) -> None:
        self._loop.call_soon_threadsafe(self._server.end)
        await asyncio.to_thread(self._thread.join, self._drain_s)


async def _settled(call: Any) -> None:
    with contextlib.suppress(Exception):
        await call.results_async()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # One that is replaced may still answer what it accepted, on the same port of the same node.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise ResourceError(
            f"{host} port {port} cannot be listened on: {error.strerror or error}; choose others by host and port"
        ) from None
    return listener
