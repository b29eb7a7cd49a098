"""The process that ``encast serve`` is: it owns the sockets, starts engines and fronts, and replaces those that die.

An engine serves once the canary's answer is right, a front once it has all models' tokenizers. SIGTERM and SIGINT
answer what was accepted and end; SIGHUP opens artifacts, keys and certificates again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import secrets
import shlex
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

import encast.artifact as artifacts
from encast.artifact import artifact_sha
from encast.errors import EncastError, ResourceError
from encast.measure.price import parse_price
from encast.serve.canary import cosine
from encast.serve.children import Child, Engine, Front
from encast.serve.control import (
    Answer,
    Ask,
    Counted,
    EngineStarted,
    Failed,
    FrontStarted,
    ModelAt,
    Opened,
    Reload,
    ShadowAt,
    State,
)
from encast.serve.keys import Keys
from encast.serve.live import LiveLine
from encast.serve.logs import Log
from encast.serve.metrics import Delta, ModelInfo, Registry
from encast.serve.options import ServeOptions
from encast.serve.protocols.encast import ENCAST
from encast.serve.reference import reference_answer
from encast.serve.shadow import shadowed
from encast.serve.sources import CompileProgress, Source
from encast.serve.tls import tls_context
from encast.serve.wire import EngineStats

__all__ = ["Supervisor", "differs", "in_daemon"]

T = TypeVar("T")

_BACKLOG = 2048

_SILENT_S = 10
"""An engine counts four times a second; one that is not heard for so long hangs, and is replaced."""


class Supervisor:
    """Serves the sources until told to end. ``say`` prints a line for people, ``warn`` one on standard error; ``live``:
    whether to show how it does every second; ``announce`` is told, once it serves, what and where. Raises
    ``EncastError`` for a port, a file or a model that cannot be used.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        options: ServeOptions,
        *,
        say: Callable[[str], None],
        warn: Callable[[str], None],
        live: bool = False,
        progress: CompileProgress | None = None,
        announce: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._sources, self._options, self._say, self._given_warn = sources, options, say, warn
        self._for_programs = announce
        self._registry = Registry(
            usd_per_hour=None if options.price is None else parse_price(options.price).usd_per_hour
        )
        self._line = LiveLine(self._registry) if live else None
        # What can be wrong is found before minutes of compiling.
        self._check_files()
        self._log = None if options.log is None else Log(options.log, process="supervisor")
        self._listener = _bound(options.host, options.port)
        # Fronts share the port of gRPC by SO_REUSEPORT. This socket, which never listens, keeps it ours.
        self._grpc = None if options.grpc_port is None else _bound(options.host, options.grpc_port, reuse_port=True)
        self._first = [source.prepare(progress) for source in sources]
        opened = {source.name: artifacts.open(path) for source, path in zip(sources, self._first, strict=True)}
        self._shadowed = ""
        if options.shadow is not None:
            self._shadowed = shadowed(opened, artifacts.open(options.shadow[0]))
        self._engines: list[Engine] = []
        """Those that serve, in the order of the sources; neither those that a reload starts nor those that it ended."""
        self._fronts: list[Front] = []
        self._children: list[Child] = []
        self._signals: list[int] = []
        self._serving = False
        self._number = 0
        """Of the last reload."""
        self._reload_wanted = False
        self._reloading: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    def run(self) -> int:
        """Serves; returns the exit code: 0 when all that was accepted was answered after SIGTERM or SIGINT, 128 + N
        when a second signal N cut that short. Raises ``EncastError`` when the server cannot start.
        """
        return asyncio.run(self._run())

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        self._changed = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told_to_end, number)
        loop.add_signal_handler(signal.SIGHUP, self._told_to_reload)
        # Connections that come before a front is up wait in the backlog.
        self._listener.listen(_BACKLOG)
        try:
            self._start()
            # One that cannot be started leaves ``_children`` meanwhile.
            first = [child.first for child in self._children]
            await self._until(lambda: bool(self._signals) or all(one.done() for one in first))
            if not self._signals:
                for one in first:
                    one.result()
                self._serving = True
                self._tell()
                self._announce()
                self._spawn(self._watch())
                if self._reload_wanted:  # told so while it started
                    self._told_to_reload()
                if self._line is not None:
                    self._spawn(self._line.run())
                await self._until(lambda: bool(self._signals))
            return await self._end()
        finally:
            for child in self._children:
                child.stop()
            await asyncio.gather(*(child.keeping for child in self._children), return_exceptions=True)
            for task in self._tasks:
                task.cancel()
            self._listener.close()
            if self._grpc is not None:
                self._grpc.close()
            if self._log is not None:
                self._log.close()

    def _start(self) -> None:
        options = self._options
        self._engines = [self._engine(source, path) for source, path in zip(self._sources, self._first, strict=True)]
        shadow = None
        if options.shadow is not None:
            path, share = options.shadow
            # It may take the time that is left over, and no more.
            alone = msgspec.structs.replace(options, config=None, instances=1, threads=1, devices=(), card_dtype=None)
            name = f"shadow:{self._shadowed}"  # no model's: they have no colon
            at = self._engine(Source(name, path, False, ""), Path(os.path.realpath(path)), alone, nice=19).at
            shadow = ShadowAt(at.address, self._shadowed, share)
        grpc_port = None if self._grpc is None else self._grpc.getsockname()[1]
        self._fronts = [
            Front(
                index,
                self._listener,
                grpc_port,
                shadow,
                lambda: (self._number, self._models, self._state()),
                options,
                self._heard,
                self._ended,
            )
            for index in range(options.fronts)
        ]
        self._children += self._fronts

    def _engine(self, source: Source, path: Path, options: ServeOptions | None = None, *, nice: int = 0) -> Engine:
        """Starts an engine with a socket of its own. Raises ``EncastError``."""
        opened = artifacts.open(path)
        address = f"encast-{secrets.token_hex(16)}"  # abstract: nothing is left in the file system
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("\0" + address)
        listener.listen(_BACKLOG)
        hub_id = "" if os.path.exists(source.given) else source.given
        at = ModelAt(source.name, str(path), artifact_sha(opened), address, hub_id, source.aliases)
        meta = opened.graph.meta
        # Each of several engines would bind its busy instances to the same cores, and leave others idle.
        pin = self._options.pin and len(self._sources) == 1 and not nice
        args = options or self._options, self._heard, self._ended
        engine = Engine(at, opened.card["dtype"], meta.task, len(meta.labels or ()), nice, pin, listener, *args)
        self._children.append(engine)
        return engine

    @property
    def _models(self) -> tuple[ModelAt, ...]:
        return tuple(engine.at for engine in self._engines)

    # What children say

    def _heard(self, child: Child, message: Any) -> None:
        if isinstance(message, Counted):
            if isinstance(child, Engine):
                child.silent_s = 0
                stats = msgspec.msgpack.decode(message.data, type=EngineStats)
                self._registry.heard_engine(child.at.name, child.pid, stats)
            else:
                self._registry.heard_front(msgspec.msgpack.decode(message.data, type=Delta))
        elif isinstance(message, Ask):
            registry = self._registry
            known = registry.text() if message.what == "metrics" else msgspec.json.encode(registry.live())
            child.send(Answer(message.id, known))
        elif isinstance(message, Failed):
            child.kill(f"{child.name}: {message.message}")
        elif isinstance(child, Engine) and isinstance(message, EngineStarted):
            self._spawn(self._check(child, message))
        elif isinstance(child, Front) and isinstance(message, Opened):
            child.number = message.number
            self._pulse()
        elif isinstance(child, Front) and isinstance(message, FrontStarted):
            if child.number != self._number:  # there was a reload since its start
                child.send(Reload(self._number, self._models))
            self._is_up(child)

    async def _check(self, engine: Engine, started: EngineStarted) -> None:
        """Lets an engine serve when its canary is right."""
        pid = engine.pid
        if engine.canary is None:
            problem = await self._compare(engine, started.canary)
        else:
            problem = differs(engine, started.canary)
        if engine.pid != pid:
            return
        if problem:
            engine.kill(problem)
            return
        engine.canary, engine.setup, engine.instances = started.canary, started.setup, started.instances
        self._is_up(engine)

    async def _compare(self, engine: Engine, answer: bytes) -> str:
        """With the float64 reference; what is wrong, "" for nothing."""
        reference, doubt = await reference_answer(Path(engine.at.artifact), engine.at.sha256)
        if reference is None:
            self._warn(f"{engine.name}: its answers were not compared with the float64 reference: {doubt}")
            return ""
        found, least = cosine(answer, reference), engine.least_cosine
        if found >= least:
            return ""
        return (
            f"{engine.name}: the canary's answer has cosine {found:.6f} with the float64 reference, and "
            f"{engine.options.card_dtype or engine.dtype} needs {least}; the artifact or the kernels are wrong"
        )

    def _is_up(self, child: Child) -> None:
        child.is_up()
        name = f"front-{child.index}" if isinstance(child, Front) else f"engine-{child.name.rpartition(' ')[2]}"
        self._registry.processes[name] = child.pid
        self._tell()

    def _ended(self, child: Child, pid: int) -> None:
        self._registry.ended(pid)
        if child.ending:
            if child in self._children:
                self._children.remove(child)
        else:
            self._registry.counts.count("restarts_total", "front" if isinstance(child, Front) else "engine")
            self._warn(f"{child.problem}; it is started again")
        self._tell()

    async def _watch(self) -> None:
        while True:
            # Seconds in which this process ran: when all were stopped, or the machine slept, nobody hangs.
            await asyncio.sleep(1)
            for child in self._children:
                if isinstance(child, Engine) and child.up:
                    child.silent_s += 1
                    if child.silent_s > _SILENT_S:
                        child.kill(f"{child.name} was not heard for {_SILENT_S} s")

    # State

    def _tell(self) -> None:
        """Tells the fronts whether the server is ready."""
        state = self._state()
        self._registry.ready = not state.reason
        self._registry.models = tuple(
            ModelInfo(engine.at.name, engine.task, engine.dtype, engine.at.sha256, engine.labels)
            for engine in self._engines
        )
        for front in self._fronts:
            if front.up:
                front.send(state)
        self._pulse()

    def _state(self) -> State:
        if not self._serving:
            return State("the server is starting", admits=False)
        # Why is in the log and on standard error: it may name paths, and anyone may ask.
        looping = [f"{engine.name} ends again and again" for engine in self._engines if engine.looping]
        if looping:
            return State(f"{'; '.join(looping)}; the server's log says why", admits=False)
        down = [f"{engine.name} is being replaced" for engine in self._engines if not engine.up]
        return State("; ".join(down), admits=True)

    def _pulse(self) -> None:
        changed, self._changed = self._changed, asyncio.get_running_loop().create_future()
        changed.set_result(None)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Reload

    def _told_to_reload(self) -> None:
        self._reload_wanted = True
        if self._serving and not self._signals and (self._reloading is None or self._reloading.done()):
            self._reloading = asyncio.ensure_future(self._reload())

    async def _reload(self) -> None:
        while self._reload_wanted:
            self._reload_wanted = False
            try:
                self._check_files()
                changed = await self._replace_models()
            except (EncastError, OSError) as error:
                self._warn(f"reload: {error}; what was served is served on")
            else:
                self._tell_people(f"reloaded; {'new: ' + ', '.join(changed) if changed else 'no model has changed'}")

    def _check_files(self) -> None:
        """Raises ``InputError``."""
        options = self._options
        if options.api_keys is not None:
            Keys(options.api_keys, self._given_warn)
        if options.tls_cert is not None:
            tls_context(options.tls_cert, options.tls_key)

    async def _replace_models(self) -> list[str]:
        """New engines beside the old ones, then new requests to them, then the end of the old ones."""
        if self._log is not None:
            self._log.reopen()
        now = {engine.at.name: engine for engine in self._engines}
        engines: list[Engine] = []
        fresh: list[Engine] = []
        try:
            for source in self._sources:
                path = await in_daemon(source.prepare)
                opened = artifacts.open(path)
                if source.name == self._shadowed and self._options.shadow is not None:
                    shadowed({source.name: opened}, artifacts.open(self._options.shadow[0]))
                if artifact_sha(opened) == now[source.name].at.sha256:
                    engines.append(now[source.name])
                else:
                    fresh.append(self._engine(source, path))
                    engines.append(fresh[-1])
            for engine in fresh:
                await asyncio.shield(engine.first)
        except BaseException:
            for engine in fresh:
                engine.stop()
            raise
        self._engines = engines
        self._number += 1
        for front in self._fronts:
            if front.up:
                front.send(Reload(self._number, self._models))
        self._tell()
        # Those that start now too: they were told of the old ones.
        await self._until(lambda: all(front.number == self._number for front in self._fronts))
        for old in now.values():
            if old not in engines:
                self._spawn(old.dismiss(self._options.limits.timeout_s, self._warn))
        return [engine.at.name for engine in fresh]

    # The end

    def _told_to_end(self, number: int) -> None:
        self._signals.append(number)
        if len(self._signals) > 1:
            for child in list(self._children):
                child.stop()
        self._pulse()

    async def _end(self) -> int:
        if self._reloading is not None:
            self._reloading.cancel()
        self._tell_people("ending: what was accepted is answered first")
        fronts = [asyncio.ensure_future(front.dismiss(self._options.drain_s, self._warn)) for front in self._fronts]
        # Fronts close their copies when they hear it. With this one open too, the system would take connections on
        # and reset them at the end.
        self._listener.close()
        await asyncio.gather(*fronts)
        await asyncio.gather(*(child.dismiss(0.5, self._warn) for child in list(self._children)))
        return 0 if len(self._signals) == 1 else 128 + self._signals[1]

    # For people

    def _warn(self, line: str) -> None:
        if self._line is not None:
            self._line.clear()
        self._given_warn(line)
        if self._log is not None:
            self._log.event("warning", message=line)

    def _tell_people(self, line: str) -> None:
        if self._line is not None:
            self._line.clear()
        self._say(line)
        if self._log is not None:
            self._log.event("server", message=line)

    def _announce(self) -> None:
        options = self._options
        scheme = "http" if options.tls_cert is None else "https"
        host, port = self._listener.getsockname()[:2]
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        grpc_port = None if self._grpc is None else self._grpc.getsockname()[1]
        if self._for_programs is not None:
            described = [
                {"name": one.at.name, "task": one.task, "dtype": one.dtype, "setup": one.setup} for one in self._engines
            ]
            self._for_programs({"url": url, "grpc_port": grpc_port, "pid": os.getpid(), "models": described})
        models = ", ".join(f"{one.at.name} ({one.task}, {one.dtype}; {one.setup})" for one in self._engines)
        grpc = "" if grpc_port is None else f", gRPC on port {grpc_port}"
        self._tell_people(f"serving {models} at {url}{grpc}")
        self._say(f"try: {_curl(url, self._engines[0], options)}")


