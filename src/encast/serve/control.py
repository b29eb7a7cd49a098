"""Messages between the supervisor and its fronts, and what a front is started with; those of engines are in ``wire``.

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
    "Answer", "Ask", "Channel", "Counted", "Drain", "FrontFailed", "FrontReady", "FrontSettings", "ModelAt", "Reload",
    "Reloaded", "State", "open_channel",
]  # fmt: skip


class ModelAt(msgspec.Struct, frozen=True):
    """A model as a front finds it. ``artifact``: its folder; ``sha256``: of what is fixed in it, lest tokenizer and
    weights be of two artifacts when the folder is replaced; ``address``: of its engine, an abstract Unix socket with
    its leading NUL; ``source``: as the user named it.
    """

    name: str
    artifact: str
    sha256: str
    address: str
    source: str
    aliases: tuple[str, ...]


class FrontSettings(msgspec.Struct, frozen=True):
    """The argument of ``python -m encast.serve.front``, as JSON. ``listen_fd``: the listening TCP socket; ``index``: of
    this front, from 0; ``parent``: the process with which it ends; ``grpc_port``: None for no gRPC.
    """

    index: int
    parent: int
    listen_fd: int
    control_fd: int
    grpc_port: int | None
    models: tuple[ModelAt, ...]
    options: ServeOptions


# From a front


class FrontReady(msgspec.Struct, array_like=True, frozen=True, tag=20):
    """It answers requests."""


class FrontFailed(msgspec.Struct, array_like=True, frozen=True, tag=21):
    """It cannot start, or cannot open what a ``Reload`` names, and ends."""

    message: str


class Counted(msgspec.Struct, array_like=True, frozen=True, tag=22):
    """What it counted since its last message, as ``metrics`` writes it."""

    data: bytes


class Ask(msgspec.Struct, array_like=True, frozen=True, tag=23):
    """Wants what only the supervisor knows: ``what`` is "metrics" or "live"."""

    id: int
    what: str


class Reloaded(msgspec.Struct, array_like=True, frozen=True, tag=24):
    """New requests use the models of the ``Reload`` of that number; those under way still use the old."""

    number: int


# To a front


class Reload(msgspec.Struct, array_like=True, frozen=True, tag=30):
    """Serve these models from now on; read the files of keys and certificates again."""

    number: int
    models: tuple[ModelAt, ...]


class State(msgspec.Struct, array_like=True, frozen=True, tag=31):
    """``reason``: why the server is not ready, "" when it is. ``admits``: whether requests are taken all the same: they
    wait while an engine is replaced.
    """

    reason: str
    admits: bool


class Drain(msgspec.Struct, array_like=True, frozen=True, tag=32):
    """Take no more connections, answer what was accepted, and end."""


class Answer(msgspec.Struct, array_like=True, frozen=True, tag=33):
    """What it asked for."""

    id: int
    data: bytes


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
