"""How a request gets to the server over HTTP/1.1 and an answer back. The README says why not by a client's library."""

from __future__ import annotations

import asyncio
import base64
import errno
import socket
import ssl
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple, cast
from urllib.parse import quote, unquote, urlsplit

import httptools

from encast.errors import InputError

__all__ = ["FailedError", "Http", "Reply"]

_PATH = "/%:@!$&'()*+,;=~"
"""What a path may hold besides letters, digits and what ``quote`` always leaves."""


class Reply(NamedTuple):
    """``refusal``: empty with an answer, else the kind of error, such as ``HTTP 500``; ``body`` then says why.

    ``rejected``: for lack of room (429). ``fault``: for what was asked, which no later request changes. ``tokens``: by
    the headers of encast and of TEI.
    """

    body: bytes
    refusal: str = ""
    rejected: bool = False
    fault: bool = False
    retry_after: str | None = None
    tokens: str | None = None


class FailedError(Exception):
    """No reply; the message is the kind of failure: ``connection refused``, ``connection reset``, ``timeout``."""


_OURS = {"content-length", "transfer-encoding", "connection"}
"""Headers that say how a message lies on its connection."""


class Http:
    """A pool of connections that are kept open. No request is sent twice, no redirect followed.

    New connections go to the addresses of the host in turn. Raises ``InputError`` for a host or headers that are none.
    """

    def __init__(self, url: str, path: str, headers: Mapping[str, str], timeout: float) -> None:
        parts = urlsplit(url.rstrip("/"))
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname or "", parts.port or (80 if self._tls is None else 443)
        self._base, self._timeout = parts.path, timeout
        try:
            host = f"[{self._host.partition('%')[0]}]" if ":" in self._host else self._host.encode("idna").decode()
        except UnicodeError:
            raise InputError(f"{url}: {self._host[:80]!r} is no name of a host") from None
        sent = {
            "host": host if parts.port is None else f"{host}:{parts.port}",
            "accept": "*/*",
            "accept-encoding": "identity",
            "content-type": "application/json",
            "user-agent": "encast-loadtest",
        }
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            sent["authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        sent.update({name.lower(): value for name, value in headers.items()})
        if ours := _OURS & sent.keys():
            raise InputError(f"the header {min(ours)} is the client's own; leave it out")
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        if len(self._headers.splitlines()) != len(sent) or "\0" in self._headers:
            raise InputError("a header holds a line break or a NUL; headers are one line each")
        self._post = self._head("POST", path)
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._addresses: list[str] = []

    async def __aenter__(self) -> Http:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for connection in list(self._open):
            connection.transport.abort()

    async def send(self, body: bytes) -> Reply:
        """Raises ``FailedError``."""
        return await self._ask(b"%bcontent-length: %d\r\n\r\n%b" % (self._post, len(body), body))

    async def get(self, path: str) -> Reply:
        """Raises ``FailedError``."""
        return await self._ask(self._head("GET", path) + b"\r\n")

    def _head(self, method: str, path: str) -> bytes:
        return f"{method} {quote(self._base + path, safe=_PATH) or '/'} HTTP/1.1\r\n{self._headers}".encode()

    async def _ask(self, request: bytes) -> Reply:
        end = asyncio.get_running_loop().time() + self._timeout
        connection = self._from_pool() or await self._connect(end)
        try:
            status, headers, body = await connection.ask(request, end)
        except asyncio.CancelledError:
            connection.transport.abort()
            raise
        if connection.reusable and not connection.transport.is_closing():
            self._idle.append(connection)
        if status == 200:
            return Reply(body, tokens=headers.get("x-tokens") or headers.get("x-compute-tokens"))
        fault = status < 500 and status != 429
        return Reply(body, f"HTTP {status}", status == 429, fault, headers.get("retry-after"))

    def _from_pool(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                return connection
        return None

    async def _connect(self, end: float) -> _Connection:
        """Tries each address for its share of the time that is left. The one that accepts is the last one next time."""
        loop = asyncio.get_running_loop()
        failed = FailedError("no connection: the host has no address")
        try:
            if not self._addresses:
                lookup = loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
                found = await asyncio.wait_for(lookup, end - loop.time())
                self._addresses = [_text_of(address) for *_, address in found]
        except asyncio.TimeoutError:  # an OSError from Python 3.11 on
            raise FailedError("timeout") from None
        except OSError as error:
            raise FailedError(_kind(error)) from None
        tried = self._addresses
        for number, address in enumerate(tried):
            made = loop.create_connection(
                lambda: _Connection(self), address, self._port, ssl=self._tls,
                server_hostname=None if self._tls is None else self._host,
            )  # fmt: skip
            try:
                _, connection = await asyncio.wait_for(made, (end - loop.time()) / (len(tried) - number))
            except asyncio.TimeoutError:
                failed = FailedError("timeout")
            except OSError as error:
                failed = FailedError(_kind(error))
            else:
                self._addresses = [*tried[number + 1 :], *tried[: number + 1]]
                return connection
        self._addresses = []  # they may be others by now
        raise failed


def _text_of(address: tuple[Any, ...]) -> str:
    """The host of an address as ``getaddrinfo`` gives it, with an IPv6 address's zone."""
    return f"{address[0]}%{address[3]}" if len(address) == 4 and address[3] else str(address[0])


def _kind(error: OSError) -> str:
    if error.errno == errno.ECONNREFUSED:
        return "connection refused"
    return f"no connection: {error.strerror or error}"[:120]


class _Connection(asyncio.Protocol):
    """One request at a time. ``reusable``: whether another one may follow the last."""

    transport: asyncio.Transport

    def __init__(self, http: Http) -> None:
        self._http = http
        self._parser = httptools.HttpResponseParser(self)
        self._waiting: asyncio.Future[tuple[int, dict[str, str], bytes]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._status = 0
        self._headers: dict[str, str] = {}
        self._parts: list[bytes] = []
        self._in_body = self._until_close = False
        self.reusable = False

    def ask(self, request: bytes, end: float) -> asyncio.Future[tuple[int, dict[str, str], bytes]]:
        """The answer: status, headers (names in lower case), body; fails with ``FailedError``. ``end``: by the loop's
        clock.
        """
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        self._timer = loop.call_at(end, self._broken, "timeout")
        self.reusable = False
        self.transport.write(request)
        return self._waiting

    def _take(self) -> asyncio.Future[tuple[int, dict[str, str], bytes]] | None:
        """Who still waits for the answer, which has an end now."""
        waiting, self._waiting = self._waiting, None
        if self._timer is not None:
            self._timer.cancel()
        return None if waiting is None or waiting.done() else waiting

    def _answer(self) -> None:
        if (waiting := self._take()) is not None:
            waiting.set_result((self._status, self._headers, b"".join(self._parts)))

    def _broken(self, why: str) -> None:
        self.reusable = False
        if (waiting := self._take()) is not None:
            waiting.set_exception(FailedError(why))
        self.transport.abort()

    # The transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._http._open.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._broken("the server changes the protocol")
        except httptools.HttpParserError as error:
            self._broken(f"no HTTP: {error}"[:120])

    def connection_lost(self, error: Exception | None) -> None:
        self._http._open.discard(self)
        if self._until_close and error is None:
            self._answer()
        self._broken("connection reset")

    # The parser

    def on_message_begin(self) -> None:
        self._status, self._headers, self._parts = 0, {}, []
        self._in_body = self._until_close = False
        if self._waiting is None:  # an answer that nobody asked for
            self._broken("connection reset")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # else a trailer
            self._headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        self._in_body = True
        self._status = self._parser.get_status_code()
        chunked = "chunked" in self._headers.get("transfer-encoding", "").lower()
        sized = chunked or "content-length" in self._headers
        self._until_close = not sized and self._status >= 200 and self._status not in (204, 304)

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)

    def on_message_complete(self) -> None:
        if self._status < 200:  # the answer itself comes after it
            return
        self.reusable = self._parser.should_keep_alive()
        self._until_close = False
        self._answer()
        if not self.reusable:
            self.transport.close()
