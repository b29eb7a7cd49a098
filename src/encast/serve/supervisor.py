"""The process that ``encast serve`` is: it owns the sockets, starts engines and fronts, and replaces those that die.

An engine serves once the canary's answer is right, a front once it has all models' tokenizers. SIGTERM and SIGINT
answer what was accepted and end; SIGHUP opens artifacts, keys and certificates again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

import encast.artifact as artifacts
from encast.errors import EncastError, ResourceError
from encast.launch.process import signal_name
from encast.serve.canary import LEAST_COSINE, cosine
from encast.serve.control import (
    Answer,
    Ask,
    Channel,
    Counted,
    Drain,
    EngineSettings,
    EngineStarted,
    Failed,
    FrontSettings,
    FrontStarted,
    ModelAt,
    Opened,
    Reload,
    State,
    ToSupervisor,
    open_channel,
)
from encast.serve.options import ServeOptions
from encast.serve.reference import reference_answer
from encast.tune.configuration import artifact_sha

__all__ = ["Source", "Supervisor"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_QUICK_S = 10.0
"""A child that ends sooner after its start has a reason that may still be there."""

_LOOP = 3
"""So many quick ends one after the other are a crash loop."""

_LONGEST_PAUSE_S = 30.0

_KILL_S = 2.0
"""A child that was told to end gets so much longer than it may take."""


@dataclass(frozen=True)
class Source:
    """A model as the user named it. ``prepare`` gives its artifact's folder, again at each reload; raises
    ``EncastError``.
    """

    name: str
    given: str
    aliases: tuple[str, ...]
    prepare: Callable[[], Path]


class _Slot:
    """A place for a child: one process after the other, until ``ending``."""

    name: str

    def __init__(self) -> None:
        self.process: asyncio.subprocess.Process | None = None
        self.channel: Channel | None = None
        self.up = False
        self.ending = False
        self.quick = 0
        """Quick ends one after the other."""
        self.problem = ""
        """Why the last one ended, or could not start."""
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the first one is up; an ``EncastError`` when none can be."""

    def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()


class _Engine(_Slot):
    """Of one artifact under one name; another artifact is another slot."""

    def __init__(self, at: ModelAt, dtype: str, task: str, listener: socket.socket) -> None:
        super().__init__()
        self.name = f"the engine of {at.name}"
        self.at, self.dtype, self.task, self.listener = at, dtype, task, listener
        self.canary: bytes | None = None
        self.setup = ""


class _Front(_Slot):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.name = f"front {index}"
        self.index = index
        self.number = 0
        """Of the reload whose models it has."""


