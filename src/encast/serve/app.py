"""The ASGI application of a front: reads requests, hands them to operations, says errors as their protocol does."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from encast.errors import InputError
from encast.serve.call import REQUEST_ID, Call, fresh_id
from encast.serve.errors import STATUS, RefusalError
from encast.serve.openapi import document_operation
from encast.serve.operations import Operation, Protocol, Reply, error_body
from encast.serve.service import Finished, RequestLimits, Service
from encast.serve.within import Within

__all__ = ["create_app"]

Endpoint = Callable[[Request], Awaitable["_Response"]]

_MILLISECONDS = re.compile(r"[0-9]{1,12}")
_log = logging.getLogger("encast.serve")


def create_app(service: Service, protocols: Sequence[Protocol]) -> ASGIApp:
    """The application that serves the operations of ``protocols``, and the document of them at ``/openapi.json``."""
    document = Protocol("openapi", [document_operation(protocols)], error_body)
    paths: dict[str, dict[str, Endpoint]] = {}
    for protocol in (*protocols, document):
        for operation in protocol.operations:
            methods = paths.setdefault(operation.path, {})
            assert operation.method not in methods, f"two operations for {operation.method} {operation.path}"
            methods[operation.method] = _endpoint(service, protocol, operation)
    routes = [Route(path, _by_method(methods), methods=list(methods)) for path, methods in paths.items()]
    handlers: Any = {HTTPException: _no_route(service)}  # which Starlette wants to give a Response of its own
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    plain = {(method, path): one for path, own in paths.items() for method, one in own.items() if "{" not in path}

    async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
        # By one look where the path has no parameters: Starlette tries one route after the other.
        endpoint = plain.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if endpoint is None:
            await app(scope, receive, send)
        else:
            await (await endpoint(Request(scope, receive)))(scope, receive, send)

    return dispatch


class _Response:
    """An answer with its headers. Starlette's would look each of them up and encode it anew."""

    def __init__(self, body: bytes, status: int, media_type: str) -> None:
        self.body, self.status = body, status
        if media_type.startswith("text/") and "charset=" not in media_type:
            media_type += "; charset=utf-8"
        self.headers = {"content-length": str(len(body)), "content-type": media_type}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self.headers.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def _by_method(endpoints: dict[str, Endpoint]) -> Endpoint:
    if len(endpoints) == 1:
        return next(iter(endpoints.values()))

    async def endpoint(request: Request) -> _Response:
        return await endpoints["GET" if request.method == "HEAD" else request.method](request)

    return endpoint


def _endpoint(service: Service, protocol: Protocol, operation: Operation) -> Endpoint:
    decoder = None if operation.body is None or operation.raw else msgspec.json.Decoder(operation.body)
    statuses = {**STATUS, **protocol.statuses}

    async def endpoint(request: Request) -> _Response:
        call = _call(request, service.limits)
        key, refusal, reply = "", None, None
        service.running += 1
        try:
            key = _admit(service, operation, call)
            call.deadline = min(call.deadline, call.arrived + _timeout_s(call))
            if operation.method != "GET":
                call.body = await _read(request, service, call)
            body = None if decoder is None else _decode(decoder, call)
            reply = await _answer(service, operation, call, body)
        except RefusalError as error:
            refusal = error
        except InputError as error:
            refusal = RefusalError("unprocessable", str(error))
        except asyncio.CancelledError:
            refusal = RefusalError("cancelled", "the client went away, or the server could wait no longer")
        except Exception:
            # The reason may hold a path or a part of a text: it is for the log, not for the client.
            _log.exception("a defect met %s %s, request %s", request.method, operation.path, call.id)
            refusal = RefusalError("failed", f"the server failed; its log has the reason for request {call.id}")
        finally:
            service.running -= 1
            service.release(call)
        if refusal is not None:
            response = _refuse(call, service.limits, refusal, statuses[refusal.kind], protocol.error(refusal))
        else:
            assert isinstance(reply, Reply)
            response = _Response(reply.body, 200, reply.media_type)
            response.headers.update(reply.headers)
        _finish(service, response, call, operation.name, protocol.name, key, refusal)
        return response

    return endpoint


def _no_route(service: Service) -> Callable[[Request, Exception], Awaitable[_Response]]:
    """Answers what no route takes."""

    async def handler(request: Request, error: Exception) -> _Response:
        assert isinstance(error, HTTPException)
        call = _call(request, service.limits)
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            refusal = RefusalError("method", f"{request.method[:20]} is not for this path; it takes {allowed}")
        else:
            refusal = RefusalError("not_found", "there is no such path; /openapi.json lists those there are")
        response = _refuse(call, service.limits, refusal, error.status_code, error_body(refusal))
        response.headers.update((name.lower(), value) for name, value in (error.headers or {}).items())
        _finish(service, response, call, "unknown", "", "", refusal)
        return response

    return handler


