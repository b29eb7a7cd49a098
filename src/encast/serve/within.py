"""A bound on the time of what is awaited."""

from __future__ import annotations

import asyncio

__all__ = ["Within"]


class Within:
    """Cancels what is inside after so many seconds, which leaves as ``asyncio.TimeoutError``.

    In the one task that the request has anyway: ``asyncio.wait_for`` makes another, until Python 3.12. ``loop``: the
    running one, of callers who know it: until then the question costs a system call.
    """

    def __init__(self, seconds: float, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._seconds, self._loop = seconds, loop
        self._late = False

    def __enter__(self) -> None:
        loop = self._loop or asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None

        def expire() -> None:
            self._late = True
            task.cancel()

        self._timer = loop.call_later(max(0.0, self._seconds), expire)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._timer.cancel()
        if self._late and kind is asyncio.CancelledError:
            raise asyncio.TimeoutError from None
