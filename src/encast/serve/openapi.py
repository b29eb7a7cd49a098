"""The OpenAPI 3.1 document of a server, made of the operations of its protocols."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

import msgspec

from encast.serve.call import Call
from encast.serve.errors import STATUS, Kind
from encast.serve.models import Models
from encast.serve.operations import Operation, Protocol, Reply
from encast.serve.service import Service

__all__ = ["document_operation", "openapi_document"]

_ABOUT = """Every answer has the headers `x-request-id` (of the request when it sent one, else chosen) and
`x-total-time-ms`; answers of a model also `x-tokenize-time-ms`, `x-queue-time-ms`, `x-inference-time-ms` and
`x-tokens`. A request may send `x-timeout-ms`, after which it gets 504 instead of an answer. 429 and 503 say in
`retry-after` in how many seconds to try again."""

_MEANING: dict[Kind, str] = {
    "invalid": "Not what the route takes: no JSON, a wrong type, a missing field",
    "unauthorized": "The API key is missing or wrong",
    "not_found": "There is no such model",
    "media_type": "The content type is not that of the route",
    "stalled": "The body did not arrive in time",
    "too_large": "The body, the number of texts or a text is beyond a limit",
    "unprocessable": "Well-formed, but the model cannot serve it",
    "unsupported": "No model here was compiled for it, or the one that was named was not",
    "overloaded": "The queue is full, or too many requests are under way",
    "failed": "The server failed",
    "unavailable": "The server is starting or about to end",
    "expired": "The deadline passed",
}
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")


def document_operation(protocols: Sequence[Protocol]) -> Operation:
    """``GET /openapi.json``. The document is made anew when the models change."""
    made: dict[str, Any] = {}

    async def handler(service: Service, call: Call, body: None) -> Reply:
        if made.get("models") is not service.models:
            made.update(models=service.models, content=msgspec.json.encode(openapi_document(service, protocols)))
        return Reply(made["content"])

    return Operation("GET", "/openapi.json", "openapi.document", "This document", handler, runs=False)


def openapi_document(service: Service, protocols: Sequence[Protocol]) -> dict[str, Any]:
    """The document as JSON data: of the operations for which there is a model."""
    pairs = [(protocol, one) for protocol in protocols for one in protocol.operations if _names(one, service.models)]
    types: dict[Any, None] = {}  # ordered
    for protocol, operation in pairs:
        types.update(dict.fromkeys((operation.body, operation.answer, protocol.error_type)))
    types.pop(None, None)
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(types, schemas, strict=True))
    locked = service.authorise(None) is None
    paths: dict[str, dict[str, Any]] = {}
    for protocol, operation in pairs:
        path = _PARAMETER.sub(r"{\1}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = _operation(
            protocol, operation, schema_of, _names(operation, service.models), locked and not operation.open
        )
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "encast", "version": version("encast"), "description": _ABOUT},
        "paths": paths,
        "components": {"schemas": components},
    }
    if locked:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _names(operation: Operation, models: Models) -> list[str]:
    """What the models that it can ask are called."""
    served = [model for model in models.by_name.values() if operation.serves(model)]
    return [name for model in served for name in (model.name, *model.aliases)]


def _operation(
    protocol: Protocol, operation: Operation, schema_of: dict[Any, Any], names: list[str], locked: bool
) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "tags": [protocol.name],
        "responses": _responses(protocol, operation, schema_of, locked),
    }
    if locked:
        described["security"] = [{"key": []}]
    if parameters := _PARAMETER.findall(operation.path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in parameters
        ]
    if operation.body is not None:
        described["requestBody"] = _body(operation, schema_of[operation.body], names)
    return described


def _body(operation: Operation, schema: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """What the body is described as: its type, with the names that its field ``model`` may have."""
    if "model" in getattr(operation.body, "__struct_fields__", ()):
        required = next(one.required for one in msgspec.structs.fields(operation.body) if one.name == "model")
        allowed = names if required else [*names, None]
        schema = {"allOf": [schema, {"properties": {"model": {"enum": allowed}}}]}
    content: dict[str, Any] = {"schema": schema}
    if operation.examples:
        content["examples"] = {
            name: {"value": {**example, "model": names[0]} if _wants_model(example) else example}
            for name, example in operation.examples.items()
        }
    return {"required": True, "content": {"application/json": content}}


def _wants_model(example: Any) -> bool:
    return isinstance(example, dict) and example.get("model") == "MODEL"


def _responses(protocol: Protocol, operation: Operation, schema_of: dict[Any, Any], locked: bool) -> dict[str, Any]:
    answer = {"schema": schema_of[operation.answer]} if operation.answer is not None else {}
    responses: dict[str, Any] = {"200": {"description": "The answer", "content": {operation.media_type: answer}}}
    refused = {"schema": schema_of[protocol.error_type]} if protocol.error_type is not None else {}
    statuses = {**STATUS, **protocol.statuses}
    meanings: dict[int, list[str]] = {}
    for kind in _kinds(operation, locked):
        meanings.setdefault(statuses[kind], []).append(_MEANING[kind])
    for status in sorted(meanings):
        responses[str(status)] = {
            "description": "; ".join(meanings[status]),
            "content": {"application/json": refused},
        }
    return responses


def _kinds(operation: Operation, locked: bool) -> Iterator[Kind]:
    """What an operation may refuse."""
    yield from ("invalid", "failed")  # x-timeout-ms may be wrong anywhere
    if locked:
        yield "unauthorized"
    if operation.method != "GET":
        yield from ("stalled", "too_large")
    if operation.body is not None:
        yield from ("media_type", "unprocessable", "unsupported", "overloaded")
    if operation.body is not None or _PARAMETER.search(operation.path):
        yield "not_found"
    if operation.open:
        yield "unavailable"
    yield from ("unavailable", "expired") if operation.runs else ("expired",)
