"""KServe's Open Inference Protocol over gRPC, as a client."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from encast.errors import InputError
from encast.loadtest.answers import Answers, BadAnswerError, Target
from encast.loadtest.transport import FailedError, Reply

__all__ = ["Grpc", "decode", "encode", "text_input"]

_SERVICE = "/inference.GRPCInferenceService"
_FAULTS = ("INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "UNAUTHENTICATED", "PERMISSION_DENIED")


def _messages() -> Any:
    """The module, imported when it is needed: the other protocols need no protobuf."""
    from encast.kserve import messages_pb2

    return messages_pb2


def encode(target: Target, rows: Sequence[Any]) -> bytes:
    request = _messages().ModelInferRequest(model_name=target.model)
    given = request.inputs.add(name=target.input, datatype="BYTES", shape=[len(rows)])
    given.contents.bytes_contents.extend(text.encode() for text in rows)
    return bytes(request.SerializeToString())


def decode(body: bytes, texts: int) -> Answers:
    """Of the first output of f32. Raises ``BadAnswerError``."""
    response = _parsed("ModelInferResponse", body)
    at = next((at for at, one in enumerate(response.outputs) if one.datatype == "FP32"), None)
    if at is None:
        raise BadAnswerError("no output of type FP32")
    output = response.outputs[at]
    raw = response.raw_output_contents
    numbers = raw[at] if at < len(raw) else np.array(output.contents.fp32_contents, "<f4").tobytes()
    shape = list(output.shape)
    width = len(numbers) // texts
    if not shape or shape[0] != texts or 4 * math.prod(shape) != len(numbers) or not width:
        raise BadAnswerError(f"an output of shape {shape} and {len(numbers)} bytes for {texts} texts")
    return Answers([numbers[begin : begin + width] for begin in range(0, len(numbers), width)])


def text_input(body: bytes) -> str | None:
    """The first input of texts, of a model's metadata. Raises ``BadAnswerError``."""
    inputs = _parsed("ModelMetadataResponse", body).inputs
    return next((str(one.name) for one in inputs if one.datatype == "BYTES"), None)


def _parsed(name: str, body: bytes) -> Any:
    from google.protobuf.message import DecodeError

    try:
        return getattr(_messages(), name).FromString(body)
    except DecodeError as error:
        raise BadAnswerError(f"no {name}: {error}") from None


class Grpc:
    """One channel for all requests; ``url`` has no path, https asks for TLS. Raises ``InputError``."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout: float) -> None:
        scheme, _, self._address = url.rstrip("/").partition("://")
        if "/" in self._address:
            raise InputError(f"{url}: gRPC has no paths; give the host and the port alone")
        self._secure = scheme == "https"
        self._metadata = [(name.lower(), value) for name, value in headers.items()]
        self._timeout = timeout

    async def __aenter__(self) -> Grpc:
        import grpc.aio

        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._grpc: Any = grpc
        self._channel = (
            grpc.aio.secure_channel(self._address, grpc.ssl_channel_credentials(), options)
            if self._secure
            else grpc.aio.insecure_channel(self._address, options)
        )
        self._infer = self._channel.unary_unary(f"{_SERVICE}/ModelInfer")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def send(self, body: bytes) -> Reply:
        """Raises ``FailedError``."""
        return await self._ask(self._infer, body)

    async def metadata(self, model: str) -> Reply:
        """What the server says of a model. Raises ``FailedError``."""
        request = _messages().ModelMetadataRequest(name=model)
        return await self._ask(self._channel.unary_unary(f"{_SERVICE}/ModelMetadata"), request.SerializeToString())

    async def _ask(self, method: Any, body: bytes) -> Reply:
        try:
            return Reply(await method(body, timeout=self._timeout, metadata=self._metadata))
        except self._grpc.aio.AioRpcError as error:
            code, details = error.code().name, error.details() or ""
            if code == "DEADLINE_EXCEEDED":
                raise FailedError("timeout") from None
            if code == "UNAVAILABLE":
                refused = "connection refused" in details.lower()
                raise FailedError("connection refused" if refused else f"gRPC UNAVAILABLE: {details}"[:120]) from None
            waits = dict(error.trailing_metadata() or ()).get("retry-after")
            return Reply(
                details.encode(), f"gRPC {code}", rejected=code == "RESOURCE_EXHAUSTED", fault=code in _FAULTS,
                retry_after=None if waits is None else str(waits),
            )  # fmt: skip
