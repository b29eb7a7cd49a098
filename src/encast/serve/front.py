"""A front process: HTTP and gRPC, tokenising and post-processing. ``python -m encast.serve.front SETTINGS``.

It holds no weights: each model is a session beside a client of the engine that computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import itertools
import logging
import os
import signal
import socket
import sys
import time
import weakref
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import encast.artifact as artifacts
from encast.artifact import artifact_sha
from encast.engine import session_of
from encast.errors import ArtifactError, EncastError
from encast.launch.process import die_with_parent
from encast.serve.app import create_app
from encast.serve.control import (
    Answer,
    Ask,
    Counted,
    Drain,
    Failed,
    FrontSettings,
    FrontStarted,
    ModelAt,
    Opened,
    Reload,
    State,
    ToChild,
    open_channel,
)
from encast.serve.errors import RefusalError
from encast.serve.http import HttpServer
from encast.serve.keys import Keys
from encast.serve.logs import Log, QuietFormatter
from encast.serve.metrics import Recorder
from encast.serve.models import Models, ServedModel
from encast.serve.protocols.encast import ENCAST
from encast.serve.protocols.health import HEALTH
from encast.serve.protocols.kserve import KSERVE
from encast.serve.protocols.openai import OPENAI
from encast.serve.protocols.page import page
from encast.serve.protocols.rerank import RERANK
from encast.serve.protocols.tei import TEI
from encast.serve.remote import RemoteEngine
from encast.serve.service import Service
from encast.serve.shadow import ClosingRunner, ShadowRunner
from encast.serve.tls import grpc_certificate, grpc_credentials, tls_context
from encast.serve.tracing import Tracing, otlp_exporter

if TYPE_CHECKING:
    from encast.serve.protocols.kserve_grpc import GrpcServer

__all__ = ["main"]

_COUNTED_S = 0.25
_ASK_S = 2.0


class _Front:
    """The process's state, and what it does with the supervisor's messages."""

    def __init__(self, settings: FrontSettings) -> None:
        self._settings = settings
        self._name = f"front-{settings.index}"
        self._state = settings.state
        self._recorder = Recorder()
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count()
        self._ended = asyncio.Event()
        self._server: HttpServer | None = None
        self._certificate: Any = None
        """Of gRPC."""
        self._ends_at = 0.0

    async def run(self) -> None:
        """Serves until drained, or until the supervisor is gone."""
        settings, options = self._settings, self._settings.options
        control = socket.socket(fileno=settings.control_fd)
        self._channel = await open_channel(control, ToChild, self._heard, self._ended.set)
        try:
            self._service = Service(
                Models({at.name: self._open(at) for at in settings.models}),
                limits=options.limits,
                ready=lambda: self._state.admits,
                reason=lambda: self._state.reason,
                finished=[self._recorder.finished],
                ask=self._ask,
            )
            self._tls = None if options.tls_cert is None else tls_context(options.tls_cert, options.tls_key)
            self._keys = None if options.api_keys is None else Keys(options.api_keys, lambda _: None)
            self._log = None if options.log is None else self._open_log(options.log)
            tracing = None if options.otlp is None else Tracing(otlp_exporter(options.otlp), self._name)
            if self._keys is not None:
                self._service.authorise = self._keys.authorise
            grpc = await self._serve_grpc()
        except EncastError as error:
            self._channel.send(Failed(str(error)))
            await self._ended.wait()
            return
        for listener in (self._log, tracing):
            if listener is not None:
                self._service.finished.append(listener.finished)
        self._server = HttpServer(
            self._app(),
            options.limits,
            drain_s=options.drain_s,
            started=lambda: self._channel.send(FrontStarted()),
            tls=self._tls,
        )
        counting = asyncio.ensure_future(self._count())
        serving = asyncio.ensure_future(self._server.serve([socket.socket(fileno=settings.listen_fd)]))
        lost = asyncio.ensure_future(self._ended.wait())
        await asyncio.wait({serving, lost}, return_when=asyncio.FIRST_COMPLETED)
        counting.cancel()
        if serving.done():
            serving.result()
            if grpc is not None:
                await grpc.stop(max(0.0, self._ends_at - time.monotonic()))
            for _ in range(2):  # turns of the loop, in which requests that were cut off just now are told of
                await asyncio.sleep(0)
            self._channel.send(Counted(msgspec.msgpack.encode(self._recorder.take())))
            if self._log is not None:
                self._log.close()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    async def _serve_grpc(self) -> GrpcServer | None:
        settings = self._settings
        if settings.grpc_port is None:
            return None
        from encast.serve.protocols.kserve_grpc import serve_grpc

        credentials = None
        if settings.options.tls_cert is not None:
            self._certificate = grpc_certificate(settings.options.tls_cert, settings.options.tls_key)
            credentials = grpc_credentials(lambda: self._certificate)
        host = settings.options.host
        address = f"{f'[{host}]' if ':' in host else host}:{settings.grpc_port}"
        return await serve_grpc(self._service, address, credentials=credentials)

    def _app(self) -> ASGIApp:
        shown = page(lambda: self._ask("live"), html=self._settings.options.page)
        protocols = [HEALTH, OPENAI, RERANK, TEI, KSERVE, ENCAST, shown]
        app: ASGIApp = create_app(self._service, protocols)
        origins = self._settings.options.cors
        if origins:
            app = CORSMiddleware(app, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
        return app

    def _open_log(self, path: str) -> Log:
        def dropped(reason: str) -> None:
            self._recorder.count("log_lines_dropped_total", reason)

        return Log(path, texts=self._settings.options.log_texts, process=self._name, dropped=dropped)

    def _open(self, at: ModelAt) -> ServedModel:
        """Raises ``EncastError``."""
        opened = artifacts.open(at.artifact)
        if artifact_sha(opened) != at.sha256:
            raise ArtifactError(
                f"{at.artifact} was replaced by another artifact; SIGHUP makes the server open that one"
            )
        runner: ClosingRunner = RemoteEngine(at.address)
        shadow = self._settings.shadow
        if shadow is not None and shadow.model == at.name:
            reference = RemoteEngine(shadow.address)
            task = opened.graph.meta.task
            runner = ShadowRunner(runner, reference, shadow.share, self._recorder, model=at.name, task=task)
        model = ServedModel(
            at.name,
            session_of(opened),
            runner,
            sha256=at.sha256,
            dtype=opened.card["dtype"],
            created=int(datetime.datetime.fromisoformat(opened.card["created"]).timestamp()),
            source=at.source,
            aliases=at.aliases,
        )
        # The last request that uses a model which a reload has replaced lets go of it, and its engine can end.
        weakref.finalize(model, _close, asyncio.get_running_loop(), runner)
        return model

    def _reload(self, message: Reload) -> None:
        """All of it or nothing."""
        now, options = self._service.models.by_name, self._settings.options
        try:
            models = {
                at.name: now[at.name] if at.name in now and now[at.name].sha256 == at.sha256 else self._open(at)
                for at in message.models
            }
            if self._keys is not None:
                self._keys.reload()
            if self._tls is not None:
                tls_context(options.tls_cert or "", options.tls_key, self._tls)
                if self._settings.grpc_port is not None:
                    self._certificate = grpc_certificate(options.tls_cert or "", options.tls_key)
        except EncastError as error:
            self._channel.send(Failed(str(error)))
            return
        if self._log is not None:
            self._log.reopen()
        self._service.models = Models(models)
        self._channel.send(Opened(message.number))

    # The supervisor

    def _heard(self, message: Reload | State | Drain | Answer) -> None:
        if isinstance(message, State):
            self._state = message
        elif isinstance(message, Reload):
            self._reload(message)
        elif isinstance(message, Answer):
            asked = self._asked.pop(message.id, None)
            if asked is not None and not asked.done():
                asked.set_result(message.data)
        elif self._server is None:
            self._ended.set()
        else:
            self._state = State("the server is about to end", admits=True)
            self._ends_at = time.monotonic() + message.seconds
            self._server.end()

    async def _ask(self, what: str) -> bytes:
        number = next(self._numbers)
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        self._channel.send(Ask(number, what))
        try:
            return await asyncio.wait_for(asked, _ASK_S)
        except asyncio.TimeoutError:
            raise RefusalError("unavailable", "the supervisor does not answer", retry_after=1) from None
        finally:
            self._asked.pop(number, None)

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(_COUNTED_S)
            delta = self._recorder.take()
            if delta.counters or delta.histograms:
                self._channel.send(Counted(msgspec.msgpack.encode(delta)))


def _close(loop: asyncio.AbstractEventLoop, runner: ClosingRunner) -> None:
    """From any thread: a request that was given up may still be tokenised in one."""
    with contextlib.suppress(RuntimeError):  # the loop has ended, and with it the connection
        loop.call_soon_threadsafe(lambda: loop.create_task(runner.close()))


def main() -> None:
    """Runs the process."""
    die_with_parent(signal.SIGKILL, os.getppid())
    settings = msgspec.json.decode(sys.argv[1], type=FrontSettings)
    handler = logging.StreamHandler()
    handler.setFormatter(QuietFormatter(texts=settings.options.log_texts))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    uvloop.run(_Front(settings).run())


if __name__ == "__main__":
    main()
