"""What a protocol offers: routes with the types of their bodies. The app and the OpenAPI document are made of these."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from encast.serve.call import Call
from encast.serve.errors import RefusalError

if TYPE_CHECKING:
    from encast.serve.service import Service

__all__ = ["Operation", "Protocol", "Reply"]


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
    only for the document. ``answer``: the type of the answer, for the document. ``examples``: bodies by name.
    ``runs``: whether it asks for the model, so that it is subject to admission.
    """

    method: str
    path: str
    name: str
    summary: str
    handler: Callable[[Service, Call, Any], Awaitable[Reply]]
    body: Any = None
    answer: Any = None
    examples: Mapping[str, Any] = field(default_factory=dict)
    raw: bool = False
    runs: bool = True


@dataclass(frozen=True)
class Protocol:
    """Operations that say errors in the same form: ``error`` gives the JSON body of a refusal."""

    name: str
    operations: Sequence[Operation]
    error: Callable[[RefusalError], bytes]
    statuses: Mapping[str, int] = field(default_factory=dict)
    """Where this protocol has another HTTP status for a ``Kind`` than ``errors.STATUS``."""
