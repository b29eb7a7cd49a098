"""Real engine processes for tests, with the supervisor's end of the control channel."""

from __future__ import annotations

import contextlib
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from encast.serve.control import Counted, EngineSettings, EngineStarted, ToSupervisor
from encast.serve.options import ServeOptions
from encast.serve.wire import EngineStats, Frames, frame

__all__ = ["EngineProcess", "Listening", "listening"]


class EngineProcess:
    """An engine that has started. ``started``: what it said first; ``before``: what it is told before that."""

    def __init__(
        self, listener: socket.socket, artifact: Path, options: ServeOptions, before: Sequence[msgspec.Struct] = ()
    ) -> None:
        self.control, theirs = socket.socketpair()
        with theirs:
            settings = EngineSettings("model", str(artifact), listener.fileno(), theirs.fileno(), options)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "encast.serve.engine", msgspec.json.encode(settings).decode()],
                pass_fds=[listener.fileno(), theirs.fileno()], stderr=subprocess.PIPE,
            )  # fmt: skip
        self.control.settimeout(60)
        for message in before:
            self.tell(message)
        self._frames, self._decoder = Frames(), msgspec.msgpack.Decoder(ToSupervisor)
        self._messages: list[Any] = []
        self.started = self.hear()

    def hear(self) -> Any:
        """The next message; None when the engine has gone."""
        while not self._messages:
            data = self.control.recv(1 << 16)
            if not data:
                return None
            self._messages += map(self._decoder.decode, self._frames.feed(data))
        return self._messages.pop(0)

    def stats(self) -> EngineStats:
        """What it counts from now on: the second message after now."""
        self.control.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while self.control.recv(1 << 16):
                pass
        self.control.settimeout(60)
        self._messages.clear()
        self._frames = Frames()
        for _ in range(2):
            counted = self.hear()
            assert isinstance(counted, Counted)
        return msgspec.msgpack.decode(counted.data, type=EngineStats)

    def tell(self, message: msgspec.Struct) -> None:
        self.control.send(frame(message))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def wait(self) -> tuple[int, str]:
        """The exit code, and what it wrote to stderr."""
        _, written = self.process.communicate(timeout=60)
        return self.process.returncode, written.decode()


class Listening:
    """The supervisor's listening socket, behind which engines come and go."""

    def __init__(self) -> None:
        self.address = f"encast-test-{secrets.token_hex(8)}"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind("\0" + self.address)
        self.listener.listen(64)
        self.engines: list[EngineProcess] = []

    def engine(self, artifact: Path, **options: Any) -> EngineProcess:
        engine = EngineProcess(self.listener, artifact, ServeOptions(**options))
        self.engines.append(engine)
        assert isinstance(engine.started, EngineStarted), (engine.started, engine.wait())
        return engine


@contextlib.contextmanager
def listening() -> Iterator[Listening]:
    here = Listening()
    try:
        yield here
    finally:
        here.listener.close()
        for engine in here.engines:
            engine.process.kill()
            engine.process.communicate()
            engine.control.close()
