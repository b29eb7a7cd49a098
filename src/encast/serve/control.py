"""Messages between the supervisor and its children, and what a child is started with.

A child inherits one end of a Unix stream socketpair. Both sides send frames as in ``wire``: a length (u32,
little-endian) and a MessagePack array. A child that reads the end of the stream has lost its supervisor and ends.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from encast.serve.options import ServeOptions
from encast.serve.wire import Frames

__all__ = [
    "Answer", "Ask", "Channel", "Counted", "Drain", "EngineSettings", "EngineStarted", "Failed", "FrontSettings",
    "FrontStarted", "ModelAt", "Opened", "Reload", "State", "ToChild", "ToSupervisor", "open_channel",
]  # fmt: skip

_LENGTH = struct.Struct("<I")


class EngineSettings(msgspec.Struct, frozen=True):
    """The argument of ``python -m encast.serve.engine``, as JSON.

    ``artifact``: its folder; ``listen_fd``: the listening Unix socket, ``control_fd``: the supervisor's end of this
    channel, both inherited. ``options``: what the user asked for.
    """

    name: str
    artifact: str
    listen_fd: int
    control_fd: int
    options: ServeOptions


class ModelAt(msgspec.Struct, frozen=True):
    """A model as a front finds it: ``artifact`` is its folder, ``address`` the engine's abstract Unix socket (the
    bytes after the NUL).
    """

    name: str
    artifact: str
    address: str
    aliases: tuple[str, ...] = ()


class FrontSettings(msgspec.Struct, frozen=True):
    """The argument of ``python -m encast.serve.front``, as JSON. ``listen_fd``: the listening TCP socket;
    ``grpc_port``: where gRPC listens, None for nowhere. ``index``: of this front, 0 for the first.
    """

    index: int
    listen_fd: int
    control_fd: int
    grpc_port: int | None
    models: tuple[ModelAt, ...]
    options: ServeOptions


# From a child to the supervisor


class EngineStarted(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """The engine takes runs. ``setup``: its groups in a few words; ``instances``: how many; ``canary``: the answer of
    ``canary.ask`` as little-endian f32 bytes, which every one of its instances gave alike.
    """

    setup: str
    instances: int
    canary: bytes


class FrontStarted(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """The front answers requests."""


class Failed(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """The child cannot start or, of a front, cannot open what it was told to; ``message`` says why."""

    message: str


class Counted(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """What the child counted since its last message; ``metrics`` says what it is."""

    data: bytes


class Ask(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """A front wants what the supervisor knows: ``what`` is "metrics" or "live"."""

    id: int
    what: str


class Opened(msgspec.Struct, array_like=True, frozen=True, tag=5):
    """The front serves the models of the ``Reload`` of that number; requests that came before still use the old."""

    number: int


# From the supervisor to a child


class Reload(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """To a front: serve these models from now on, and read the files of keys and certificates again."""

    number: int
    models: tuple[ModelAt, ...]


class State(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """To a front: why the server is not ready, "" when it is."""

    reason: str


class Drain(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """To a front: take no more connections, answer what was accepted, end within ``seconds``. To an engine: take no
    more connections, and end once every front has closed its own, at the latest after ``seconds``.
    """

    seconds: float


class Answer(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """To a front: what it asked for."""

    id: int
    data: bytes


ToSupervisor = EngineStarted | FrontStarted | Failed | Counted | Ask | Opened
ToChild = Reload | State | Drain | Answer

_encoder = msgspec.msgpack.Encoder()


class Channel(asyncio.Protocol):
    """One end of a control socketpair. ``heard`` gets every message, ``lost`` is called when the other end is gone."""

    def __init__(self, kinds: Any, heard: Callable[[Any], None], lost: Callable[[], None]) -> None:
        self._decoder = msgspec.msgpack.Decoder(kinds)
        self._heard, self._lost = heard, lost
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            self._heard(self._decoder.decode(frame))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._lost()

    def send(self, message: ToSupervisor | ToChild) -> None:
        """Sends a message; one to an end that is gone is dropped."""
        if self._transport is not None:
            data = _encoder.encode(message)
            self._transport.write(_LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        """Closing twice is fine."""
        if self._transport is not None:
            self._transport.close()


async def open_channel(fd: int, kinds: Any, heard: Callable[[Any], None], lost: Callable[[], None]) -> Channel:
    """The channel over an inherited or own end of the socketpair; ``kinds``: the type of messages that it receives,
    ``ToChild`` in a child.
    """
    import socket

    end = socket.socket(fileno=fd)
    end.setblocking(False)
    channel = Channel(kinds, heard, lost)
    await asyncio.get_running_loop().create_connection(lambda: channel, sock=end)
    return channel
