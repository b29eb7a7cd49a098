"""The supervisor's children: processes that are started again when they end unasked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from encast.errors import ResourceError
from encast.launch.process import signal_name
from encast.serve.canary import least_cosine
from encast.serve.control import (
    Channel,
    Drain,
    EngineSettings,
    FrontSettings,
    ModelAt,
    ShadowAt,
    State,
    ToSupervisor,
    open_channel,
)
from encast.serve.options import ServeOptions

__all__ = ["Child", "Engine", "Front"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_SERVED_S = 1.0
"""A child that has served for so long is replaced at once; what ended one sooner may still be there."""

_LOOP = 3
"""So many such ends one after the other are a crash loop."""

_LONGEST_PAUSE_S = 30.0

_KILL_S = 2.0
"""A child that was told to end gets so much longer than it may take."""


_ENVIRONMENT = {
    # One heap for all threads. With one a thread, what one allocates and another frees fills each of them.
    "MALLOC_ARENA_MAX": "1",
    # A single client asks again after about as long as its answer took. To wake a thread that sleeps costs it 0.15 ms.
    "ENCAST_IDLE_SPIN_US": "1000",
}
"""Of children, where the operator's says nothing else."""


class Child:
    """One process after the other, until told to end. ``heard(child, message)`` gets its messages. ``ended(child,
    pid)`` is called when one ended unasked and will be replaced, and when the last has ended, which is then ``ending``.
    """

    module: str

    def __init__(
        self, name: str, options: ServeOptions, heard: Callable[[Any, Any], None], ended: Callable[[Any, int], None]
    ) -> None:
        self.name, self.options = name, options
        self.pid = 0
        self.up = False
        """Whether it serves."""
        self.ending = False
        self.problem = ""
        """Why the last one ended, or could not start."""
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the first one is up; an ``EncastError`` when there can be none."""
        self._heard, self._ended = heard, ended
        self._process: asyncio.subprocess.Process | None = None
        self._channel: Channel | None = None
        self._quick = 0
        self._up_at = 0.0
        self.keeping = asyncio.ensure_future(self._keep())

    @property
    def looping(self) -> bool:
        """Whether it ends again and again soon after its start."""
        return self._quick >= _LOOP and not self.up

    def settings(self, control_fd: int) -> tuple[msgspec.Struct, int]:
        """What the next process is started with, and the listening socket that it inherits."""
        raise NotImplementedError

    def is_up(self) -> None:
        """It serves from now on."""
        self.up = True
        self._up_at = time.monotonic()
        if not self.first.done():
            self.first.set_result(None)

    def send(self, message: msgspec.Struct) -> None:
        """A message to a process that is gone is dropped."""
        if self._channel is not None:
            self._channel.send(message)

    def kill(self, problem: str = "") -> None:
        """Ends the process now; it is replaced unless ``ending``. ``problem``: why, for people."""
        self.problem = problem or self.problem
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def stop(self) -> None:
        """Ends it now, and for good."""
        self.ending = True
        if self._process is None:
            self.keeping.cancel()
        else:
            self.kill()

    async def dismiss(self, seconds: float, warn: Callable[[str], None]) -> None:
        """Has it end by itself within so many seconds, and ends it after that."""
        self.ending = True
        if self._process is None:
            self.stop()
        self.send(Drain(seconds))
        _, running = await asyncio.wait({self.keeping}, timeout=seconds + _KILL_S)
        if running:
            warn(f"{self.name} did not end within {seconds:g} s and is killed")
            self.stop()
            await asyncio.wait(running)

    async def _keep(self) -> None:
        try:
            while not self.ending:
                self.problem = ""
                try:
                    code = await self._live()
                except OSError as error:  # no memory, process number or descriptor is left
                    code, self.problem = 1, f"{self.name} cannot be started: {error}"
                was_up, self.up = self.up, False
                if self.ending:
                    break
                self.problem = self.problem or f"{self.name} ended with {_how(code)}"
                # One that has served is not to blame for its end, unless that came at once.
                quick = not was_up or time.monotonic() - self._up_at < _SERVED_S
                self._quick = self._quick + 1 if quick else 0
                if not self.first.done() and (code == 1 or self._quick >= _LOOP):
                    self.first.set_exception(ResourceError(self.problem))
                    break
                pid, self.pid = self.pid, 0
                self._ended(self, pid)
                if self._quick > 1 or not was_up:
                    # The first is replaced at once.
                    await asyncio.sleep(min(0.1 * 2**self._quick, _LONGEST_PAUSE_S))
        finally:
            if not self.first.done():
                self.first.cancel()
            self.ending = True
            pid, self.pid = self.pid, 0
            self._ended(self, pid)

    async def _live(self) -> int:
        """One process from its start to its end; returns its exit code."""
        ours, theirs = socket.socketpair()
        settings, inherited = self.settings(theirs.fileno())
        started = False
        # Signals that are blocked here stay blocked in the child. Terminals and service managers send them to every
        # process; what to do about them the children are told on the channel.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", self.module, msgspec.json.encode(settings).decode(),
                stdin=asyncio.subprocess.DEVNULL, pass_fds=(inherited, theirs.fileno()),
                env={**_ENVIRONMENT, **os.environ, "TOKENIZERS_PARALLELISM": "false"},
            )  # fmt: skip
            started = True
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            theirs.close()
            if not started:
                ours.close()
        self.pid = self._process.pid
        lost = asyncio.Event()
        self._channel = await open_channel(ours, ToSupervisor, lambda message: self._heard(self, message), lost.set)
        try:
            if self.ending:  # told so while it was started
                self.kill()
            code = await self._process.wait()
            # Its last words may still be on their way.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(lost.wait(), _KILL_S)
            return code
        finally:
            self._channel.close()
            self._channel = self._process = None


class Engine(Child):
    """Of one artifact under one name: another artifact is another child. ``dtype``, ``task`` and number of ``labels``
    are the artifact's.
    """

    module = "encast.serve.engine"

    def __init__(
        self, at: ModelAt, dtype: str, task: str, labels: int, nice: int, pin: bool, listener: socket.socket, *args: Any
    ) -> None:
        self.at, self.dtype, self.task, self.labels, self.listener = at, dtype, task, labels, listener
        self._nice, self._pin = nice, pin
        self.setup, self.instances = "", 0
        self.silent_s = 0
        """Since it was last heard, or came up."""
        self.canary: bytes | None = None
        """The answer of the first one; those that come after it must give the same, on cards nearly so."""
        super().__init__(f"the engine of {at.name}", *args)
        self.keeping.add_done_callback(lambda _: listener.close())

    @property
    def least_cosine(self) -> float:
        """Between the canary's answer and the right one."""
        return least_cosine(self.dtype, self.options.card_dtype)

    def is_up(self) -> None:
        """See ``Child.is_up``."""
        self.silent_s = 0
        super().is_up()

    def settings(self, control_fd: int) -> tuple[msgspec.Struct, int]:
        at, listen_fd = self.at, self.listener.fileno()
        settings = EngineSettings(
            at.name, at.artifact, listen_fd, control_fd, self.options, at.sha256, self._nice, self._pin
        )
        return settings, listen_fd


class Front(Child):
    """One of the processes that share the TCP socket. ``now()``: the number of the last reload, its
    models, and whether the server is ready.
    """

    module = "encast.serve.front"

    def __init__(
        self,
        index: int,
        listener: socket.socket,
        grpc_port: int | None,
        shadow: ShadowAt | None,
        now: Callable[[], tuple[int, tuple[ModelAt, ...], State]],
        *args: Any,
    ) -> None:
        self.index, self._listener, self._grpc_port, self._shadow, self._now = (
            index, listener, grpc_port, shadow, now,
        )  # fmt: skip
        self.number = 0
        """Of the reload whose models it has."""
        super().__init__(f"front {index}", *args)

    def settings(self, control_fd: int) -> tuple[msgspec.Struct, int]:
        self.number, models, state = self._now()
        listen_fd = self._listener.fileno()
        settings = FrontSettings(
            self.index, listen_fd, control_fd, self._grpc_port, models, self._shadow, state, self.options
        )  # fmt: skip
        return settings, listen_fd


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal_name(-code)
