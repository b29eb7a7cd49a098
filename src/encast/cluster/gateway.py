"""The ASGI application of a gateway: hands each request to one of the servers, and to another one if that is lost.

It reads a request whole before a server is asked, so that it can be asked again. Every route computes and changes
nothing, so asking twice does no harm. What it answers itself is health, metrics, and that nobody could answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from encast.cluster.upstream import Answer, LostError, Upstream, Upstreams
from encast.serve.errors import RefusalError
from encast.serve.operations import error_body
from encast.serve.service import RequestLimits
from encast.serve.within import Within

__all__ = ["Gateway"]

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Headers = Sequence[tuple[bytes, bytes]]

_TRIES = 4
"""Servers that may be lost over one request, before it is believed to be its fault."""

_STALE_TRIES = 64
"""Connections that were closed while they were idle say nothing of the server or the request."""

_ENDING = (499, 503)
"""What a server says that starts, that ends, or that has to end before it has the answer. 499 is for clients that have
gone, which this one has not.
"""

_RETRY_S = 0.05
_HEALTH_S = 2.0
_SPARE_S = 5.0
"""A server answers late requests itself (504); past this time it is not heard of any more."""

# Of one connection (RFC 9110, 7.6.1), or made anew for the next one.
_OWN_HEADERS = {
    b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect",
    b"content-length",
}  # fmt: skip
_OWN_ANSWERS = {b"connection", b"keep-alive", b"transfer-encoding", b"date"}
_MILLISECONDS = re.compile(rb"[0-9]{1,12}")
_SERIES = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (.*)")
_HEALTH = {"/health/live", "/health/ready"}
_PROXY_HEALTH = "/-/healthz"
"""What KubeRay asks Ray's proxies for, before it lets a pod have requests; the body must have the word success."""


_log = logging.getLogger("encast.gateway")


