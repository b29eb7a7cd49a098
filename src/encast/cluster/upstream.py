"""The servers behind a gateway, and the connections to them: which server is asked next, and one request to it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import httptools

from encast.serve.within import Within

__all__ = ["Answer", "LostError", "Upstream", "Upstreams"]

_CONNECT_S = 2.0
_ASIDE_S = 1.0
"""A server that could not be reached is passed over for so long, while there are others."""

_PROBE_S = 2.0
_PROBE_EVERY_S = 1.0
_PROBES = 3
"""A server that owes answers and leaves so many probes unanswered hangs, or its machine is gone without a word."""

_PROBE = b"GET /health/live HTTP/1.1\r\nhost: server\r\nconnection: close\r\n\r\n"

_FIXED_BYTES = 512
"""What a request costs besides its texts, as bytes of a body: parsing, and a batch's share."""

_IDLE_CONNECTIONS = 64


class LostError(Exception):
    """The connection could not be made, or ended before the answer was whole. ``stale``: it had been idle, so that
    this says nothing about the server. ``sent``: whether the server may have worked on the request.
    """

    def __init__(self, reason: str, *, stale: bool = False, sent: bool = False) -> None:
        super().__init__(reason)
        self.stale, self.sent = stale, sent


@dataclass
class Answer:
    """A whole answer."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""


class _Connection(asyncio.Protocol):
    """To one server; one request at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[Answer] | None = None
        self._answer, self._began, self._keeps = Answer(), False, False
        self._parts: list[bytes] = []
        self._parser: Any = None
        self.used = self.closed = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(
                LostError(str(error or "closed"), stale=self.used and not self._began, sent=True)
            )

    def data_received(self, data: bytes) -> None:
        if self._waiter is None:  # nobody asked: a refusal of the connection itself
            self.transport.abort()
            return
        self._began = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._answer.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        answer = self._answer
        answer.status = self._parser.get_status_code()
        if 100 <= answer.status < 200:
            self._answer, self._parts = Answer(), []
            return
        answer.body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._keeps = self._parser.should_keep_alive()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(answer)

    async def ask(self, parts: Iterable[bytes]) -> Answer:
        """Raises ``LostError``. When cancelled the connection is closed, by which the server withdraws the request."""
        self._answer, self._parts, self._began = Answer(), [], False
        self._parser = httptools.HttpResponseParser(self)
        self._waiter = self._loop.create_future()
        if self.closed:
            raise LostError("closed", stale=True)
        self._keeps = False
        try:
            self.transport.writelines(parts)
            return await self._waiter
        finally:
            self._waiter = None
            self.used = True
            if not self._keeps:
                self.transport.abort()
                self.closed = True


class Upstream:
    """A server. ``name``: the replica's; ``weight``: its CPUs."""

    def __init__(self, name: str, host: str, port: int, weight: float) -> None:
        self.name, self.host, self.port, self.weight = name, host, port, weight
        self.label = f"{f'[{host}]' if ':' in host else host}:{port}"
        self.load = 0
        """Bytes of the requests that it has not answered yet."""
        self.aside_until = 0.0
        self.silent = 0
        """Probes that it left unanswered, one after the other."""
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._gone = False

    async def ask(self, parts: Collection[bytes], size: int) -> Answer:
        """One request; raises ``LostError``."""
        cost = size + _FIXED_BYTES
        self.load += cost
        try:
            connection = await self._connection()
            try:
                answer = await connection.ask(parts)
            finally:
                if connection.closed or self._gone or len(self._idle) >= _IDLE_CONNECTIONS:
                    connection.transport.close()
                    self._open.discard(connection)
                else:
                    self._idle.append(connection)
            return answer
        finally:
            self.load -= cost

    async def probe(self) -> None:
        """Asks whether it lives, on a connection of its own, and ends the others where it does not for long."""
        connection = None
        try:
            with Within(_PROBE_S):
                connection = await self._connect()
                await connection.ask([_PROBE])
            self.silent = 0
        except (LostError, asyncio.TimeoutError):
            self.silent += 1
            if self.silent >= _PROBES:
                self.silent = 0
                self.cut()
        finally:
            if connection is not None:
                connection.transport.abort()
                self._open.discard(connection)

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
            self._open.discard(connection)
        return await self._connect()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await asyncio.wait_for(
                loop.create_connection(_Connection, self.host, self.port), _CONNECT_S
            )
        except (OSError, asyncio.TimeoutError) as error:
            raise LostError(str(error) or f"no connection within {_CONNECT_S:g} s") from None
        self._open.add(connection)
        return connection

    def retire(self) -> None:
        """Closes what is idle; what is asked still gets its answer."""
        self._gone = True
        for connection in self._idle:
            connection.transport.close()
            self._open.discard(connection)
        self._idle.clear()

    def cut(self) -> None:
        """Ends all connections: the requests on them raise ``LostError``."""
        for connection in list(self._open):
            connection.transport.abort()


class Upstreams:
    """Those that are known now. All calls are made in the event loop of the gateway."""

    def __init__(self) -> None:
        self.by_name: dict[str, Upstream] = {}
        self._changed = asyncio.Event()
        self._turn = 0

    def replace(self, members: Iterable[tuple[str, str, int, float]]) -> None:
        """Knows these from now on: name, host, port and weight of each. The last ones are asked on while there is
        nobody else: servers that are taken away go on for a moment.
        """
        members = list(members)
        if not members:
            return
        found = {}
        for name, host, port, weight in members:
            found[name] = self.by_name.get(name) or Upstream(name, host, port, weight)
        for name, old in self.by_name.items():
            if name not in found:
                old.retire()
        self.by_name = found
        self._changed.set()

    def choose(self, avoid: Collection[str] = ()) -> Upstream | None:
        """The one with the least to do for its weight, of those that are not ``avoid``ed if there are such. Of
        equal ones each has its turn.
        """
        now = time.monotonic()
        self._turn += 1
        everyone = list(self.by_name.values())
        for candidates in (
            [one for one in everyone if one.name not in avoid and one.aside_until <= now],
            [one for one in everyone if one.name not in avoid],
            everyone,
        ):
            if candidates:
                turn = self._turn % len(candidates)
                return min(candidates[turn:] + candidates[:turn], key=lambda one: one.load / one.weight)
        return None

    def put_aside(self, upstream: Upstream) -> None:
        """It could not be reached just now."""
        upstream.aside_until = time.monotonic() + _ASIDE_S

    async def watch(self) -> None:
        """Probes the servers that owe answers, without end."""
        while True:
            await asyncio.sleep(_PROBE_EVERY_S)
            await asyncio.gather(*(one.probe() for one in self.by_name.values() if one.load))

    async def change(self, seconds: float) -> None:
        """Returns after so long, or when other servers are known."""
        self._changed.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)
