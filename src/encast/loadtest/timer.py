"""Sleep until a moment of the clock, to microseconds: event loops round their sleeps to milliseconds."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time

__all__ = ["Timer"]

_CLOCK_MONOTONIC, _ABSOLUTE, _NONBLOCK_CLOEXEC = 1, 1, 0o2004000
"""Of timerfd_create(2). ``time.perf_counter_ns`` is CLOCK_MONOTONIC on Linux."""


class Timer:
    """For one task at a time; ``close`` when done. Python itself has timerfd from 3.13 on only."""

    def __init__(self) -> None:
        self._c = ctypes.CDLL(None, use_errno=True)
        self._fd = self._c.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None
        self._loop.add_reader(self._fd, self._wake)

    async def until(self, moment_ns: int) -> None:
        """Of ``time.perf_counter_ns``; for one that has passed other tasks still get their turn."""
        if moment_ns <= time.perf_counter_ns():
            await asyncio.sleep(0)
            return
        seconds, nanoseconds = divmod(moment_ns, 1_000_000_000)
        setting = (ctypes.c_long * 4)(0, 0, seconds, nanoseconds)
        self._waiting = self._loop.create_future()
        if self._c.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(setting), None) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        await self._waiting

    def _wake(self) -> None:
        os.read(self._fd, 8)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
