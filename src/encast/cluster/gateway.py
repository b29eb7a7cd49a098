"""The ASGI application of a gateway: hands each request to one of the servers, and to another one if that is lost.

It reads a request whole before a server is asked, so that it can be asked again. Every route computes and changes
nothing, so asking twice does no harm. What it answers itself is health, metrics, and that nobody could answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from encast.cluster.upstream import Answer, LostError, Upstream, Upstreams
from encast.serve.errors import RefusalError
from encast.serve.keys import Keys
from encast.serve.operations import error_body
from encast.serve.service import RequestLimits
from encast.serve.within import Within

__all__ = ["Gateway"]

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Headers = Sequence[tuple[bytes, bytes]]

_TRIES = 4
"""Servers that may be lost over one request, before it is believed to be its fault."""

_ENDING = (499, 503)
"""What a server says that starts, that ends, or that has to end before it has the answer. 499 is for clients that have
gone, which this one has not.
"""

_RETRY_S = 0.05
_LONGEST_RETRY_S = 1.0
"""While no server takes a request they are all asked again after the first of these, and then ever more seldom."""

_HEALTH_S = 2.0
_HEALTH_NEXT_S = 0.1
"""A server that does not say so soon that it is ready is not waited for alone."""

_SPARE_S = 5.0
"""A server answers late requests itself (504); past this time it is not heard of any more."""

_BUFFERED_BYTES = 64 << 10
"""What uvicorn writes without waiting for its client."""

# Of one connection (RFC 9110, 7.6.1), or made anew for the next one.
_OWN_HEADERS = {
    b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect",
    b"content-length",
}  # fmt: skip
_OWN_ANSWERS = {
    b"connection", b"keep-alive", b"proxy-connection", b"trailer", b"transfer-encoding", b"upgrade", b"date",
}  # fmt: skip
_NUMBER = re.compile(rb"[0-9]{1,12}")
_SERIES = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (.*)")
_PROXY_HEALTH = "/-/healthz"
"""What KubeRay asks Ray's proxies for, before it lets a pod have requests; the body must have the word success."""

_READS = ("GET", "HEAD")
_OPEN = re.compile(rf"/|{_PROXY_HEALTH}|/health(/live|/ready)?|/v2/health/(live|ready)|/v2/models/.+/ready", re.DOTALL)
"""Paths that servers answer without a key, when they are read."""

_log = logging.getLogger("encast.gateway")


class _Held:
    """Of one request: the bytes of its body, and of its answer."""

    size = 0


