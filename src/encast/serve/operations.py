"""What a protocol offers: routes with the types of their bodies. The app and the OpenAPI document are made of these."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from encast.serve.call import Call
from encast.serve.errors import Kind, RefusalError
from encast.serve.models import ServedModel

if TYPE_CHECKING:
    from encast.serve.service import Service

__all__ = ["ErrorBody", "Operation", "Protocol", "Reply", "error_body"]


@dataclass(frozen=True)
class Reply:
    """An answer with status 200, as bytes."""

    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    media_type: str = "application/json"


@dataclass(frozen=True)
class Operation:
    """One route. ``name`` labels metrics and logs (``openai.embeddings``).

    ``body``: the msgspec type that a JSON body is decoded as and that the document describes, None for none; the
    handler gets the decoded body, or None. With ``raw`` the handler decodes ``call.body`` itself, and ``body`` is
    only for the document. ``answer``: the type of the answer, and ``media_type`` what it comes as, for the document.
    ``serves``: which models it can ask; where none is served, the document leaves it out. ``examples``: bodies by
    name, in which "MODEL" stands for the first such model. ``runs``: whether it asks for the model, so that it is
    refused while the queue is full. ``open``: whether it is answered without a key, as a probe of the server's health
    is.
    """

    method: str
    path: str
    name: str
    summary: str
    handler: Callable[[Service, Call, Any], Awaitable[Reply]]
    body: Any = None
    answer: Any = None
    media_type: str = "application/json"
    examples: Mapping[str, Any] = field(default_factory=dict)
    serves: Callable[[ServedModel], bool] = lambda model: True
    raw: bool = False
    runs: bool = True
    open: bool = False


@dataclass(frozen=True)
class Protocol:
    """Operations that say errors in the same form: ``error`` gives the JSON body of a refusal, ``error_type`` is its
    type, for the document.
    """

    name: str
    operations: Sequence[Operation]
    error: Callable[[RefusalError], bytes]
    statuses: Mapping[Kind, int] = field(default_factory=dict)
    """Where this protocol has another HTTP status for a ``Kind`` than ``errors.STATUS``."""
    error_type: Any = None


class ErrorDetail(msgspec.Struct):
    """``type``: whose fault it is. ``param``: the field that is wrong, where one is. ``code``: why it was refused."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct):
    """A refusal in the form of the OpenAI API."""

    error: ErrorDetail


_TYPES: dict[Kind, str] = {"overloaded": "rate_limit_error"}
_TYPES.update(dict.fromkeys(("failed", "unavailable", "expired"), "server_error"))
_CODES: dict[Kind, str] = {
    "unauthorized": "invalid_api_key",
    "overloaded": "rate_limit_exceeded",
    "failed": "internal_error",
    "expired": "timeout",
}


def error_body(refusal: RefusalError) -> bytes:
    """``ErrorBody`` as JSON: what OpenAI's clients understand, and what is said where no protocol has its own form."""
    code = _CODES.get(refusal.kind, refusal.kind)
    if refusal.kind == "not_found" and refusal.field == "model":
        code = "model_not_found"
    detail = ErrorDetail(refusal.message, _TYPES.get(refusal.kind, "invalid_request_error"), refusal.field, code)
    return msgspec.json.encode(ErrorBody(detail))
