"""The servers behind a gateway, and the connections to them: which server is asked next, and one request to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
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

_log = logging.getLogger("encast.gateway")


class LostError(Exception):
    """The connection could not be made, or ended before the answer was whole. ``stale``: it had been idle and ended by
    itself, which may say nothing about the server. ``sent``: whether the server may have worked on the request.
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
        self._was_cut = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self._waiter is not None and not self._waiter.done():
            stale = self.used and not self._began and not self._was_cut
            self._waiter.set_exception(LostError(str(error or "closed"), stale=stale, sent=True))

    def data_received(self, data: bytes) -> None:
        if self._waiter is None or self._waiter.done():
            # Nobody asked for it, and the next one who asks must not take it for an answer.
            self._abort()
            return
        self._began = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._abort()

    def on_message_begin(self) -> None:
        if self._waiter is None or self._waiter.done():
            raise _SurplusError

    def on_header(self, name: bytes, value: bytes) -> None:
        self._answer.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        # What else comes belongs to another answer.
        answer, self._answer = self._answer, Answer()
        parts, self._parts = self._parts, []
        answer.status = self._parser.get_status_code()
        if 100 <= answer.status < 200:
            return
        answer.body = parts[0] if len(parts) == 1 else b"".join(parts)
        self._keeps = self._parser.should_keep_alive()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(answer)

    async def ask(self, parts: Iterable[bytes]) -> Answer:
        """Raises ``LostError``. When cancelled the connection is closed, by which the server withdraws the request."""
        if self.closed:
            raise LostError("closed", stale=self.used and not self._was_cut)
        self._answer, self._parts, self._began = Answer(), [], False
        self._parser = httptools.HttpResponseParser(self)
        self._waiter = self._loop.create_future()
        self._keeps = False
        try:
            self.transport.writelines(parts)
            return await self._waiter
        finally:
            self._waiter = None
            self.used = True
            if not self._keeps:
                self._abort()

    def cut(self) -> None:
        """Ends it because the server is given up, which is no stale connection's end."""
        self._was_cut = True
        self._abort()

    def _abort(self) -> None:
        self._keeps = False
        self.closed = True  # at once: the loop tells ``connection_lost`` later, and nobody must be given it meanwhile
        self.transport.abort()


class _SurplusError(Exception):
    """Leaves a callback of the parser, which stops it."""


class Upstream:
    """A server. ``name``: the replica's; ``weight``: its CPUs, or its cards."""

    def __init__(self, name: str, host: str, port: int, weight: float) -> None:
        self.name, self.host, self.port, self.weight = name, host, port, weight
        self.label = f"{f'[{host}]' if ':' in host else host}:{port}"
        self.load = 0
        """Bytes of the requests that it has not answered yet."""
        self.aside_until = 0.0
        self.silent = 0
        """Probes that it left unanswered, one after the other."""
        self.doubted = False
        """It was put aside, or left a probe unanswered, and has answered none since."""
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._gone = False

    @property
    def hangs(self) -> bool:
        """Until it answers a probe."""
        return self.silent >= _PROBES

    async def ask(self, parts: Collection[bytes], size: int, *, fresh: bool = False) -> Answer:
        """One request; raises ``LostError``. ``fresh``: on a connection that was not used before."""
        cost = size + _FIXED_BYTES
        self.load += cost
        try:
            connection = await (self._connect() if fresh else self._connection())
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
            self.silent, self.doubted = 0, False
        except (LostError, asyncio.TimeoutError):
            self.silent += 1
            self.doubted = True
            if self.hangs:
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
            connection.cut()


class Upstreams:
    """Those that are known now. All calls are made in the event loop of the gateway."""

    def __init__(self) -> None:
        self.by_name: dict[str, Upstream] = {}
        self._retired: list[Upstream] = []
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
                self._retired.append(old)
        # Who waits for a change is not woken when the same ones are told again.
        changed = found.keys() != self.by_name.keys()
        self.by_name = found
        if changed:
            self._changed.set()

    def choose(self, avoid: Collection[str] = ()) -> Upstream | None:
        """The one with the least to do for its weight, of those that are not ``avoid``ed; None where all of them are.
        Of equal ones each has its turn. Those that hang are asked only while all do: they have the least to do, and
        whoever asks them waits for long.
        """
        now = time.monotonic()
        self._turn += 1
        everyone = list(self.by_name.values())
        able = [one for one in everyone if not one.hangs] or everyone
        left = [one for one in able if one.name not in avoid]
        candidates = [one for one in left if one.aside_until <= now] or left
        if not candidates:
            return None
        turn = self._turn % len(candidates)
        return min(candidates[turn:] + candidates[:turn], key=lambda one: one.load / one.weight)

    def put_aside(self, upstream: Upstream) -> None:
        """It could not be reached just now."""
        upstream.aside_until = time.monotonic() + _ASIDE_S
        upstream.doubted = True

    async def watch(self) -> None:
        """Probes the servers that owe answers, those that were taken away among them, and those that are doubted,
        without end.
        """
        while True:
            await asyncio.sleep(_PROBE_EVERY_S)
            self._retired = [one for one in self._retired if one.load]
            asked = [one for one in self.by_name.values() if one.load or one.doubted] + self._retired
            for one, error in zip(
                asked, await asyncio.gather(*(one.probe() for one in asked), return_exceptions=True), strict=True
            ):
                if error is not None:
                    _log.error("a probe of %s failed", one.label, exc_info=error)

    async def change(self, seconds: float) -> None:
        """Returns after so long, or when other servers are known."""
        self._changed.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)
