"""Messages between the supervisor and its children, and what a child is started with.

Every child inherits one end of a Unix stream socketpair, on which both sides send frames as ``wire.frame`` makes them.
A child that reads the end of the stream has lost its supervisor and ends.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from encast.serve.options import ServeOptions
from encast.serve.wire import Frames, frame

__all__ = [
    "Answer", "Ask", "Channel", "Counted", "Drain", "EngineSettings", "EngineStarted", "Failed", "FrontSettings",
    "FrontStarted", "ModelAt", "Opened", "Reload", "ShadowAt", "State", "ToChild", "ToSupervisor", "open_channel",
]  # fmt: skip


class EngineSettings(msgspec.Struct, frozen=True):
    """The argument of ``python -m encast.serve.engine``, as JSON.

    ``artifact``: its folder; ``sha256``: of what is fixed in it, lest another one be in its place by now (None:
    whatever is there); ``listen_fd``: the listening Unix socket, ``control_fd``: the end of the channel, both
    inherited; ``nice``: 0 to 19, of all of its threads; ``pin``: whether these are bound to cores.
    """

    name: str
    artifact: str
    listen_fd: int
    control_fd: int
    options: ServeOptions
    sha256: str | None = None
    nice: int = 0
    pin: bool = True


class ModelAt(msgspec.Struct, frozen=True):
    """A model as a front finds it. ``artifact``: its folder; ``sha256``: of what is fixed in it, lest tokenizer and
    weights be of two artifacts when the folder is replaced; ``address``: of its engine, an abstract Unix socket
    without its leading NUL; ``source``: the hub id that it was compiled from, or "". Clients are told it, and a path
    is not for them.
    """

    name: str
    artifact: str
    sha256: str
    address: str
    source: str
    aliases: tuple[str, ...]


class ShadowAt(msgspec.Struct, frozen=True):
    """The engine of the reference that a ``share`` of the runs of ``model`` is compared with; see ``shadow``."""

    address: str
    model: str
    share: float


class State(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """To a front. ``reason``: why the server is not ready, "" when it is. ``admits``: whether requests are taken all
    the same: they wait while an engine is replaced.
    """

    reason: str
    admits: bool


class FrontSettings(msgspec.Struct, frozen=True):
    """The argument of ``python -m encast.serve.front``, as JSON. ``listen_fd``: the listening TCP socket; ``index``: of
    this front, from 0; ``grpc_port``: None for no gRPC; ``options``: what the user asked for.
    """

    index: int
    listen_fd: int
    control_fd: int
    grpc_port: int | None
    models: tuple[ModelAt, ...]
    shadow: ShadowAt | None
    state: State
    options: ServeOptions


# To the supervisor


class EngineStarted(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """The engine takes runs. ``setup``: its groups in a few words; ``instances``: how many; ``canary``: the answer to
    ``canary_run``, f32, which all of its instances gave alike.
    """

    setup: str
    instances: int
    canary: bytes


class FrontStarted(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """The front answers requests."""


class Failed(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """The child cannot start, or cannot open what a ``Reload`` names. ``message``: the words of an ``EncastError``."""

    message: str


class Counted(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """What the child counted since its last message: of an engine ``wire.EngineStats``, of a front what ``metrics``
    writes.
    """

    data: bytes


class Ask(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """A front wants what only the supervisor knows: ``what`` is "metrics" or "live"."""

    id: int
    what: str


class Opened(msgspec.Struct, array_like=True, frozen=True, tag=5):
    """In this front new requests use the models of the ``Reload`` of that number; those under way still use the old."""

    number: int


# To a child


class Reload(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """To a front: serve these models from now on; read the files of keys and certificates again."""

    number: int
    models: tuple[ModelAt, ...]


class Drain(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """Take no more connections, and end within so many seconds: a front when it has answered what it accepted, an
    engine when all fronts have gone.
    """

    seconds: float


class Answer(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """To a front: what it asked for."""

    id: int
    data: bytes


ToSupervisor = EngineStarted | FrontStarted | Failed | Counted | Ask | Opened
ToChild = Reload | State | Drain | Answer


class Channel(asyncio.Protocol):
    """One end of a control socketpair. ``heard`` gets every message, ``lost`` is called when the other end is gone."""

    def __init__(self, kinds: Any, heard: Callable[[Any], None], lost: Callable[[], None]) -> None:
        self._decoder = msgspec.msgpack.Decoder(kinds)
        self._heard, self._lost = heard, lost
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # a stream's

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            self._heard(self._decoder.decode(message))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._lost()

    def send(self, message: msgspec.Struct) -> None:
        """A message to an end that is gone is dropped."""
        if self._transport is not None:
            self._transport.write(frame(message))

    def close(self) -> None:
        """Closing twice is fine."""
        if self._transport is not None:
            self._transport.close()


async def open_channel(
    end: socket.socket, kinds: Any, heard: Callable[[Any], None], lost: Callable[[], None]
) -> Channel:
    """The channel over this end; ``kinds``: the union of the messages that it receives."""
    end.setblocking(False)
    channel = Channel(kinds, heard, lost)
    await asyncio.get_running_loop().create_connection(lambda: channel, sock=end)
    return channel
