"""The ASGI application of a front: reads requests, hands them to operations, says errors as their protocol does."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from encast.serve.call import Call
from encast.serve.errors import STATUS, RefusalError
from encast.serve.operations import Operation, Protocol, Reply
from encast.serve.service import Finished, Service

__all__ = ["create_app"]


def create_app(service: Service, protocols: list[Protocol]) -> Starlette:
    """The application that serves the operations of ``protocols``."""
    routes = [
        Route(operation.path, _endpoint(service, protocol, operation), methods=[operation.method], name=operation.name)
        for protocol in protocols
        for operation in protocol.operations
    ]
    return Starlette(routes=routes)


def _endpoint(service: Service, protocol: Protocol, operation: Operation) -> Any:
    decoder = None if operation.body is None or operation.raw else msgspec.json.Decoder(operation.body)
    statuses = {**STATUS, **protocol.statuses}

    async def endpoint(request: Request) -> Response:
        begin = time.monotonic()
        limits = service.limits
        call = Call(arrived=begin, deadline=begin + limits.timeout_s, headers=request.headers, path=request.path_params)
        request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
        key, refusal, reply = "", None, None
        service.running += 1
        try:
            key = _admit(service, operation, request)
            call.body = await _read(request, limits.max_body_bytes, limits.body_timeout_s)
            body = None if decoder is None else _decode(decoder, request, call.body)
            reply = await operation.handler(service, call, body)
        except RefusalError as error:
            refusal = error
        finally:
            service.running -= 1
        if refusal is not None:
            response = Response(protocol.error(refusal), statuses[refusal.kind], media_type="application/json")
            if refusal.retry_after is not None:
                response.headers["retry-after"] = str(max(1, round(refusal.retry_after)))
        else:
            assert isinstance(reply, Reply)
            response = Response(reply.body, media_type=reply.media_type, headers=dict(reply.headers))
        response.headers["x-request-id"] = request_id
        finished = Finished(
            operation.name, protocol.name, response.status_code, refusal.kind if refusal else "",
            refusal.message if refusal else "", call, time.monotonic() - begin, key, request_id, len(response.body),
        )  # fmt: skip
        for tell in service.finished:
            tell(finished)
        return response

    return endpoint


def _admit(service: Service, operation: Operation, request: Request) -> str:
    """The name of the request's key; raises ``RefusalError``."""
    key = service.authorise(request.headers.get("authorization"))
    if key is None:
        raise RefusalError("unauthorized", "the API key is missing or wrong; send Authorization: Bearer KEY")
    if operation.runs and not service.ready():
        raise RefusalError("unavailable", "the server is starting, or about to end", retry_after=1)
    if operation.runs and service.running > service.limits.max_concurrent:
        raise RefusalError(
            "overloaded", f"{service.running - 1} requests are under way; try again later", retry_after=1
        )
    return key


async def _read(request: Request, most: int, timeout_s: float) -> bytes:
    async def read() -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise RefusalError("too_large", f"the body has more than {most} bytes; send fewer texts a request")
            parts.append(part)
        return b"".join(parts)

    try:
        return await asyncio.wait_for(read(), timeout_s)
    except asyncio.TimeoutError:
        raise RefusalError("expired", f"the body did not arrive within {timeout_s:g} s") from None
    except ClientDisconnect:
        raise RefusalError("cancelled", "the client went away") from None


def _decode(decoder: msgspec.json.Decoder[Any], request: Request, body: bytes) -> Any:
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RefusalError("media_type", f"the content type is {kind[:100]!r}; send application/json")
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RefusalError("invalid", f"the body is not what this route takes: {error}") from None