@dataclass
class _Reloads:
    """``number``: of the last; ``wanted``: whether to do one more."""

    number: int = 0
    wanted: bool = False
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class Supervisor:
    """Serves the sources until told to end. ``say`` prints a line for people, ``warn`` one on standard error."""

    def __init__(
        self,
        sources: Sequence[Source],
        options: ServeOptions,
        *,
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._sources, self._options, self._say, self._warn = sources, options, say, warn
        self._engines: list[_Engine] = []
        """Those that serve, in the order of the sources; not those that a reload is about to replace."""
        self._all: list[_Slot] = []
        self._keeping: dict[_Slot, asyncio.Task[None]] = {}
        self._changed: asyncio.Future[None]
        self._reloads = _Reloads()
        self._signals: list[int] = []
        self._serving = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def run(self) -> int:
        """Serves; returns the exit code: 0 when all that was accepted was answered after SIGTERM or SIGINT, 128 + N when
        a second signal N cut that short. Raises ``EncastError`` when the server cannot start.
        """
        return asyncio.run(self._run())

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        self._changed = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told_to_end, number)
        loop.add_signal_handler(signal.SIGHUP, self._told_to_reload)
        listener, grpc = self._bind()
        try:
            # Each has its own socket until the first reload replaces it.
            self._engines = [self._engine(source, source.prepare()) for source in self._sources]
            self._listener, self._grpc_port = listener, None if grpc is None else grpc.getsockname()[1]
            self._fronts = [_Front(index) for index in range(self._options.fronts)]
            for slot in (*self._engines, *self._fronts):
                self._start(slot)
            await self._until(lambda: bool(self._signals) or all(slot.first.done() for slot in self._all))
            if not self._signals:
                for slot in self._all:
                    slot.first.result()
                self._serving = True
                self._tell()
                self._announce()
                await self._until(lambda: bool(self._signals))
            return await self._end()
        finally:
            for slot in self._all:
                slot.ending = True
                slot.kill()
            await asyncio.gather(*self._keeping.values(), return_exceptions=True)
            listener.close()
            if grpc is not None:
                grpc.close()

    # Sockets

    def _bind(self) -> tuple[socket.socket, socket.socket | None]:
        options = self._options
        listener = _listen(options.host, options.port)
        listener.listen(2048)
        if options.grpc_port is None:
            return listener, None
        # Fronts share the port by SO_REUSEPORT; this socket, which never listens, keeps it ours.
        return listener, _listen(options.host, options.grpc_port, reuse_port=True)

    # Models

    def _engine(self, source: Source, path: Path) -> _Engine:
        """Raises ``EncastError``."""
        opened = artifacts.open(path)
        address = f"\0encast-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen(128)
        at = ModelAt(source.name, str(path), artifact_sha(opened), address, source.given, source.aliases)
        return _Engine(at, opened.card["dtype"], opened.graph.meta.task, listener)

    @property
    def _models(self) -> tuple[ModelAt, ...]:
        return tuple(engine.at for engine in self._engines)

    # Children

    def _start(self, slot: _Slot) -> None:
        self._all.append(slot)
        self._keeping[slot] = asyncio.ensure_future(self._keep(slot))

    async def _keep(self, slot: _Slot) -> None:
        """Starts one child after the other, until the slot is to end."""
        try:
            while not slot.ending:
                began = time.monotonic()
                slot.problem = ""
                code = await self._live(slot)
                was_up, slot.up = slot.up, False
                if slot.ending:
                    break
                slot.problem = slot.problem or f"{slot.name} ended with {_how(code)}"
                slot.quick = slot.quick + 1 if time.monotonic() - began < _QUICK_S else 0
                if not slot.first.done() and (code == 1 or slot.quick >= _LOOP):
                    slot.first.set_exception(ResourceError(slot.problem))
                    break
                self._warn(f"{slot.problem}; it is started again")
                self._tell()
                if slot.quick > 1 or not was_up:
                    await asyncio.sleep(min(0.1 * 2**slot.quick, _LONGEST_PAUSE_S))
        finally:
            if not slot.first.done():
                slot.first.cancel()
            if isinstance(slot, _Engine):
                slot.listener.close()
            self._all.remove(slot)
            self._tell()

    async def _live(self, slot: _Slot) -> int:
        """One process from its start to its end; returns its exit code."""
        ours, theirs = socket.socketpair()
        environment = dict(os.environ, TOKENIZERS_PARALLELISM="false")
        if isinstance(slot, _Engine):
            module, inherited = "encast.serve.engine", slot.listener.fileno()
            at = slot.at
            settings: msgspec.Struct = EngineSettings(
                at.name, at.artifact, at.sha256, inherited, theirs.fileno(), self._options
            )
        else:
            assert isinstance(slot, _Front)
            module, inherited = "encast.serve.front", self._listener.fileno()
            slot.number = self._reloads.number
            settings = FrontSettings(
                slot.index, inherited, theirs.fileno(), self._grpc_port, self._models, self._options
            )
        argument = msgspec.json.encode(settings).decode()
        # Blocked signals stay blocked in the child: a terminal and a service manager send them to all processes, and what
        # to do about them is told on the channel.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            slot.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", module, argument, stdin=asyncio.subprocess.DEVNULL, env=environment,
                pass_fds=(inherited, theirs.fileno()),
            )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            theirs.close()
        slot.channel = await open_channel(ours, ToSupervisor, lambda message: self._heard(slot, message), lambda: None)
        try:
            return await slot.process.wait()
        finally:
            slot.channel.close()

    def _heard(self, slot: _Slot, message: Any) -> None:
        if isinstance(message, EngineStarted):
            assert isinstance(slot, _Engine)
            self._spawn(self._check(slot, message))
        elif isinstance(message, FrontStarted):
            assert isinstance(slot, _Front)
            if slot.number != self._reloads.number:
                self._send(slot, Reload(self._reloads.number, self._models))
            self._is_up(slot)
        elif isinstance(message, Failed):
            slot.problem = f"{slot.name}: {message.message}"
            slot.kill()
        elif isinstance(message, Opened):
            assert isinstance(slot, _Front)
            slot.number = message.number
            self._pulse()
        elif isinstance(message, Counted):
            pass
        elif isinstance(message, Ask):
            self._send(slot, Answer(message.id, b""))

    def _send(self, slot: _Slot, message: msgspec.Struct) -> None:
        if slot.channel is not None:
            slot.channel.send(message)

    async def _check(self, engine: _Engine, started: EngineStarted) -> None:
        """Lets an engine serve when its canary is right."""
        process = engine.process
        if engine.canary is None:
            reference, doubt = await reference_answer(Path(engine.at.artifact), engine.at.sha256)
            if reference is None:
                self._warn(f"{engine.name}: its answers were not compared with the float64 reference: {doubt}")
            else:
                found, least = cosine(started.canary, reference), LEAST_COSINE[engine.dtype]
                if not found >= least:
                    engine.problem = (
                        f"{engine.name}: the canary's answer has cosine {found:.6f} with the float64 reference, and "
                        f"{engine.dtype} needs {least}; the artifact or this processor's kernels are wrong"
                    )
                    engine.kill()
                    return
            engine.canary = started.canary
        elif engine.canary != started.canary:
            engine.problem = f"{engine.name}: the canary's answer has other bits than that of the engine before"
            engine.kill()
            return
        if process is engine.process:
            engine.setup = started.setup
            self._is_up(engine)

    def _is_up(self, slot: _Slot) -> None:
        slot.up = True
        if not slot.first.done():
            slot.first.set_result(None)
        self._tell()

    # State

    def _tell(self) -> None:
        """Tells the fronts whether the server is ready."""
        state = self._state()
        for slot in self._all:
            if isinstance(slot, _Front) and slot.up:
                self._send(slot, state)
        self._pulse()

    def _state(self) -> State:
        if not self._serving:
            return State("the server is starting", admits=False)
        down = [engine for engine in self._engines if not engine.up]
        looping = [engine for engine in down if engine.quick >= _LOOP]
        if looping:
            return State("; ".join(engine.problem for engine in looping), admits=False)
        return State("; ".join(f"{engine.name} is being replaced" for engine in down), admits=True)

    def _pulse(self) -> None:
        changed, self._changed = self._changed, asyncio.get_running_loop().create_future()
        changed.set_result(None)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Reload

    def _told_to_reload(self) -> None:
        self._reloads.wanted = True
        if self._serving and (self._reloads.task is None or self._reloads.task.done()):
            self._reloads.task = asyncio.ensure_future(self._reload())

    async def _reload(self) -> None:
        while self._reloads.wanted:
            self._reloads.wanted = False
            try:
                await self._replace_models()
            except EncastError as error:
                self._warn(f"reload: {error}; what was served before is served on")
            else:
                self._say(f"reloaded: {', '.join(engine.at.name for engine in self._engines)}")

    async def _replace_models(self) -> None:
        """New engines beside the old ones, then new requests to them, then the end of the old ones."""
        now = {engine.at.name: engine for engine in self._engines}
        engines, fresh = [], []
        try:
            for source in self._sources:
                engine = self._engine(source, await asyncio.to_thread(source.prepare))
                if engine.at.sha256 == now[source.name].at.sha256:
                    engine.listener.close()
                    engine = now[source.name]
                else:
                    fresh.append(engine)
                    self._start(engine)
                engines.append(engine)
            for engine in fresh:
                await engine.first
        except BaseException:
            for engine in fresh:
                engine.ending = True
                engine.kill()
            raise
        self._engines = engines
        self._reloads.number += 1
        for front in self._fronts:
            if front.up:
                self._send(front, Reload(self._reloads.number, self._models))
        self._tell()
        await self._until(lambda: all(front.number == self._reloads.number for front in self._fronts if front.up))
        for old in now.values():
            if old not in engines:
                self._spawn(self._dismiss(old, self._options.limits.timeout_s))

    # The end

    def _told_to_end(self, number: int) -> None:
        self._signals.append(number)
        if len(self._signals) > 1:
            for slot in self._all:
                slot.ending = True
                slot.kill()
        self._pulse()

    async def _end(self) -> int:
        if self._reloads.task is not None:
            self._reloads.task.cancel()
        drain_s = self._options.drain_s
        await asyncio.gather(*(self._dismiss(front, drain_s) for front in self._fronts))
        await asyncio.gather(*(self._dismiss(slot, 0.5) for slot in list(self._all)))
        return 0 if len(self._signals) == 1 else 128 + self._signals[1]

    async def _dismiss(self, slot: _Slot, seconds: float) -> None:
        """Has a child end within so many seconds."""
        slot.ending = True
        self._send(slot, Drain(seconds))
        keeping = self._keeping[slot]
        done, _ = await asyncio.wait({keeping}, timeout=seconds + _KILL_S)
        if not done:
            self._warn(f"{slot.name} did not end within {seconds + _KILL_S:g} s and is killed")
            slot.kill()
            await asyncio.wait({keeping})

    # For people

    def _announce(self) -> None:
        options = self._options
        scheme = "http" if options.tls_cert is None else "https"
        host, port = self._listener.getsockname()[:2]
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        models = ", ".join(f"{one.at.name} ({one.task}, {one.dtype}; {one.setup})" for one in self._engines)
        grpc = "" if self._grpc_port is None else f", gRPC on port {self._grpc_port}"
        self._say(f"serving {models} at {url}{grpc}; try: curl -s {url}/health/ready")


def _listen(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A bound socket; raises ``ResourceError``."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as error:
        raise ResourceError(
            f"{host} port {port} cannot be listened on: {error.strerror or error}; choose another with --host and --port"
        ) from None
    return listener


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal_name(-code)
