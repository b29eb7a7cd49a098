"""The Open Inference Protocol (KServe v2) over gRPC, on a port of its own; what it does is ``open_inference``'s.

A call's deadline is its client's, and cancelling it withdraws its runs. Keys come in the metadata ``authorization``.
``raw_input_contents`` are answered with ``raw_output_contents``, contents with contents. The trailing metadata has what
HTTP answers have in their headers; of a refusal that may be tried again also ``retry-after`` (seconds) and
``grpc-retry-pushback-ms``, which gRPC's own retries obey.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import version
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from encast.errors import InputError
from encast.kserve import messages_pb2 as messages
from encast.serve.call import REQUEST_ID, Call, fresh_id
from encast.serve.errors import STATUS, Kind, RefusalError
from encast.serve.protocols.kserve import EXTENSIONS, PLATFORM
from encast.serve.protocols.open_inference import VERSION, InferRequest, Tensor, find_model, infer, model_tensors
from encast.serve.service import Finished, Service

__all__ = ["GrpcServer", "serve_grpc"]

_CODES: dict[Kind, grpc.StatusCode] = {
    "invalid": grpc.StatusCode.INVALID_ARGUMENT,
    "unauthorized": grpc.StatusCode.UNAUTHENTICATED,
    "not_found": grpc.StatusCode.NOT_FOUND,
    "too_large": grpc.StatusCode.INVALID_ARGUMENT,
    "unprocessable": grpc.StatusCode.INVALID_ARGUMENT,
    "unsupported": grpc.StatusCode.INVALID_ARGUMENT,
    "overloaded": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "cancelled": grpc.StatusCode.CANCELLED,
    "failed": grpc.StatusCode.INTERNAL,
    "unavailable": grpc.StatusCode.UNAVAILABLE,
    "expired": grpc.StatusCode.DEADLINE_EXCEEDED,
}
_CONTENTS = {
    "BYTES": "bytes_contents", "INT32": "int_contents", "INT64": "int64_contents", "FP32": "fp32_contents",
}  # fmt: skip
_log = logging.getLogger("encast.serve")

Handler = Callable[[Service, Call, Any], Awaitable[Any]]


class GrpcServer:
    """A running server; ``port`` is the one that it listens on."""

    def __init__(self, server: Any, port: int) -> None:
        self._server, self.port = server, port

    async def stop(self, grace: float | None) -> None:
        """Takes no more calls; those under way get ``grace`` seconds, and are then cancelled."""
        await self._server.stop(grace)


async def serve_grpc(service: Service, address: str, *, credentials: Any = None) -> GrpcServer:
    """Listens on ``address``, ``host:port``; several processes may share one port. ``credentials``: of
    ``grpc.ssl_server_credentials``, without them the connection is not encrypted. Raises ``InputError`` when the
    address cannot be bound.
    """
    most = service.limits.max_body_bytes
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", most),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", service.limits.max_header_bytes),
            ("grpc.absolute_max_metadata_size", service.limits.max_header_bytes),
            ("grpc.so_reuseport", 1),
        ]
    )
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(_method(service, name, request, handler, runs=runs, open=open))
        for name, request, handler, runs, open in _METHODS
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers)])
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise InputError(f"gRPC cannot listen on {address}: {error}; choose another port") from None
    await server.start()
    return GrpcServer(server, port)


def _method(
    service: Service, name: str, request_type: Any, handler: Handler, *, runs: bool, open: bool
) -> Callable[[bytes, Any], Awaitable[bytes]]:
    operation = f"kserve_grpc.{name}"

    async def method(body: bytes, context: Any) -> bytes:
        now = time.monotonic()
        metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        asked, left = metadata.get("x-request-id", ""), context.time_remaining()
        call = Call(
            arrived=now,
            deadline=now + min(service.limits.timeout_s, math.inf if left is None else left),
            body=body,
            headers=metadata,
            id=asked if REQUEST_ID.fullmatch(asked) else fresh_id(),
        )
        key, refusal, answer = "", None, b""
        service.running += 1
        try:
            key = service.admit(metadata.get("authorization"), size=len(body), works=runs, runs=runs, open=open)
            service.hold(call, len(body))
            answer = await asyncio.wait_for(_answer(service, call, request_type, handler), call.deadline - now)
        except RefusalError as error:
            refusal = error
        except InputError as error:
            refusal = RefusalError("unprocessable", str(error))
        except asyncio.TimeoutError:
            refusal = RefusalError("expired", f"there is no answer after {call.deadline - now:g} s; try again")
        except asyncio.CancelledError:
            refusal = RefusalError("cancelled", "the client went away, or its deadline passed")
            raise
        except Exception:
            # The reason may hold a path or a part of a text: it is for the log, not for the client.
            _log.exception("a defect met %s, request %s", operation, call.id)
            refusal = RefusalError("failed", f"the server failed; its log has the reason for request {call.id}")
        finally:
            service.running -= 1
            service.release(call)
            _finish(service, call, operation, key, refusal, len(answer))
        facts = call.facts(time.monotonic() - call.arrived)
        if refusal is not None:
            if refusal.retry_after is not None:
                facts["retry-after"] = str(max(1, math.ceil(refusal.retry_after)))
                facts["grpc-retry-pushback-ms"] = str(max(1, math.ceil(1e3 * refusal.retry_after)))
            await context.abort(_CODES[refusal.kind], refusal.message, tuple(facts.items()))
        context.set_trailing_metadata(tuple(facts.items()))
        return answer

    return method


async def _answer(service: Service, call: Call, request_type: Any, handler: Handler) -> bytes:
    try:
        request = request_type.FromString(call.body)
    except DecodeError:
        raise RefusalError("invalid", f"the message is no {request_type.DESCRIPTOR.name}") from None
    return bytes((await handler(service, call, request)).SerializeToString())


def _finish(
    service: Service, call: Call, operation: str, key: str, refusal: RefusalError | None, bytes_out: int
) -> None:
    kind, status = ("", 200) if refusal is None else (refusal.kind, STATUS[refusal.kind])
    finished = Finished(
        operation, "kserve_grpc", status, kind, refusal.message if refusal else "", call,
        time.monotonic() - call.arrived, key, call.id, bytes_out,
    )  # fmt: skip
    for tell in service.finished:
        tell(finished)


async def _live(service: Service, call: Call, request: Any) -> Any:
    return messages.ServerLiveResponse(live=True)


async def _ready(service: Service, call: Call, request: Any) -> Any:
    return messages.ServerReadyResponse(ready=service.ready())


async def _model_ready(service: Service, call: Call, request: Any) -> Any:
    find_model(service, request.name, request.version)
    return messages.ModelReadyResponse(ready=service.ready())


async def _server(service: Service, call: Call, request: Any) -> Any:
    return messages.ServerMetadataResponse(name=PLATFORM, version=version("encast"), extensions=EXTENSIONS)


async def _model(service: Service, call: Call, request: Any) -> Any:
    model = find_model(service, request.name, request.version)
    inputs, outputs = (
        [
            messages.ModelMetadataResponse.TensorMetadata(name=spec.name, datatype=spec.datatype, shape=spec.shape)
            for spec in specs
        ]
        for specs in model_tensors(model)
    )
    properties = {"task": model.task, "max_length": str(model.session.tokenizer.max_length), "sha256": model.sha256}
    return messages.ModelMetadataResponse(
        name=model.name, versions=[VERSION], platform=PLATFORM, inputs=inputs, outputs=outputs, properties=properties
    )


async def _infer(service: Service, call: Call, request: Any) -> Any:
    tensors = await call.offload(len(call.body), _tensors, request)
    for one in (*request.inputs, *request.outputs):
        for name in one.parameters:
            raise RefusalError("invalid", f"a tensor has no parameter {name[:100]!r} here")
    asked = InferRequest(
        request.model_name, request.model_version, tensors, [one.name for one in request.outputs],
        _parameters(request.parameters),
    )  # fmt: skip
    model, found = await infer(service, call, asked)
    size = sum(64 + (16 * len(one.values) if one.datatype == "BYTES" else one.values.nbytes) for one in found)
    raw = bool(request.raw_input_contents)
    return await call.offload(size, _response, model.name, request.id, found, raw)


def _parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    choices = {name: parameter.WhichOneof("parameter_choice") for name, parameter in given.items()}
    return {name: None if choice is None else getattr(given[name], choice) for name, choice in choices.items()}


def _tensors(request: Any) -> list[Tensor]:
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise RefusalError("invalid", f"there are {len(request.inputs)} inputs and {len(raw)} raw_input_contents")
    tensors = []
    for index, one in enumerate(request.inputs):
        used = [field.name for field, _ in one.contents.ListFields()]
        if raw:
            if used:
                raise RefusalError(
                    "invalid", f"{one.name[:100]!r} has contents and raw_input_contents; send one of them"
                )
            tensors.append(Tensor.of_raw(one.name, one.datatype, one.shape, raw[index]))
            continue
        wanted = _CONTENTS.get(one.datatype, "")
        if used not in ([], [wanted]):
            raise RefusalError("invalid", f"{one.name[:100]!r} is {one.datatype[:20]!r} and has {', '.join(used)}")
        values = list(getattr(one.contents, wanted)) if wanted else []
        tensors.append(Tensor.of_values(one.name, one.datatype, one.shape, values))
    return tensors


def _response(name: str, id: str, found: list[Tensor], raw: bool) -> Any:
    response = messages.ModelInferResponse(model_name=name, model_version=VERSION, id=id)
    for one in found:
        output = response.outputs.add(name=one.name, datatype=one.datatype, shape=one.shape)
        if raw:
            response.raw_output_contents.append(one.raw())
        else:
            values = one.values if one.datatype == "BYTES" else np.ravel(one.values)
            getattr(output.contents, _CONTENTS[one.datatype]).extend(values)
    return response


_METHODS: list[tuple[str, Any, Handler, bool, bool]] = [
    # name, type of the request, handler, whether it runs the model, whether it needs no key
    ("ServerLive", messages.ServerLiveRequest, _live, False, True),
    ("ServerReady", messages.ServerReadyRequest, _ready, False, True),
    ("ModelReady", messages.ModelReadyRequest, _model_ready, False, True),
    ("ServerMetadata", messages.ServerMetadataRequest, _server, False, False),
    ("ModelMetadata", messages.ModelMetadataRequest, _model, False, False),
    ("ModelInfer", messages.ModelInferRequest, _infer, True, False),
]
