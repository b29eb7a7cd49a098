"""A front process: HTTP and gRPC, tokenising and post-processing. ``python -m encast.serve.front SETTINGS``.

It holds no weights: each model is a session beside a client of the engine that computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import signal
import socket
import ssl
import sys
import weakref
from collections.abc import Sequence

import msgspec
import uvloop

import encast.artifact as artifacts
from encast.engine import session_of
from encast.errors import ArtifactError, EncastError
from encast.launch.process import die_with_parent
from encast.serve.app import create_app
from encast.serve.control import (
    Answer,
    Channel,
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
from encast.serve.http import HttpServer
from encast.serve.models import Models, ServedModel
from encast.serve.operations import Protocol
from encast.serve.protocols.health import HEALTH
from encast.serve.remote import RemoteEngine
from encast.serve.service import Service
from encast.tune.configuration import artifact_sha

__all__ = ["main"]

_STARTING = "the server is starting"


class _Front:
    """The process's state, and what it does with the supervisor's messages."""

    def __init__(self, settings: FrontSettings) -> None:
        self._settings = settings
        self._state = State(_STARTING, admits=False)
        self._tls: ssl.SSLContext | None = None
        self._server: HttpServer | None = None
        self._channel: Channel | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serves until drained, or until the supervisor is gone."""
        settings, options = self._settings, self._settings.options
        ended = asyncio.Event()
        control = socket.socket(fileno=settings.control_fd)
        self._channel = await open_channel(control, ToChild, self._heard, ended.set)
        try:
            self._service = Service(
                self._open(settings.models),
                limits=options.limits,
                ready=lambda: self._state.admits,
                reason=lambda: self._state.reason,
            )
            self._tls = _tls(options.tls_cert, options.tls_key)
        except EncastError as error:
            self._channel.send(Failed(str(error)))
            return
        app = create_app(self._service, _protocols())
        self._server = HttpServer(
            app,
            options.limits,
            drain_s=options.drain_s,
            started=lambda: self._send(FrontStarted()),
            tls=self._tls,
        )
        serving = asyncio.ensure_future(self._server.serve([socket.socket(fileno=settings.listen_fd)]))
        lost = asyncio.ensure_future(ended.wait())
        await asyncio.wait({serving, lost}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()

    # Models

    def _open(self, models: Sequence[ModelAt]) -> Models:
        """Raises ``EncastError``."""
        return Models({at.name: _open(at) for at in models})

    def _reload(self, message: Reload) -> None:
        try:
            now = self._service.models.by_name
            kept = {at.name: now[at.name] for at in message.models if _same(now.get(at.name), at)}
            models = Models({at.name: kept.get(at.name) or _open(at) for at in message.models})
            if self._tls is not None:
                assert self._settings.options.tls_cert is not None
                self._tls.load_cert_chain(self._settings.options.tls_cert, self._settings.options.tls_key)
        except (EncastError, OSError) as error:
            self._send(Failed(str(error)))
            return
        self._service.models = models
        self._send(Opened(message.number))

    # The supervisor

    def _send(self, message: msgspec.Struct) -> None:
        assert self._channel is not None
        self._channel.send(message)

    def _heard(self, message: Reload | State | Drain | Answer) -> None:
        if isinstance(message, State):
            self._state = message
        elif isinstance(message, Reload):
            self._reload(message)
        elif isinstance(message, Drain) and self._server is not None:
            self._state = State("the server is about to end", admits=True)
            self._server.end()


def _open(at: ModelAt) -> ServedModel:
    """Raises ``EncastError``."""
    opened = artifacts.open(at.artifact)
    if artifact_sha(opened) != at.sha256:
        raise ArtifactError(f"{at.artifact} was replaced by another artifact; send the server SIGHUP to serve that one")
    runner = RemoteEngine(at.address)
    card = opened.card
    model = ServedModel(
        at.name,
        session_of(opened),
        runner,
        sha256=at.sha256,
        dtype=card["dtype"],
        created=int(datetime.datetime.fromisoformat(card["created"]).timestamp()),
        source=at.source,
        aliases=at.aliases,
    )
    # The last request that uses a model which a reload has replaced lets go of it, and its engine can end.
    weakref.finalize(model, _let_go, runner)
    return model


def _same(model: ServedModel | None, at: ModelAt) -> bool:
    return model is not None and (model.sha256, model.aliases) == (at.sha256, at.aliases)


def _let_go(runner: RemoteEngine) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended, and with it the connection
        asyncio.get_running_loop().create_task(runner.close())


def _tls(cert: str | None, key: str | None) -> ssl.SSLContext | None:
    if cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise EncastError(f"{cert} cannot be used as the certificate: {error}") from None
    return context


def _protocols() -> list[Protocol]:
    return [HEALTH]


def main() -> None:
    """Runs the process."""
    settings = msgspec.json.decode(sys.argv[1], type=FrontSettings)
    die_with_parent(signal.SIGKILL, os.getppid())
    uvloop.run(_Front(settings).run())


if __name__ == "__main__":
    main()