async def in_daemon(work: Callable[[], T]) -> T:
    """As ``asyncio.to_thread``, but at their end neither loop nor process waits for it: compiling takes minutes."""
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(work())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(outcome)


def _curl(url: str, engine: Engine, options: ServeOptions) -> str:
    """A command that asks the model something."""
    names = {"features": "hidden-states"}
    operation = next(
        one
        for one in ENCAST.operations
        if one.name == f"encast.{names.get(engine.task, engine.task.replace('_', '-'))}"
    )
    body = msgspec.json.encode({"model": engine.at.name, **operation.examples["example"]}).decode()
    key = "" if options.api_keys is None else ' -H "authorization: Bearer $KEY"'
    insecure = "" if options.tls_cert is None else " --insecure"
    return f"curl{insecure} {url}{operation.path}{key} -H content-type:application/json -d {shlex.quote(body)}"


def _bound(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A bound socket; raises ``ResourceError``."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError as error:
        raise ResourceError(
            f"{host} port {port} cannot be listened on: {error.strerror or error}; choose others by --host and --port"
        ) from None
    return bound


def differs(engine: Engine, answer: bytes) -> str:
    """The canary's answer from that of the process before it; what is wrong, "" for nothing."""
    assert engine.canary is not None
    if not engine.options.devices:
        if engine.canary == answer:
            return ""
        return f"{engine.name}: the canary's answer has other bits than before it was replaced"
    # A card's products for so many rows may be another kernel's where memory for a CUDA graph was lacking.
    found = cosine(answer, engine.canary)
    if found >= engine.least_cosine:
        return ""
    return f"{engine.name}: the canary's answer has cosine {found:.6f} with that before it was replaced"
