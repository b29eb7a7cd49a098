"""HTTP/1.1 for clients that mean no good: uvicorn's protocol with the bounds that it lacks.

uvicorn closes idle connections after its keep-alive timeout, answers 400 to what does not parse and stops reading a
body that nobody takes. It bounds neither the bytes nor the time of a request's header, nor the connections, nor
pipelined requests, nor what a client sends after its answer, nor how long an answer waits to be read; a request goes
on when its client has gone; and a refusal's close resets the connection of a client that still sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from encast.serve.service import RequestLimits

if TYPE_CHECKING:
    import ssl

__all__ = ["KEEP_ALIVE_S", "HttpServer"]

KEEP_ALIVE_S = 75.0
"""A connection may be idle so long: longer than load balancers keep theirs (60 s), so that they close first."""

_UPGRADE = re.compile(rb"\nupgrade:", re.IGNORECASE)

_PIPELINED = 16
"""Requests that may wait on one connection behind the one that is answered; clients of today send none."""

_UNREAD_S = 20.0
"""An answer that its client does not read is dropped after this time."""

_LINGER_S = 5.0
_LINGER_BODIES = 4
"""What a client still sends after a refusal is read and dropped for this time (or that of a body, where it is shorter),
up to so many times the largest body: closing at once would reset the connection, often before the answer is read."""

_CONTINUE = b"HTTP/1.1 100 "

_LAST_REQUEST_S = 0.25
"""When the server ends, an idle connection is closed after this time: a request on its way is still answered."""


class _Protocol(HttpToolsProtocol):
    """One connection."""

    limits: RequestLimits
    most_connections: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header = True  # the header of a request is being received
        self._header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None
        self._cut_timer: asyncio.TimerHandle | None = None  # ends a client that does not read, or goes on sending
        self._surplus = 0  # bytes of a body that came after its answer
        self._task: asyncio.Task[None] | None = None
        self._answering: RequestResponseCycle | None = None  # the task's; ``cycle`` is of the last request that came
        self._ending = False
        self._refused = False
        self._lingers = False

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most_connections:
            self._refuse(503, f"more than {self.most_connections} connections", (b"retry-after: 1\r\n",))
            return
        # uvicorn would wait for a first request without end.
        self._header_timer = self.loop.call_later(self.limits.header_timeout_s, self._header_late)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._cancel_timers()
        self.pipeline.clear()
        if self._answering is not None:
            # uvicorn tells the last request that was sent, which waits behind this one.
            self._answering.disconnected = True
            self._answering.message_event.set()
        if self._task is not None and self._answering is not None and not self._answering.response_started:
            # Nobody reads the answer: withdraws what the request asked the engine for.
            self._task.cancel()

    def shutdown(self) -> None:
        self._ending = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
        else:
            self.loop.call_later(_LAST_REQUEST_S, self._close_idle)

    def close(self) -> None:
        """The last answer is written: closes, or waits for the rest of what the client sends; see ``_LINGER_S``."""
        whole = not self._refused and (self._answering is None or not self._answering.more_body)
        if whole or self.transport.is_closing():
            self.transport.close()
            return
        self._lingers = True
        if self.transport.can_write_eof():  # not over TLS, where the answer's length alone says that it is whole
            self.transport.write_eof()
        self.flow.resume_reading()
        self._set_linger_timer()

    def _set_linger_timer(self) -> None:
        unread = self.transport.get_write_buffer_size() > 0
        self._set_cut_timer(_UNREAD_S if unread else min(_LINGER_S, self.limits.body_timeout_s))

    def _close_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    # Requests

    def data_received(self, data: bytes) -> None:
        if self._lingers:
            self._surplus += len(data)
            if self._surplus > _LINGER_BODIES * self.limits.max_body_bytes:
                self.transport.abort()
        if self._lingers or self._refused:
            return
        self._unset_keepalive_if_required()
        if self._header:
            self._header_bytes += len(data)
            head, end, rest = data.partition(b"\r\n\r\n")
            if _UPGRADE.search(head):
                # Java's client offers HTTP/2 with every request. The parser would take the body for another protocol.
                data = _UPGRADE.sub(b"\nx-upgrade:", head) + end + rest
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Answered as if it had not asked; what follows is in another protocol.
            self.cycle.keep_alive = False
        except httptools.HttpParserError as error:
            refusal = error.__context__
            if isinstance(refusal, _RefusedError):
                self._refuse(refusal.status, str(refusal))
            else:
                self._refuse(400, "this is no HTTP request")
            return
        if self._header:
            if self._header_bytes > self.limits.max_header_bytes:
                self._refuse(431, f"the header has more than {self.limits.max_header_bytes} bytes")
            elif self._header_bytes and self._header_timer is None:
                self._header_timer = self.loop.call_later(self.limits.header_timeout_s, self._header_late)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = self._header_bytes or 1  # it came in one piece with the end of the request before

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= _PIPELINED:
            raise _RefusedError(400, f"more than {_PIPELINED} requests wait on this connection")
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.max_header_bytes:
            raise _RefusedError(431, f"the header has more than {self.limits.max_header_bytes} bytes")
        self._header, self._header_bytes = False, 0
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        super().on_headers_complete()
        if self._ending:
            self.cycle.keep_alive = False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        # All of it that a cycle uses. It does not know the cycle, which would then live until a collection.
        cycle.transport = _Output(self, has_body=cycle.scope["method"] != "HEAD")  # type: ignore[assignment]
        self._task = self.loop.create_task(cycle.run_asgi(app))
        self._task.add_done_callback(self.tasks.discard)
        self.tasks.add(self._task)

    def on_body(self, body: bytes) -> None:
        if self.cycle.response_complete:
            self._surplus += len(body)
            if self._surplus > self.limits.max_body_bytes:
                self.transport.abort()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._header = True
        if self.cycle.response_complete:
            # uvicorn notes the end of a body only while somebody may want it.
            self.cycle.more_body = False
            self._set_cut_timer(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._lingers:
            return
        self._surplus = 0
        if self.cycle.response_complete and self.cycle.more_body:
            # Refused before its body was there. Closing now could lose the answer: the client is still sending.
            self._set_cut_timer(self.limits.body_timeout_s)
        elif self.transport.is_closing():
            self._set_cut_timer(_UNREAD_S)
        super().on_response_complete()

    # What is cut off

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_cut_timer(_UNREAD_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._lingers:
            self._set_linger_timer()
        else:
            self._set_cut_timer(None)

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # idle, and the last answer is still unread
        else:
            super().timeout_keep_alive_handler()

    def _set_cut_timer(self, seconds: float | None) -> None:
        if self._cut_timer is not None:
            self._cut_timer.cancel()
        self._cut_timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)

    def _cancel_timers(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
        self._set_cut_timer(None)

    def _header_late(self) -> None:
        self._header_timer = None
        if self._header_bytes:
            self._refuse(408, f"the header did not arrive within {self.limits.header_timeout_s:g} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, reason: str, headers: Sequence[bytes] = ()) -> None:
        """Ends the connection; requests before the bad one are answered, and then it gets no answer of its own."""
        self._refused = True
        self._cancel_timers()
        self.pipeline.clear()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.keep_alive = False
            self.flow.pause_reading()
            return
        body = reason.encode()
        self.transport.write(
            b"".join(
                (
                    STATUS_LINE[status],
                    b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n",
                    *headers,
                    b"content-length: %d\r\n\r\n" % len(body),
                    body,
                )
            )
        )
        if status in (400, 431):
            self.close()
        else:  # it sends too slowly, or is one too many to be held any longer
            self.transport.close()
            self._set_cut_timer(_UNREAD_S)


class _Output:
    """The transport of a connection for a request, which closes it by ``_Protocol.close``. The header of its answer
    leaves with the body: uvicorn's second write would cost as much as all of the parsing.
    """

    def __init__(self, protocol: _Protocol, *, has_body: bool) -> None:
        self._transport, self.is_closing = protocol.transport, protocol.transport.is_closing
        self.close = protocol.close
        self._header: bytes | None = None if has_body else b""

    def write(self, data: bytes) -> None:
        if self._header is None and not data.startswith(_CONTINUE):
            self._header = data
        elif self._header:
            self._transport.writelines((self._header, data))
            self._header = b""
        else:
            self._transport.write(data)


class _RefusedError(Exception):
    """Leaves a callback of the parser, which stops it."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class HttpServer(uvicorn.Server):
    """Serves an ASGI application on a listening socket within the limits. ``started`` is called once it does.

    ``drain_s``: how long ``end`` waits for answers. ``tls``: a context; its certificate may be loaded again meanwhile.
    """

    def __init__(
        self,
        app: Any,
        limits: RequestLimits,
        *,
        drain_s: float,
        started: Callable[[], None],
        tls: ssl.SSLContext | None,
    ) -> None:
        protocol = type("Protocol", (_Protocol,), {"limits": limits, "most_connections": 4 * limits.max_concurrent})
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # a client's fault is no line on stderr
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,  # type: ignore[arg-type]  # it is given to call_later
            timeout_graceful_shutdown=drain_s,  # type: ignore[arg-type]  # to wait_for
        )
        config.load()
        config.ssl = tls
        super().__init__(config)
        self._tell_started = started

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """Signals go to the supervisor."""
        return contextlib.nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._tell_started()

    def end(self) -> None:
        """Takes no more connections, answers what was accepted, and then ``serve`` returns."""
        self.should_exit = True
