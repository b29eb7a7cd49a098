"""What the server refuses, in one form; every protocol says it in its own words."""

from __future__ import annotations

from typing import Literal

from encast.errors import EncastError

__all__ = ["STATUS", "Kind", "RefusalError"]

Kind = Literal[
    "invalid", "unauthorized", "not_found", "method", "media_type", "too_large", "unprocessable", "unsupported",
    "overloaded", "stalled", "cancelled", "failed", "unavailable", "expired",
]  # fmt: skip

STATUS: dict[Kind, int] = {
    "invalid": 400,  # not what the protocol says: no JSON, a wrong type, a missing field
    "unauthorized": 401,
    "not_found": 404,  # no such route or model
    "method": 405,
    "media_type": 415,
    "stalled": 408,  # the body did not arrive in time
    "too_large": 413,  # a body, a number of texts or a text beyond a limit
    "unprocessable": 422,  # well-formed, but the model cannot serve it: an InputError
    "unsupported": 422,  # no model here was compiled for it, or the one that was named was not
    "overloaded": 429,
    "cancelled": 499,  # the client has gone; nobody reads it
    "failed": 500,  # a defect of ours, or an engine that died twice under one request
    "unavailable": 503,  # not ready, draining, or the engine is being replaced
    "expired": 504,  # the request's deadline passed
}

_LONGEST = 1000
"""Characters of a message."""


class RefusalError(EncastError):
    """A request that gets no answer. ``retry_after``: seconds after which it may be served, of "overloaded" and
    "unavailable". ``message`` may quote the request: the middle of a long one is left out. ``field``: the part of the
    request that is wrong, where one is.
    """

    def __init__(self, kind: Kind, message: str, *, retry_after: float | None = None, field: str | None = None) -> None:
        if len(message) > _LONGEST:
            message = f"{message[: _LONGEST * 3 // 4]} ... {message[-_LONGEST // 4 :]}"
        super().__init__(message)
        self.kind, self.message, self.retry_after, self.field = kind, message, retry_after, field

    @property
    def status(self) -> int:
        """The HTTP status."""
        return STATUS[self.kind]
