"""One request on its way through a front: from a task's steps to its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import TypeVar

from encast.errors import InputError
from encast.serve.errors import RefusalError
from encast.serve.models import ServedModel, Timing
from encast.tasks.session import F32, Run, Steps

__all__ = ["INLINE_BYTES", "Call"]

T = TypeVar("T")

INLINE_BYTES = 4096
"""Of a request's body: smaller ones are tokenised on the event loop, where a thread would cost more than the work."""

_workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")


class Call:
    """``arrived`` and ``deadline``: seconds of ``time.monotonic``; ``body``: what the client sent; ``headers``: their
    names in lower case; ``path``: the parameters of the route.
    """

    def __init__(
        self,
        *,
        arrived: float,
        deadline: float,
        body: bytes = b"",
        headers: Mapping[str, str] = MappingProxyType({}),
        path: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.arrived, self.deadline, self.body, self.headers, self.path = arrived, deadline, body, headers, path
        self.timing = Timing()
        self.model: ServedModel | None = None
        """The model that served it last, for metrics."""

    async def run(self, model: ServedModel, steps: Steps[T]) -> T:
        """The answer of a task. Tokenises and post-processes in a thread when the request is large.

        Raises ``RefusalError``; the words of an ``InputError`` become one of kind "unprocessable".
        """
        self.model = model
        given: F32 | None = None
        before = 0
        try:
            while True:
                run, answer = await self._advance(steps, given)
                if run is None:
                    return answer  # type: ignore[return-value]  # T, once there is no further run
                self.timing.texts += run.piece.batch.seqs
                self.timing.tokens += run.piece.batch.tokens
                try:
                    given = await model.runner.run(
                        run, arrived=self.arrived, deadline=self.deadline, before=before, timing=self.timing
                    )
                except InputError as error:
                    raise model.session.explain(run, error) from None
                before += run.piece.batch.tokens
        except InputError as error:
            raise RefusalError("unprocessable", str(error)) from None

    async def _advance(self, steps: Steps[T], given: F32 | None) -> tuple[Run | None, T | None]:
        begin = time.perf_counter()
        try:
            if len(self.body) <= INLINE_BYTES:
                return _advance(steps, given)
            return await asyncio.get_running_loop().run_in_executor(_workers, _advance, steps, given)
        finally:
            self.timing.tokenize_s += time.perf_counter() - begin


def _advance(steps: Steps[T], given: F32 | None) -> tuple[Run | None, T | None]:
    """The next run that is asked for, or the answer. A StopIteration may not leave a thread or a coroutine."""
    try:
        return steps.send(given), None  # type: ignore[arg-type]  # None starts a generator
    except StopIteration as stop:
        return None, stop.value
