"""One request on its way through a front: from a task's steps to its answer."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, TypeVar

from encast.errors import InputError
from encast.serve.errors import RefusalError
from encast.serve.models import ServedModel, Timing
from encast.tasks.session import Run, Steps

__all__ = ["INLINE_BYTES", "REQUEST_ID", "Call", "fresh_id"]

T = TypeVar("T")

INLINE_BYTES = 4096
"""Work over fewer bytes happens on the event loop, where a thread would cost more than the work."""

REQUEST_ID = re.compile(r"[!-~]{1,128}")
"""What a client may choose as ``x-request-id``."""

_random = random.Random()

_workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="front-worker")


def fresh_id() -> str:
    """32 hexadecimal digits by chance, for a request that brings no id. They are no secret."""
    return f"{_random.getrandbits(128):032x}"


class Call:
    """``arrived`` and ``deadline``: seconds of ``time.monotonic``; ``body``: what the client sent; ``headers``: their
    names in lower case; ``path``: the parameters of the route; ``id``: the request's, for answers, logs and traces.
    """

    def __init__(
        self,
        *,
        arrived: float,
        deadline: float,
        body: bytes = b"",
        headers: Mapping[str, str] = MappingProxyType({}),
        path: Mapping[str, str] = MappingProxyType({}),
        id: str = "",
    ) -> None:
        self.arrived, self.deadline, self.body, self.headers, self.path = arrived, deadline, body, headers, path
        self.id = id
        self.held = 0
        """Bytes of its body that ``Service.hold`` has counted."""
        self.timing = Timing()
        self.model: ServedModel | None = None
        """The model that served it last, for metrics."""

    def facts(self, total_s: float) -> dict[str, str]:
        """What every answer says of its request in its headers, or in gRPC's trailing metadata."""
        timing = self.timing
        facts = {"x-request-id": self.id, "x-total-time-ms": f"{total_s * 1e3:.3f}"}
        if timing.tokens:
            facts["x-tokenize-time-ms"] = f"{timing.tokenize_s * 1e3:.3f}"
            facts["x-queue-time-ms"] = f"{timing.queue_s * 1e3:.3f}"
            facts["x-inference-time-ms"] = f"{timing.inference_s * 1e3:.3f}"
            facts["x-tokens"] = str(timing.tokens)
        return facts

    async def run(self, model: ServedModel, steps: Steps[T]) -> T:
        """The answer of a task. Tokenises and post-processes in a thread when the request, or what the model gave, is
        large.

        Raises ``RefusalError``; an ``InputError`` becomes the cause of one of kind "unprocessable", in the same words.
        """
        self.model = model
        advance: Callable[[Any], Run] = steps.send
        given: Any = None  # starts a generator
        before, size = 0, len(self.body)
        if model.runner.full(size):
            raise RefusalError("overloaded", "the queue is full; try again later", retry_after=model.runner.backlog_s)
        try:
            while True:
                begin = time.perf_counter()
                run, answer = await self.offload(size, _advance, advance, given)
                self.timing.tokenize_s += time.perf_counter() - begin
                if run is None:
                    return answer  # type: ignore[no-any-return]  # T, once there is no further run
                self.timing.texts += run.piece.batch.seqs
                self.timing.tokens += run.piece.batch.tokens
                try:
                    given = await model.runner.run(
                        run, arrived=self.arrived, deadline=self.deadline, before=before, size=len(self.body),
                        timing=self.timing,
                    )  # fmt: skip
                    advance, size = steps.send, max(len(self.body), given.nbytes)
                except InputError as error:
                    given, advance = model.session.explain(run, error), steps.throw
                before += run.piece.batch.tokens
        except InputError as error:
            raise RefusalError("unprocessable", str(error)) from error

    async def offload(self, size: int, work: Callable[..., T], *given: Any) -> T:
        """``work(*given)``, in a thread when ``size`` bytes of it would hold the event loop up."""
        if size <= INLINE_BYTES:
            return work(*given)
        return await asyncio.get_running_loop().run_in_executor(_workers, work, *given)


def _advance(advance: Callable[[Any], Run], given: Any) -> tuple[Run | None, Any]:
    """The next run that a task asks for, or its answer. A StopIteration may not leave a thread or a coroutine."""
    try:
        return advance(given), None
    except StopIteration as stop:
        return None, stop.value