def _call(request: Request, limits: RequestLimits) -> Call:
    now = time.monotonic()
    # Of a header that came twice the first one counts. Starlette's Headers are searched for each name.
    given = reversed(request.scope["headers"])
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in given}
    name = headers.get("x-request-id", "")
    return Call(
        arrived=now,
        deadline=now + limits.timeout_s,
        headers=headers,
        path=request.path_params,
        id=name if REQUEST_ID.fullmatch(name) else fresh_id(),
    )


def _admit(service: Service, operation: Operation, call: Call) -> str:
    """The name of the request's key; raises ``RefusalError`` for what needs no look into the body."""
    works = operation.body is not None
    size, limits = _announced(call), service.limits
    key = service.admit(
        call.headers.get("authorization"), size=size, works=works, runs=operation.runs, open=operation.open
    )
    if size is not None and size > limits.max_body_bytes:
        raise _too_large(limits.max_body_bytes)
    return key


def _timeout_s(call: Call) -> float:
    """What the client allows for its answer."""
    text = call.headers.get("x-timeout-ms")
    if text is None:
        return math.inf
    if not _MILLISECONDS.fullmatch(text) or int(text) == 0:
        raise RefusalError("invalid", f"x-timeout-ms is {text[:40]!r}; give whole milliseconds, 1 or more")
    return int(text) / 1e3


def _announced(call: Call) -> int | None:
    """The size of the body by its header; None when it comes in chunks."""
    if "transfer-encoding" in call.headers:
        return None
    size = call.headers.get("content-length", "0")
    return int(size) if _MILLISECONDS.fullmatch(size) else None


def _too_large(most: int) -> RefusalError:
    return RefusalError("too_large", f"the body has more than {most} bytes; send fewer texts a request")


async def _read(request: Request, service: Service, call: Call) -> bytes:
    limits = service.limits

    parts, size = [], 0
    try:
        with Within(limits.body_timeout_s):
            more = True
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise RefusalError("cancelled", "the client went away")
                part, more = message.get("body", b""), message.get("more_body", False)
                size += len(part)
                if size > limits.max_body_bytes:
                    raise _too_large(limits.max_body_bytes)
                service.hold(call, len(part))
                parts.append(part)
    except asyncio.TimeoutError:
        raise RefusalError("stalled", f"the body did not arrive within {limits.body_timeout_s:g} s") from None
    return b"".join(parts)


def _decode(decoder: msgspec.json.Decoder[Any], call: Call) -> Any:
    kind = call.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RefusalError("media_type", f"the content type is {kind[:100]!r}; send application/json")
    try:
        # Not in a thread: the decoder holds the interpreter's lock, so the event loop would wait all the same. It takes
        # 5 ms for 16 MiB of texts; 0.2 s where they are millions of single letters.
        return decoder.decode(call.body)
    except RecursionError:
        raise RefusalError("invalid", "the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusalError("invalid", f"the body is not what this route takes: {error}") from None


async def _answer(service: Service, operation: Operation, call: Call, body: Any) -> Reply:
    """The handler's answer. When the deadline passes the handler is cancelled, and its runs with it."""
    try:
        with Within(call.deadline - time.monotonic()):
            return await operation.handler(service, call, body)
    except asyncio.TimeoutError:
        message = f"there is no answer after {call.deadline - call.arrived:g} s; try again"
        raise RefusalError("expired", message) from None


def _refuse(call: Call, limits: RequestLimits, refusal: RefusalError, status: int, body: bytes) -> _Response:
    response = _Response(body, status, "application/json")
    if refusal.retry_after is not None:
        response.headers["retry-after"] = str(max(1, math.ceil(refusal.retry_after)))
    if refusal.kind == "unauthorized":
        response.headers["www-authenticate"] = "Bearer"
    # What of the body was not read yet would be read and dropped for the next request's sake, if it may be.
    size = _announced(call)
    if size is None or size > limits.max_body_bytes or refusal.kind == "stalled":
        response.headers["connection"] = "close"
    return response


def _finish(
    service: Service, response: _Response, call: Call, operation: str, protocol: str, key: str,
    refusal: RefusalError | None,
) -> None:  # fmt: skip
    """Adds the headers that every answer has, and tells those who count."""
    total_s = time.monotonic() - call.arrived
    response.headers.update(call.facts(total_s))
    finished = Finished(
        operation, protocol, response.status, refusal.kind if refusal else "", refusal.message if refusal else "",
        call, total_s, key, call.id, len(response.body),
    )  # fmt: skip
    # Once the answer is on its way: who counts is not waited for.
    asyncio.get_running_loop().call_soon(_tell, service, finished)


def _tell(service: Service, finished: Finished) -> None:
    for tell in service.finished:
        try:
            tell(finished)
        except Exception:
            _log.exception("request %s was not counted, logged or traced", finished.request_id)
