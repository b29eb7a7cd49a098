"""What the handlers of requests work with, in every front."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from encast.serve.call import Call
from encast.serve.errors import RefusalError
from encast.serve.models import Models

__all__ = ["Finished", "RequestLimits", "Service"]


@dataclass(frozen=True)
class RequestLimits:
    """What one request may ask for. A text may have ``max_text_bytes`` of UTF-8; ``timeout_s``: until it is answered,
    which a request can shorten by the header ``x-timeout-ms``; ``body_timeout_s``: until its body is there.
    ``max_inflight_bytes``: of the bodies of all requests under way in a front; one alone is always taken.
    ``max_listed_tokens``: of an answer that lists tokens; ``max_weights``: of all sparse embeddings of an answer.
    ``max_products``: of numbers, to compare the tokens of a query with those of one document.
    """

    max_body_bytes: int = 16 << 20
    max_texts: int = 2048
    max_text_bytes: int = 1 << 20
    max_listed_tokens: int = 1 << 18
    max_weights: int = 1 << 22
    max_products: int = 1 << 32
    max_concurrent: int = 1024
    max_inflight_bytes: int = 256 << 20
    timeout_s: float = 30.0
    body_timeout_s: float = 10.0
    header_timeout_s: float = 10.0
    max_header_bytes: int = 32 << 10

    def check_texts(self, texts: Sequence[str | Sequence[str]], field: str) -> None:
        """Raises ``RefusalError`` "too_large" for more texts or pairs than a request may have, or a text too long."""
        self.check_count(len(texts), field)
        for index, row in enumerate(texts):
            for text in (row,) if isinstance(row, str) else row:
                # No character takes more than four bytes: most texts need no count.
                if 4 * len(text) > self.max_text_bytes:
                    size = len(text.encode("utf-8", "surrogatepass"))
                    if size > self.max_text_bytes:
                        message = f"{field}[{index}] has {size} bytes of UTF-8; a text may have {self.max_text_bytes}"
                        raise RefusalError("too_large", message, field=field)

    def check_count(self, count: int, field: str) -> None:
        """Raises ``RefusalError`` "too_large" for more texts than a request may have."""
        if count > self.max_texts:
            message = f"{field} has {count} texts; a request may have {self.max_texts}: send several requests"
            raise RefusalError("too_large", message, field=field)

    def check_tokens(self, count: int, field: str) -> None:
        """Raises ``RefusalError`` "too_large" for more tokens than an answer may list."""
        if count > self.max_listed_tokens:
            message = f"{field} has more than {self.max_listed_tokens} tokens, which an answer may list: send less text"
            raise RefusalError("too_large", message, field=field)


@dataclass(frozen=True)
class Finished:
    """A request that is over, for metrics, logs and traces. ``kind``: of its refusal, "" for an answer."""

    operation: str
    protocol: str
    status: int
    kind: str
    message: str
    call: Call
    total_s: float
    key: str
    """The name of the API key that it came with, "" without keys."""
    request_id: str
    bytes_out: int


async def _nobody_knows(what: str) -> bytes:
    raise RefusalError("unavailable", f"there is no supervisor here that knows {what}")


@dataclass
class Service:
    """``models`` are replaced by a reload. ``ready``: whether new requests are taken; ``reason``: why the server as a
    whole is not ready, "" when it is. ``authorise``: the header ``Authorization`` (or None) to the name of its key,
    None when it is refused; "" where no keys are asked for. ``finished`` is told of every request. ``ask``: what only
    the supervisor knows, "metrics" as Prometheus' text or "live" as JSON of ``metrics.Live``.
    """

    models: Models
    limits: RequestLimits = field(default_factory=RequestLimits)
    ready: Callable[[], bool] = lambda: True
    reason: Callable[[], str] = lambda: ""
    authorise: Callable[[str | None], str | None] = lambda _: ""
    finished: list[Callable[[Finished], None]] = field(default_factory=list)
    ask: Callable[[str], Awaitable[bytes]] = _nobody_knows
    running: int = 0
    """Requests under way in this front."""
    inflight_bytes: int = 0
    """Of their bodies: the sum of their calls' ``held``."""

    def admit(self, authorization: str | None, *, size: int | None, works: bool, runs: bool, open: bool) -> str:
        """The name of the key of a request that is counted in ``running``; see ``Operation`` for ``runs`` and ``open``.
        ``size``: bytes of its body, None where nobody knows yet; ``works``: whether it is one of those that
        ``max_concurrent`` bounds.

        Raises ``RefusalError`` for what needs no look into the request's body.
        """
        key = "" if open else self.authorise(authorization)
        if key is None:
            raise RefusalError("unauthorized", "the API key is missing or wrong; send Authorization: Bearer KEY")
        if runs and not self.ready():
            raise RefusalError("unavailable", "the server is starting, or about to end; try again", retry_after=1)
        if works and self.running > self.limits.max_concurrent:
            raise RefusalError("overloaded", f"{self.running - 1} requests are under way; try again", retry_after=1)
        if runs and size is not None:
            # Which model it wants is in the body: it is refused here when none of them has room.
            runners = [model.runner for model in self.models.by_name.values()]
            if runners and all(runner.full(size) for runner in runners):
                wait = min(runner.backlog_s for runner in runners)
                raise RefusalError("overloaded", "the queue is full; try again later", retry_after=wait)
        return key

    def hold(self, call: Call, size: int) -> None:
        """Counts that many bytes of a request's body, which have come. ``release`` gives them back when it ends.

        Not what a header announces: whoever sends nothing would hold it. Raises ``RefusalError`` "overloaded".
        """
        most = self.limits.max_inflight_bytes
        if self.inflight_bytes > call.held and self.inflight_bytes + size > most:
            raise RefusalError(
                "overloaded", f"the bodies of the requests under way have {most} bytes; try again", retry_after=1
            )
        call.held += size
        self.inflight_bytes += size

    def release(self, call: Call) -> None:
        """The request is over."""
        self.inflight_bytes -= call.held
        call.held = 0
