"""How a request gets to the server over HTTP/1.1 and an answer back. The README says why not by a client's library."""

from __future__ import annotations

import asyncio
import base64
import errno
import socket
import ssl
from collections.abc import Mapping
from types import TracebackType
from typing import NamedTuple, cast
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


class Http:
    """A pool of connections that are kept open. No request is sent twice, no redirect followed.

    Raises ``InputError`` for headers that are none.
    """

    def __init__(self, url: str, path: str, headers: Mapping[str, str], timeout: float) -> None:
        parts = urlsplit(url.rstrip("/"))
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname or "", parts.port or (80 if self._tls is None else 443)
        self._base, self._path, self._timeout = parts.path, path, timeout
        host = f"[{self._host}]" if ":" in self._host else self._host.encode("idna").decode()
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
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        if len(self._headers.splitlines()) != len(sent) or "\0" in self._headers:
            raise InputError("a header holds a line break or a NUL; headers are one line each")
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
        return await self._ask(self._head("POST", self._path) + f"content-length: {len(body)}\r\n", body)

    async def get(self, path: str) -> Reply:
        """Raises ``FailedError``."""
        return await self._ask(self._head("GET", path), b"")

    def _head(self, method: str, path: str) -> str:
        return f"{method} {quote(self._base + path, safe=_PATH) or '/'} HTTP/1.1\r\n{self._headers}"

    async def _ask(self, head: str, body: bytes) -> Reply:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._timeout
        connection = self._idle.pop() if self._idle else await self._connect()
        try:
            answer = await connection.ask(b"%b\r\n%b" % (head.encode(), body), end)
        except asyncio.CancelledError:
            connection.transport.abort()
            raise
        if connection.reusable:
            self._idle.append(connection)
        headers, status = connection.headers, connection.status
        if status == 200:
            tokens = headers.get(b"x-tokens") or headers.get(b"x-compute-tokens")
            return Reply(answer, tokens=None if tokens is None else tokens.decode("latin-1"))
        after = headers.get(b"retry-after")
        return Reply(
            answer, f"HTTP {status}", status == 429, status < 500 and status != 429,
            None if after is None else after.decode("latin-1"),
        )  # fmt: skip

    async def _connect(self) -> _Connection:
        """The first address of the host that accepts."""
        loop = asyncio.get_running_loop()
        failed: OSError | None = None
        try:
            if not self._addresses:
                found = await asyncio.wait_for(
                    loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM), self._timeout
                )
                self._addresses = [str(address[0]) for *_, address in found]
            for address in self._addresses:
                try:
                    _, connection = await asyncio.wait_for(
                        loop.create_connection(
                            lambda: _Connection(self), address, self._port, ssl=self._tls,
                            server_hostname=None if self._tls is None else self._host,
                        ),
                        self._timeout,
                    )  # fmt: skip
                except OSError as error:
                    failed = error
                else:
                    self._addresses = [address]
                    return connection
        except asyncio.TimeoutError:
            raise FailedError("timeout") from None
        except OSError as error:
            failed = error
        assert failed is not None
        if failed.errno == errno.ECONNREFUSED:
            raise FailedError("connection refused")
        raise FailedError(f"no connection: {failed.strerror or failed}"[:120])


class _Connection(asyncio.Protocol):
    """One request at a time. ``status`` and ``headers``, with names in lower case, are those of the last answer;
    ``reusable``: whether another request may follow it.
    """

    transport: asyncio.Transport

    def __init__(self, http: Http) -> None:
        self._http = http
        self._parser = httptools.HttpResponseParser(self)
        self._waiting: asyncio.Future[bytes] | None = None
        self._parts: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._until_close = False
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.reusable = False

    def ask(self, request: bytes, end: float) -> asyncio.Future[bytes]:
        """The body of the answer; fails with ``FailedError``. ``end``: by the loop's clock."""
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        self._timer = loop.call_at(end, self._late)
        self.reusable = False
        self.transport.write(request)
        return self._waiting

    def _late(self) -> None:
        self._finish(FailedError("timeout"))
        self.transport.abort()

    def _finish(self, outcome: bytes | FailedError) -> None:
        waiting, self._waiting = self._waiting, None
        if self._timer is not None:
            self._timer.cancel()
        if waiting is None or waiting.done():
            return
        if isinstance(outcome, FailedError):
            waiting.set_exception(outcome)
        else:
            waiting.set_result(outcome)

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

    def _broken(self, why: str) -> None:
        self._finish(FailedError(why))
        self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._http._open.discard(self)
        if self in self._http._idle:
            self._http._idle.remove(self)
        self.reusable = False
        whole = self._until_close and error is None
        self._finish(b"".join(self._parts) if whole else FailedError("connection reset"))

    # The parser

    def on_message_begin(self) -> None:
        if self._waiting is None:  # an answer that nobody asked for
            self.transport.abort()
        self.headers, self._parts, self._until_close = {}, [], False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        sized = b"content-length" in self.headers or b"transfer-encoding" in self.headers
        self._until_close = not sized and self.status not in (204, 304) and self.status >= 200

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)

    def on_message_complete(self) -> None:
        if self.status < 200:  # the answer itself comes after it
            return
        self.reusable = self._parser.should_keep_alive() and not self.transport.is_closing()
        self._until_close = False
        self._finish(b"".join(self._parts))
        if not self.reusable:
            self.transport.close()
