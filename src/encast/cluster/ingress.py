"""A replica of the gateways' deployment, the application's ingress: an actor of Ray Serve that listens on a port of its
own, and answers what Ray's proxy hands to it.

Through Ray's proxy each request is pickled and goes through three processes of Python; the port of its own is there
because of that.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import ray
import uvloop
from ray import serve
from ray.serve.handle import DeploymentHandle

from encast.cluster.gateway import Gateway
from encast.cluster.membership import Member, follow
from encast.cluster.upstream import Upstreams
from encast.errors import EncastError, ResourceError
from encast.serve.http import HttpServer
from encast.serve.keys import Keys
from encast.serve.service import RequestLimits

__all__ = ["Ingress"]

_BACKLOG = 2048
_START_S = 30.0
_TURN_S = 5.0
_EVERYWHERE = {"0.0.0.0", "::"}


class Ingress:
    """Before the replicas of ``servers``. ``limits``: as theirs; ``drain_s``: for what was accepted at its end;
    ``keys``: the file of API keys, if there is one. Raises ``EncastError`` where it cannot listen.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, servers: DeploymentHandle, host: str, port: int, limits: RequestLimits, drain_s: float, keys: str | None
    ) -> None:
        self._keys = None if keys is None else Keys(keys, _warn)
        self._claim = _claim(port, serve.get_replica_context().app_name)
        self._listener = _listen(host, port)
        self._limits, self._drain_s = limits, drain_s
        self._loop = uvloop.new_event_loop()
        self._up = threading.Event()
        self._ending = False
        # Of its own: the loop of the actor has Ray's calls.
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self._thread.start()
        if not await asyncio.to_thread(self._up.wait, _START_S) or not self._thread.is_alive():
            raise ResourceError(f"the gateway did not come up within {_START_S:g} s")
        # A handle's router, which is told of replicas, is made by its first use. That this first call may find no
        # replica yet does not matter.
        self._servers = servers
        self._first = asyncio.ensure_future(_settled(servers.broadcast("record_replica_metadata")))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            # Its port has no ears any more, and the system must not give it connections.
            self._listener.close()
            self._up.set()

    async def _serve(self) -> None:
        self._gateway = Gateway(Upstreams(), self._limits, self._keys)
        self._server = HttpServer(self._gateway, self._limits, drain_s=self._drain_s, started=self._up.set, tls=None)
        follow(self._told)
        self._watching = asyncio.ensure_future(self._gateway.upstreams.watch())
        await self._server.serve([self._listener])
        self._watching.cancel()

    def _told(self, members: list[Member]) -> None:
        self._loop.call_soon_threadsafe(self._gateway.upstreams.replace, members)

    async def __call__(self, request: Any) -> Any:
        """A request that came through Ray's proxy."""
        from starlette.responses import Response

        body = await request.body()
        answer = await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self._gateway.answer_whole(request.scope, body), self._loop)
        )
        response = Response(answer.body, answer.status)
        response.raw_headers = answer.headers
        return response

    def address(self) -> tuple[str, int]:
        """Where it listens; where that is all addresses, the node's."""
        host, port = self._listener.getsockname()[:2]
        return ray.util.get_node_ip_address() if host in _EVERYWHERE else host, port

    async def check_health(self) -> None:
        """Raises where its thread has ended, or does not come to its loop: Ray Serve then replaces it."""
        if self._ending:
            return
        if not self._thread.is_alive():
            raise ResourceError("the gateway's thread has ended")
        watched = asyncio.run_coroutine_threadsafe(self._watches(), self._loop)
        if not await asyncio.wait_for(asyncio.wrap_future(watched), _TURN_S):
            raise ResourceError("nothing watches the servers any more")

    async def _watches(self) -> bool:
        return not self._watching.done()

    def reload(self) -> str:
        """Reads the keys again; returns what is wrong with them, "" for nothing."""
        try:
            if self._keys is not None:
                self._keys.reload()
        except EncastError as error:
            return f"{error} (on the node {ray.util.get_node_ip_address()})"
        return ""

    async def drain(self) -> None:
        """Takes no more connections; returns when all that was accepted is answered, or its time is over."""
        if not self._ending:
            self._ending = True
            self._loop.call_soon_threadsafe(self._server.end)
        await asyncio.to_thread(self._thread.join, self._drain_s)

    async def __del__(self) -> None:
        await self.drain()


def _warn(line: str) -> None:
    print(f"encast: {line}", file=sys.stderr, flush=True)


def _claim(port: int, application: str) -> int | None:
    """Holds the port of this machine for the gateways of one application, of which there are two while one is
    replaced: ``SO_REUSEPORT`` would mix those of any. Returns the descriptor that holds it, None for a port of the
    system's choice. Raises ``ResourceError`` where another application has it.
    """
    if port == 0:
        return None
    path = Path(tempfile.gettempdir()) / f"encast-gateway-{os.getuid()}-{port}.lock"
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with contextlib.suppress(BlockingIOError):  # somebody has it
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(held, 0)
        os.pwrite(held, application.encode(), 0)
    fcntl.flock(held, fcntl.LOCK_SH)
    owner = os.pread(held, 4096, 0).decode(errors="replace")
    if owner != application:
        os.close(held)
        raise ResourceError(f"the application {owner!r} of this cluster listens on port {port}; choose another port")
    return held


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