class Gateway:
    """In the running event loop. ``limits``: of requests, as its servers have them. ``keys``: without one of them it
    answers probes of health only; None: whoever asks is answered, as far as the servers do.
    """

    def __init__(self, upstreams: Upstreams, limits: RequestLimits, keys: Keys | None = None) -> None:
        self.upstreams, self._limits, self._keys = upstreams, limits, keys
        self._loop = asyncio.get_running_loop()
        self._running = 0
        self._held = 0
        """Bytes of the bodies and answers of all requests under way."""
        self._answers: Counter[int] = Counter()
        self._retries: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """A request of HTTP."""
        with self._under_way() as held:
            answer = await self._answer(scope, receive, held)
            await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
            # After a large body uvicorn waits at the next message, until the client has read: so long it is held.
            large = len(answer.body) > _BUFFERED_BYTES
            await send({"type": "http.response.body", "body": answer.body, "more_body": large})
            if large:
                await send({"type": "http.response.body", "body": b""})

    async def answer_whole(self, scope: Mapping[str, Any], body: bytes) -> Answer:
        """To a request whose body is here already, which is admitted like any other. It is held until this returns:
        who sends the answer is not known here.
        """

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        with self._under_way() as held:
            return await self._answer(scope, receive, held)

    @contextlib.contextmanager
    def _under_way(self) -> Iterator[_Held]:
        held = _Held()
        self._running += 1
        try:
            yield held
        finally:
            self._running -= 1
            self._held -= held.size

    async def _answer(self, scope: Mapping[str, Any], receive: Receive, held: _Held) -> Answer:
        """Admits, reads and answers; the one way of all requests. Counted, whatever becomes of it."""
        method, path = scope["method"], scope["path"]
        try:
            self._admit(method, path, scope["headers"])
            # A body here has no meaning (RFC 9110, 9.3.1). It must not reach a server, which would take it for the
            # next request on its connection.
            body = b"" if method in _READS else await self._read(receive, held)
            answer = await self._routed(scope, body)
        except RefusalError as error:
            return self._refuse(error, scope["headers"])
        except asyncio.CancelledError:
            self._count(499, "cancelled")
            raise
        except Exception:
            _log.exception("a defect met %s %s", method, path)
            return self._refuse(RefusalError("failed", "the gateway failed; its log says why"), scope["headers"])
        self._answers[answer.status] += 1
        held.size += len(answer.body)
        self._held += len(answer.body)
        return answer

    async def _routed(self, scope: Mapping[str, Any], body: bytes) -> Answer:
        method, path, headers = scope["method"], scope["path"], scope["headers"]
        if method in _READS:
            if path == "/health/live":
                return _given(Answer(200, [(b"content-type", b"application/json")], b'{"status":"live","models":[]}'))
            if path == "/health/ready":
                return await self._ready()
            if path == _PROXY_HEALTH:
                await self._ready()
                return _given(Answer(200, [(b"content-type", b"text/plain; charset=utf-8")], b"success"))
            if path == "/metrics":
                return await self._metrics(headers)
        return await self._forward(method, _target(scope), headers, body)

    def _admit(self, method: str, path: str, headers: Headers) -> None:
        """Raises ``RefusalError`` for what needs no look into the body, as ``Service.admit`` does."""
        works = method not in _READS
        if self._keys is not None and (works or not _OPEN.fullmatch(path)):
            given = _first(headers, b"authorization")
            if self._keys.authorise(None if given is None else given.decode("latin-1")) is None:
                raise RefusalError("unauthorized", "the API key is missing or wrong; send Authorization: Bearer KEY")
        if works and self._running > self._limits.max_concurrent:
            raise RefusalError("overloaded", f"{self._running - 1} requests are under way; try again", retry_after=1)
        size = _announced(headers)
        if size is not None and size > self._limits.max_body_bytes:
            raise _too_large(self._limits.max_body_bytes)

    async def _read(self, receive: Receive, held: _Held) -> bytes:
        """The body; raises ``RefusalError``."""
        parts, limits = list[bytes](), self._limits
        try:
            with Within(limits.body_timeout_s, self._loop):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise RefusalError("cancelled", "the client went away")
                    part, more = message.get("body", b""), message.get("more_body", False)
                    if held.size + len(part) > limits.max_body_bytes:
                        raise _too_large(limits.max_body_bytes)
                    # One alone is always taken.
                    if self._held > held.size and self._held + len(part) > limits.max_inflight_bytes:
                        raise RefusalError(
                            "overloaded",
                            f"the requests under way have {limits.max_inflight_bytes} bytes; try again",
                            retry_after=1,
                        )
                    held.size += len(part)
                    self._held += len(part)
                    parts.append(part)
        except asyncio.TimeoutError:
            raise RefusalError("stalled", f"the body did not arrive within {limits.body_timeout_s:g} s") from None
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
        lost, fresh, pause = 0, False, _RETRY_S
        answer = None
        while True:
            upstream = self.upstreams.choose(tried)
            if upstream is not None:
                try:
                    answer = await upstream.ask(parts, size, fresh=fresh)
                except LostError as error:
                    answer = None
                    if error.stale:
                        # Once: from now on this request has connections of its own, which cannot be stale.
                        fresh = True
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
                continue
            # All of them were tried, or there is none: something may come up before the client gives up.
            left = deadline - time.monotonic() - _RETRY_S
            if left <= 0:
                if answer is not None:
                    return _given(answer)
                raise RefusalError("unavailable", "no server can be reached; try again", retry_after=1)
            # Not all the requests that wait at one time.
            await self.upstreams.change(min(left, pause * random.uniform(0.5, 1.0)))
            pause = min(2 * pause, _LONGEST_RETRY_S)
            tried.clear()

    def _note(self, upstream: Upstream, tried: set[str]) -> None:
        self.upstreams.put_aside(upstream)
        tried.add(upstream.name)

    def _count(self, status: int, failure: str) -> None:
        self._answers[status] += 1
        self._failures[failure] += 1

    def _refuse(self, error: RefusalError, headers: Headers) -> Answer:
        self._count(error.status, error.kind)
        answer = _given(Answer(error.status, [(b"content-type", b"application/json")], error_body(error)))
        if error.retry_after is not None:
            answer.headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after))))
        if error.kind == "unauthorized":
            answer.headers.append((b"www-authenticate", b"Bearer"))
        size = _announced(headers)
        if error.kind in ("too_large", "stalled") or size is None or size > self._limits.max_body_bytes:
            # The rest of the body would be read and dropped for the next request's sake.
            answer.headers.append((b"connection", b"close"))
        return answer

    async def _ready(self) -> Answer:
        """What the first server says that is ready. Raises ``RefusalError`` where none does in time."""
        request = _request("GET", b"/health/ready", (), b"")
        tried: set[str] = set()
        asked: dict[asyncio.Task[Answer | None], Upstream] = {}
        try:
            with Within(_HEALTH_S, self._loop):
                while True:
                    upstream = self.upstreams.choose(tried)
                    if upstream is not None:
                        tried.add(upstream.name)
                        asked[self._loop.create_task(self._ready_of(upstream, request))] = upstream
                    if not asked:
                        break
                    pause = None if upstream is None else _HEALTH_NEXT_S
                    done, _ = await asyncio.wait(asked, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        del asked[task]
                        if (answer := task.result()) is not None:
                            return _given(answer)
        except asyncio.TimeoutError:
            for upstream in asked.values():
                self.upstreams.put_aside(upstream)
        finally:
            for task in asked:
                task.cancel()
        raise RefusalError("unavailable", "no server is ready", retry_after=1)

    async def _ready_of(self, upstream: Upstream, request: Sequence[bytes]) -> Answer | None:
        """None where it is not."""
        with contextlib.suppress(LostError):
            try:
                answer = await upstream.ask(request, 0)
            except LostError as error:
                if not error.stale:
                    raise
                answer = await upstream.ask(request, 0, fresh=True)
            if answer.status == 200:
                return answer
        self.upstreams.put_aside(upstream)
        return None

    async def _metrics(self, headers: Headers) -> Answer:
        """The metrics of all servers, each series with its server, and the gateway's own."""
        request = _request("GET", b"/metrics", headers, b"")
        known = list(self.upstreams.by_name.values())
        answers = await asyncio.gather(*(self._metrics_of(one, request) for one in known))
        for answer in answers:
            if answer is not None and answer.status in (401, 403):
                return _given(answer)
        texts = [
            (one.label, answer.body.decode(errors="replace"))
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
        name, about = "", False
        for line in text.splitlines():
            if line.startswith("#"):
                words = line.split(None, 3)
                if len(words) < 3 or words[0] != "#" or words[1] not in ("HELP", "TYPE"):
                    continue  # a comment that says nothing of a metric
                if words[2] != name:
                    name = words[2]
                    about = name not in blocks  # what the servers before said of it is the same
                if about:
                    blocks.setdefault(name, ([], []))[0].append(line)
            elif (found := _SERIES.fullmatch(line)) is not None:
                series, labels, value = found.groups()
                labels = f"{labels}," if labels else ""
                block = blocks.setdefault(name or series, ([], []))
                block[1].append(f'{series}{{{labels}server="{server}"}} {value}')
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
    for name, value in _end_to_end(headers, _OWN_HEADERS):
        lines += (name, b": ", value, b"\r\n")
    if verb != b"GET":
        lines.append(b"content-length: %d\r\n" % len(body))
    lines.append(b"\r\n")
    head = b"".join(lines)
    return [head, body] if body else [head]


def _given(answer: Answer) -> Answer:
    """As it is sent on."""
    headers = _end_to_end(answer.headers, _OWN_ANSWERS)
    if not any(name == b"content-length" for name, _ in headers):
        headers.append((b"content-length", b"%d" % len(answer.body)))
    answer.headers = headers
    return answer


def _end_to_end(headers: Headers, own: Collection[bytes]) -> list[tuple[bytes, bytes]]:
    """Without ``own``, and those that ``connection`` names: they are of the connection that they came on."""
    named = {
        one.strip().lower() for name, value in headers if name == b"connection" for one in value.split(b",")
    }  # fmt: skip
    return [(name, value) for name, value in headers if name not in own and name not in named]


def _first(headers: Headers, wanted: bytes) -> bytes | None:
    return next((value for name, value in headers if name == wanted), None)


def _announced(headers: Headers) -> int | None:
    """The size of the body by its header; None when it comes in chunks."""
    if _first(headers, b"transfer-encoding") is not None:
        return None
    size = _first(headers, b"content-length") or b"0"
    return int(size) if _NUMBER.fullmatch(size) else None


def _too_large(most: int) -> RefusalError:
    return RefusalError("too_large", f"the body has more than {most} bytes; send fewer texts a request")


def _timeout_s(headers: Headers) -> float:
    """What the client allows; what is no number its server refuses."""
    for name, value in headers:
        if name == b"x-timeout-ms" and _NUMBER.fullmatch(value):
            return max(0.001, int(value) / 1e3)
    return math.inf
