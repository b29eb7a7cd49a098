"""The Open Inference Protocol (KServe v2) over HTTP: JSON, and the extension for binary tensors that Triton has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import version
from itertools import chain
from typing import Any

import msgspec
import orjson

from encast.serve.call import Call
from encast.serve.errors import RefusalError
from encast.serve.operations import Operation, Protocol, Reply
from encast.serve.protocols.open_inference import (
    VERSION,
    InferRequest,
    Tensor,
    find_model,
    infer,
    model_tensors,
)
from encast.serve.service import Service

__all__ = ["EXTENSIONS", "KSERVE", "PLATFORM"]

PLATFORM = "encast"
EXTENSIONS = ["binary_tensor_data"]
_HEADER = "inference-header-content-length"
_SIZE = re.compile(r"[0-9]{1,12}")

Parameters = dict[str, str | int | float | bool | None]


class InputTensor(msgspec.Struct):
    """``data``: the elements, flat or in lists as the shape has them; left out where ``binary_data_size`` of
    ``parameters`` says how many of the bytes after the JSON are this tensor's.
    """

    name: str
    shape: list[int]
    datatype: str
    parameters: Parameters = {}
    data: list[Any] | None = None


class RequestedOutput(msgspec.Struct):
    """``binary_data`` of ``parameters``: whether it comes as bytes after the JSON."""

    name: str
    parameters: Parameters = {}


class InferBody(msgspec.Struct):
    """``parameters``: ``truncate``, ``prompt_name`` of embeddings, ``max_active_dims`` of sparse ones, ``kind`` of
    those of tokens (``query`` or ``document``), ``top_k`` of masks, ``binary_data_output``.
    """

    inputs: list[InputTensor]
    outputs: list[RequestedOutput] | None = None
    id: str | None = None
    parameters: Parameters = {}


class OutputTensor(msgspec.Struct):
    """``data`` is flat, in row-major order."""

    name: str
    shape: list[int]
    datatype: str
    data: list[Any] | None = None
    parameters: Parameters = {}


class InferAnswer(msgspec.Struct):
    """The outputs, in the order in which they were asked for."""

    model_name: str
    model_version: str
    outputs: list[OutputTensor]
    id: str | None = None


class TensorMetadata(msgspec.Struct):
    """-1 is an axis of any length."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(msgspec.Struct):
    """All tensors that the model takes and gives; which go together is in the guide."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ServerMetadata(msgspec.Struct):
    """``extensions`` of the protocol."""

    name: str
    version: str
    extensions: list[str]


class Live(msgspec.Struct):
    """Whether the server is there."""

    live: bool


class Ready(msgspec.Struct):
    """Whether requests are taken."""

    ready: bool


class ModelReady(msgspec.Struct):
    """Whether requests for a model are taken."""

    name: str
    ready: bool


class KserveError(msgspec.Struct):
    """A refusal."""

    error: str


_decoder = msgspec.json.Decoder(InferBody)


async def _infer(service: Service, call: Call, body: None) -> Reply:
    asked, tensors = await call.offload(len(call.body), _decode, call)
    parameters = dict(asked.parameters)
    binary = _flag(parameters.pop("binary_data_output", False), "binary_data_output")
    outputs = asked.outputs or []
    for one in outputs:
        _need_known(one.parameters, "binary_data")
    as_bytes = [_flag(one.parameters.get("binary_data", binary), "binary_data") for one in outputs]
    request = InferRequest(
        call.path["model"], call.path.get("version", ""), tensors, [one.name for one in outputs], parameters
    )
    model, found = await infer(service, call, request)
    size = sum(64 + (16 * len(one.values) if one.datatype == "BYTES" else one.values.nbytes) for one in found)
    return await call.offload(size, _encode, model.name, asked.id, found, as_bytes or [binary] * len(found))


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise RefusalError("invalid", f"the parameter {name} is {str(value)[:40]!r}; true or false is needed")
    return value


def _need_known(parameters: Parameters, known: str) -> None:
    for name in parameters:
        if name != known:
            raise RefusalError("invalid", f"a tensor has no parameter {name[:100]!r} here; it may have {known}")


def _decode(call: Call) -> tuple[InferBody, list[Tensor]]:
    text, rest = call.body, b""
    if (header := call.headers.get(_HEADER)) is not None:
        if not _SIZE.fullmatch(header) or int(header) > len(call.body):
            raise RefusalError("invalid", f"{_HEADER} is {header[:40]!r}; the body has {len(call.body)} bytes")
        text, rest = call.body[: int(header)], call.body[int(header) :]
    elif call.headers.get("content-type", "application/json").partition(";")[0].strip().lower() != "application/json":
        raise RefusalError("media_type", f"send application/json, or {_HEADER} with binary tensors")
    try:
        asked = _decoder.decode(text)
    except RecursionError:
        raise RefusalError("invalid", "the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusalError("invalid", f"the body is not what this route takes: {error}") from None
    tensors, at = [], 0
    for one in asked.inputs:
        _need_known(one.parameters, "binary_data_size")
        size = one.parameters.get("binary_data_size")
        if size is None:
            values = _flat(one)
            tensors.append(Tensor.of_values(one.name, one.datatype, one.shape, values))
            continue
        if type(size) is not int or not 0 <= size <= len(rest) - at or one.data is not None:
            raise RefusalError(
                "invalid",
                f"binary_data_size of {one.name[:100]!r} is {str(size)[:40]}; {len(rest) - at} bytes are left after the"
                " JSON, and data is to be left out",
                field=one.name,
            )
        tensors.append(Tensor.of_raw(one.name, one.datatype, one.shape, rest[at : at + size]))
        at += size
    if at != len(rest):
        raise RefusalError("invalid", f"{len(rest) - at} bytes after the JSON belong to no input")
    return asked, tensors


def _flat(tensor: InputTensor) -> Sequence[Any]:
    """The elements of ``data``, which may be nested as the shape says."""
    data = tensor.data
    if data is None:
        raise RefusalError("invalid", f"{tensor.name[:100]!r} has neither data nor binary_data_size", field=tensor.name)
    if data and isinstance(data[0], list):
        for size, inner in zip(tensor.shape, tensor.shape[1:], strict=False):
            if size < 1 or len(data) % size or any(type(row) is not list or len(row) != inner for row in data):
                raise RefusalError(
                    "invalid", f"data of {tensor.name[:100]!r} is not nested as its shape says", field=tensor.name
                )
            data = list(chain.from_iterable(data))
    return data


def _encode(name: str, id: str | None, found: list[Tensor], as_bytes: list[bool]) -> Reply:
    outputs: list[dict[str, Any]] = []
    rest: list[bytes] = []
    for tensor, binary in zip(found, as_bytes, strict=True):
        one: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if binary:
            rest.append(tensor.raw())
            one["parameters"] = {"binary_data_size": len(rest[-1])}
        elif tensor.datatype == "BYTES":
            one["data"] = [text.decode() for text in tensor.values]
        else:
            one["data"] = tensor.values.ravel()
        outputs.append(one)
    answer = {"model_name": name, "model_version": VERSION, "outputs": outputs}
    if id is not None:
        answer["id"] = id
    # orjson writes f32 in the fewest digits that give the same f32 back.
    text = orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
    if not any(as_bytes):
        return Reply(text)
    return Reply(b"".join([text, *rest]), {_HEADER: str(len(text))}, "application/octet-stream")


async def _server(service: Service, call: Call, body: None) -> Reply:
    return Reply(msgspec.json.encode(ServerMetadata(PLATFORM, version("encast"), EXTENSIONS)))


async def _live(service: Service, call: Call, body: None) -> Reply:
    return Reply(msgspec.json.encode(Live(True)))


async def _ready(service: Service, call: Call, body: None) -> Reply:
    _need_ready(service)
    return Reply(msgspec.json.encode(Ready(True)))


async def _model_ready(service: Service, call: Call, body: None) -> Reply:
    model = find_model(service, call.path["model"], call.path.get("version", ""))
    _need_ready(service)
    return Reply(msgspec.json.encode(ModelReady(model.name, True)))


def _need_ready(service: Service) -> None:
    if not service.ready():
        raise RefusalError("unavailable", "the server is starting, or about to end; try again", retry_after=1)


async def _model(service: Service, call: Call, body: None) -> Reply:
    model = find_model(service, call.path["model"], call.path.get("version", ""))
    inputs, outputs = (
        [TensorMetadata(spec.name, spec.datatype, list(spec.shape)) for spec in specs] for specs in model_tensors(model)
    )
    return Reply(msgspec.json.encode(ModelMetadata(model.name, [VERSION], PLATFORM, inputs, outputs)))


def _error(refusal: RefusalError) -> bytes:
    return msgspec.json.encode(KserveError(refusal.message))


_EXAMPLES = {
    "texts": {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [2], "data": ["a cat", "a dog"]}], "id": "1"},
    "token ids": {"inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [1, 3], "data": [[5, 6, 7]]}]},
}


def _model_operations(prefix: str, suffix: str) -> list[Operation]:
    """The routes of a model, whose path names a version or none."""
    return [
        Operation(
            "POST", f"{prefix}/infer", f"kserve.infer{suffix}", "Inference, in the form of KServe v2", _infer,
            InferBody, InferAnswer, examples=_EXAMPLES, raw=True,
        ),
        Operation(
            "GET", f"{prefix}/ready", f"kserve.model_ready{suffix}", "Whether a model takes requests", _model_ready,
            None, ModelReady, runs=False, open=True,
        ),
        Operation(
            "GET", prefix, f"kserve.model{suffix}", "The tensors of a model", _model, None, ModelMetadata, runs=False
        ),
    ]  # fmt: skip


KSERVE = Protocol(
    "kserve",
    [
        Operation("GET", "/v2", "kserve.server", "The server", _server, None, ServerMetadata, runs=False),
        Operation(
            "GET", "/v2/health/live", "kserve.live", "Whether the server is there", _live, None, Live, runs=False,
            open=True,
        ),
        Operation(
            "GET", "/v2/health/ready", "kserve.ready", "Whether requests are taken", _ready, None, Ready, runs=False,
            open=True,
        ),
        # The longer paths come first: a name may hold slashes.
        *_model_operations("/v2/models/{model:path}/versions/{version}", "_version"),
        *_model_operations("/v2/models/{model:path}", ""),
    ],
    _error,
    {"unprocessable": 400, "unsupported": 400},
    KserveError,
)  # fmt: skip