class Gateway:
    """In the running event loop. ``limits``: of requests, as its servers have them."""

    def __init__(self, upstreams: Upstreams, limits: RequestLimits) -> None:
        self.upstreams, self._limits = upstreams, limits
        self._loop = asyncio.get_running_loop()
        self._held = 0
        """Bytes of the bodies of all requests under way."""
        self._answers: Counter[int] = Counter()
        self._retries: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """A request of HTTP."""
        size = 0
        try:
            body = b"" if scope["method"] in ("GET", "HEAD") else await self._read(receive)
            size = len(body)
            answer = await self.answer(scope, body)
        except RefusalError as error:
            answer = self._refuse(error)
        finally:
            self._held -= size
        await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
        await send({"type": "http.response.body", "body": answer.body})

    async def answer(self, scope: Mapping[str, Any], body: bytes) -> Answer:
        """To a request whose body is here; counted, whatever becomes of it."""
        method, path, headers = scope["method"], scope["path"], scope["headers"]
        try:
            if method in ("GET", "HEAD") and path in _HEALTH:
                answer = await self._health(path)
            elif method in ("GET", "HEAD") and path == _PROXY_HEALTH:
                await self._health("/health/ready")
                answer = _given(Answer(200, [(b"content-type", b"text/plain; charset=utf-8")], b"success"))
            elif method in ("GET", "HEAD") and path == "/metrics":
                answer = await self._metrics(headers)
            else:
                answer = await self._forward(method, _target(scope), headers, body)
        except RefusalError as error:
            return self._refuse(error)
        except asyncio.CancelledError:
            self._count(499, "cancelled")
            raise
        except Exception:
            _log.exception("a defect met %s %s", method, path)
            return self._refuse(RefusalError("failed", "the gateway failed; its log says why"))
        self._answers[answer.status] += 1
        return answer

    async def _read(self, receive: Receive) -> bytes:
        parts, size, most = list[bytes](), 0, self._limits.max_body_bytes
        try:
            with Within(self._limits.body_timeout_s, self._loop):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise RefusalError("cancelled", "the client went away")
                    part, more = message.get("body", b""), message.get("more_body", False)
                    if self._held > size and self._held + len(part) > self._limits.max_inflight_bytes:
                        most = self._limits.max_inflight_bytes
                        raise RefusalError(
                            "overloaded", f"the bodies of the requests under way have {most} bytes; try again",
                            retry_after=1,
                        )  # fmt: skip
                    size += len(part)
                    self._held += len(part)
                    if size > most:
                        raise RefusalError(
                            "too_large", f"the body has more than {most} bytes; send fewer texts a request"
                        )
                    parts.append(part)
        except BaseException as error:
            self._held -= size
            if isinstance(error, asyncio.CancelledError):
                self._count(499, "cancelled")
            if isinstance(error, asyncio.TimeoutError):
                late = f"the body did not arrive within {self._limits.body_timeout_s:g} s"
                raise RefusalError("stalled", late) from None
            raise
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _forward(self, method: str, target: bytes, headers: Headers, body: bytes) -> Answer:
        """The answer of a server; raises ``RefusalError`` where none can be had."""
        parts = _request(method, target, headers, body)
        seconds = min(self._limits.timeout_s, _timeout_s(headers))
        try:
            with Within(seconds + _SPARE_S, self._loop):
                return await self._ask(parts, len(body), time.monotonic() + seconds)
        except asyncio.TimeoutError:
            raise RefusalError("expired", f"there is no answer after {seconds:g} s; try again") from None

    async def _ask(self, parts: Sequence[bytes], size: int, deadline: float) -> Answer:
        tried: set[str] = set()
        lost = stale = 0
        answer = None
        while True:
            upstream = self.upstreams.choose(tried)
            if upstream is not None:
                try:
                    answer = await upstream.ask(parts, size)
                except LostError as error:
                    answer = None
                    if error.stale and stale < _STALE_TRIES:
                        stale += 1
                        continue
                    self._note(upstream, tried)
                    self._retries["lost"] += 1
                    lost += error.sent
                    if lost >= _TRIES:
                        raise RefusalError(
                            "failed", f"{lost} servers ended while they worked on this request; send other texts"
                        ) from None
                else:
                    if answer.status not in _ENDING:
                        return _given(answer)
                    self._note(upstream, tried)
                    self._retries["unavailable"] += 1
                if upstream.name in tried and len(tried) < len(self.upstreams.by_name):
                    continue
            # All of them were tried, or there is none: something may come up before the client gives up.
            if time.monotonic() + _RETRY_S >= deadline:
                if answer is not None:
                    return _given(answer)
                raise RefusalError("unavailable", "no server can be reached; try again", retry_after=1)
            await self.upstreams.change(_RETRY_S)
            tried.clear()

    def _note(self, upstream: Upstream, tried: set[str]) -> None:
        self.upstreams.put_aside(upstream)
        tried.add(upstream.name)

    def _count(self, status: int, failure: str) -> None:
        self._answers[status] += 1
        self._failures[failure] += 1

    def _refuse(self, error: RefusalError) -> Answer:
        self._count(error.status, error.kind)
        answer = _given(Answer(error.status, [(b"content-type", b"application/json")], error_body(error)))
        if error.retry_after is not None:
            answer.headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after))))
        if error.kind in ("too_large", "stalled"):  # the rest of the body is not read
            answer.headers.append((b"connection", b"close"))
        return answer

    async def _health(self, path: str) -> Answer:
        """Live where this process answers, ready where a server is."""
        request = _request("GET", path.encode(), (), b"")
        for _ in range(len(self.upstreams.by_name)):
            upstream = self.upstreams.choose()
            if upstream is None:
                break
            with contextlib.suppress(LostError, asyncio.TimeoutError), Within(_HEALTH_S):
                answer = await upstream.ask(request, 0)
                if answer.status == 200:
                    return _given(answer)
            self.upstreams.put_aside(upstream)
        if path == "/health/live":
            return _given(Answer(200, [(b"content-type", b"application/json")], b'{"status":"live","models":[]}'))
        raise RefusalError("unavailable", "no server is ready", retry_after=1)

    async def _metrics(self, headers: Headers) -> Answer:
        """The metrics of all servers, each series with its server, and the gateway's own."""
        request = _request("GET", b"/metrics", headers, b"")
        known = list(self.upstreams.by_name.values())
        answers = await asyncio.gather(*(self._metrics_of(one, request) for one in known))
        for answer in answers:
            if answer is not None and answer.status in (401, 403):
                return _given(answer)
        texts = [
            (one.label, answer.body.decode())
            for one, answer in zip(known, answers, strict=True)
            if answer is not None and answer.status == 200
        ]
        body = merged(texts) + self._own_metrics()
        return _given(Answer(200, [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")], body.encode()))

    async def _metrics_of(self, upstream: Upstream, request: Sequence[bytes]) -> Answer | None:
        with contextlib.suppress(LostError, asyncio.TimeoutError), Within(2.0):
            return await upstream.ask(request, 0)
        return None

    def _own_metrics(self) -> str:
        lines = [
            "# HELP encast_gateway_requests_total Requests at this gateway, by the HTTP status of the answer.",
            "# TYPE encast_gateway_requests_total counter",
            *(
                f'encast_gateway_requests_total{{status="{one}"}} {count}'
                for one, count in sorted(self._answers.items())
            ),
            "# HELP encast_gateway_failures_total Requests that the gateway itself refused.",
            "# TYPE encast_gateway_failures_total counter",
            *(
                f'encast_gateway_failures_total{{reason="{one}"}} {count}'
                for one, count in sorted(self._failures.items())
            ),
            "# HELP encast_gateway_retries_total Times that a server was lost, or not ready, and one was asked again.",
            "# TYPE encast_gateway_retries_total counter",
            *(
                f'encast_gateway_retries_total{{reason="{one}"}} {count}'
                for one, count in sorted(self._retries.items())
            ),
            "# HELP encast_gateway_servers Servers that this gateway knows.",
            "# TYPE encast_gateway_servers gauge",
            f"encast_gateway_servers {len(self.upstreams.by_name)}",
        ]
        return "\n".join(lines) + "\n"


def merged(texts: Sequence[tuple[str, str]]) -> str:
    """Prometheus' texts of several servers as one, each series with its ``server``. A metric's lines stay together, as
    the format wants them.
    """
    blocks: dict[str, tuple[list[str], list[str]]] = {}
    for server, text in texts:
        block: tuple[list[str], list[str]] = ([], [])
        for line in text.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                known = name in blocks
                block = blocks.setdefault(name, ([], []))
                if not known:
                    block[0].append(line)
                about = not known
            elif line.startswith("#"):
                if about:
                    block[0].append(line)
            elif (found := _SERIES.fullmatch(line)) is not None:
                name, labels, value = found.groups()
                labels = f"{labels}," if labels else ""
                block[1].append(f'{name}{{{labels}server="{server}"}} {value}')
    lines = [line for about, series in blocks.values() for line in (*about, *series)]
    return "\n".join(lines) + "\n" if lines else ""


def _target(scope: Mapping[str, Any]) -> bytes:
    query = scope["query_string"]
    path: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    return path + b"?" + query if query else path


def _request(method: str, target: bytes, headers: Headers, body: bytes) -> list[bytes]:
    # uvicorn leaves the body out of the answer to a HEAD, and the connection's parser would wait for it.
    verb = b"GET" if method == "HEAD" else method.encode("latin-1")
    lines = [verb, b" ", target, b" HTTP/1.1\r\n"]
    for name, value in headers:
        if name not in _OWN_HEADERS:
            lines += (name, b": ", value, b"\r\n")
    if verb != b"GET":
        lines.append(b"content-length: %d\r\n" % len(body))
    lines.append(b"\r\n")
    head = b"".join(lines)
    return [head, body] if body else [head]


def _given(answer: Answer) -> Answer:
    """As it is sent on."""
    headers = [one for one in answer.headers if one[0] not in _OWN_ANSWERS]
    if not any(name == b"content-length" for name, _ in headers):
        headers.append((b"content-length", b"%d" % len(answer.body)))
    answer.headers = headers
    return answer


def _timeout_s(headers: Headers) -> float:
    """What the client allows; what is no number its server refuses."""
    for name, value in headers:
        if name == b"x-timeout-ms" and _MILLISECONDS.fullmatch(value):
            return max(0.001, int(value) / 1e3)
    return math.inf
