"""``encast serve`` as a child process of a replica: started, pointed at other artifacts, asked how it does, drained."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import encast.artifact as artifacts
from encast.errors import ResourceError
from encast.launch.process import die_with_parent

__all__ = ["SERVER_PORTS", "ChildServer"]

SERVER_PORTS = range(21_000, 22_000)
"""Of the servers: above those of Ray's workers, and below those that systems give to connections."""

_START_S = 300.0
_RELOAD_S = 300.0
_ASK_S = 2.0
_LIVE_S = 8.0  # a server that is only short of a core had better go on
_POLL_S = 0.1
_LAST_LINES = 20
_LONGEST_LINE, _LONGEST_SHOWN = 1 << 16, 1000
_RELOADED = "encast: reloaded"
_REFUSED = "encast: reload: "
_FOLDERS = "encast-serve-"
_KEY_NAME = "encast-replica"


class ChildServer:
    """A server at ``host`` and a free port, with more ``arguments`` of ``encast serve``. ``keys``: the file of API
    keys, if there is one. Its calls belong to one event loop, whose thread must outlive the child.
    """

    def __init__(self, host: str, arguments: Sequence[str], keys: str | None) -> None:
        self.host, self.port = host, _free_port(host)
        self._arguments, self._keys = list(arguments), keys
        # A server opens its artifacts again where it found them at first: these links are what moves.
        _sweep()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDERS}{os.getpid()}-"))
        self._key = secrets.token_hex(16)
        self._process: asyncio.subprocess.Process | None = None
        self._said: deque[str] = deque(maxlen=_LAST_LINES)
        self._readers: list[asyncio.Task[None]] = []

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, models: Mapping[str, str]) -> None:
        """Serves the artifacts of ``models`` by their names; returns once it does. Raises ``EncastError``, and nothing
        is left of it then.
        """
        try:
            await self._start(models)
        except BaseException:
            self.kill()
            if self._process is not None:
                await self._process.wait()
            self.tidy()
            raise

    async def _start(self, models: Mapping[str, str]) -> None:
        self._point(models)
        arguments = [f"{name}={self._link(name)}" for name in models]
        arguments += ["--host", self.host, "--port", str(self.port), "--json", "--no-live", *self._arguments]
        if self._keys is not None:
            arguments += ["--api-keys", str(self._write_keys())]
        parent = os.getpid()
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "encast.cli.main", "serve", *arguments,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=lambda: die_with_parent(signal.SIGKILL, parent),
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        self._readers = [asyncio.ensure_future(self._listen(process.stderr))]
        try:
            line = await asyncio.wait_for(process.stdout.readline(), _START_S)
        except asyncio.TimeoutError:
            raise ResourceError(f"encast serve did not serve within {_START_S:g} s; {self._words()}") from None
        if not line:
            code = await process.wait()
            await asyncio.gather(*self._readers)
            raise ResourceError(f"encast serve ended with {code}: {self._words()}")
        self._readers.append(asyncio.ensure_future(self._listen(process.stdout)))

    async def reload(self, models: Mapping[str, str]) -> None:
        """Serves these artifacts under the same names, and loses no request over it. Raises ``EncastError`` where it
        does not come to serve them; it then serves on what it had.
        """
        for path in models.values():
            artifacts.open(path)
        self._point(models)
        if self._keys is not None:
            self._write_keys()
        assert self._process is not None
        self._said.clear()
        self._process.send_signal(signal.SIGHUP)
        end = time.monotonic() + _RELOAD_S
        while time.monotonic() < end:
            refusals = [line for line in self._said if _REFUSED in line]
            if refusals or not self.runs:
                raise ResourceError(refusals[0] if refusals else f"encast serve ended: {self._words()}")
            if any(_RELOADED in line for line in self._said):
                return
            await asyncio.sleep(_POLL_S)
        raise ResourceError(f"the artifacts were not opened within {_RELOAD_S:g} s; {self._words()}")

    async def stats(self) -> dict[str, Any]:
        """What ``/encast/v1/stats`` says. Raises ``OSError`` or ``ValueError`` where there is no such answer."""
        found: dict[str, Any] = json.loads(await self._get("/encast/v1/stats"))
        return found

    async def live(self) -> None:
        """Raises ``OSError`` or ``ValueError`` where it does not answer."""
        await self._get("/health/live", _LIVE_S)

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        assert self._process is not None
        return await self._process.wait()

    async def end(self, seconds: float) -> None:
        """Has it answer what it has accepted, for so long at most, and end."""
        if self.runs:
            assert self._process is not None
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), seconds)
            except asyncio.TimeoutError:
                self.kill()
        self.tidy()

    def tidy(self) -> None:
        """Removes its folder, once it has ended."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """Ends it at once."""
        if self.runs:
            assert self._process is not None
            self._process.kill()

    # Files

    def _link(self, name: str) -> Path:
        # Names may have slashes.
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.encast"

    def _point(self, models: Mapping[str, str]) -> None:
        for name, path in models.items():
            fresh = self._folder / "fresh"
            fresh.symlink_to(os.path.abspath(path))
            fresh.rename(self._link(name))

    def _write_keys(self) -> Path:
        """The user's file and a key of our own, for the statistics."""
        assert self._keys is not None
        try:
            text = Path(self._keys).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ResourceError(f"{self._keys}: the API keys cannot be read: {error}") from None
        path, fresh = self._folder / "keys", self._folder / "keys.fresh"
        fresh.touch(mode=0o600)
        fresh.write_text(f"{text}\n{_KEY_NAME} sha256:{hashlib.sha256(self._key.encode()).hexdigest()}\n")
        fresh.rename(path)
        return path

    # What it says

    async def _get(self, path: str, seconds: float = _ASK_S) -> bytes:
        def get() -> bytes:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=seconds)
            try:
                connection.request("GET", path, headers={"authorization": f"Bearer {self._key}"})
                response = connection.getresponse()
                body = response.read()
                if response.status != 200:
                    raise ValueError(f"{path} was answered with {response.status}")
                return body
            except http.client.HTTPException as error:
                raise OSError(f"{path}: {error!r}") from None
            finally:
                connection.close()

        return await asyncio.to_thread(get)

    async def _listen(self, stream: asyncio.StreamReader) -> None:
        """Hands its lines on to this process's stderr, which Ray keeps, and remembers the last ones."""
        rest = b""
        while part := await stream.read(_LONGEST_LINE):
            *lines, rest = (rest + part).split(b"\n")
            if len(rest) >= _LONGEST_LINE:  # read on, or the server would wait for the pipe
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._hear(line)
        if rest:
            self._hear(rest)

    def _hear(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()
        self._said.append(text[:_LONGEST_SHOWN])
        print(text, file=sys.stderr, flush=True)

    def _words(self) -> str:
        return "\n".join(self._said) or "it said nothing"


def _sweep() -> None:
    """Removes the folders of actors that were killed: they hold copies of key files."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDERS}*-*"):
        pid = folder.name.removeprefix(_FOLDERS).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)  # what is another user's stays


def _free_port(host: str) -> int:
    """Chosen before the server is started, because Ray Serve asks a replica for its facts before that. Should somebody
    take the port meanwhile the server does not start, and Ray Serve makes another replica.
    """
    ports = list(SERVER_PORTS)
    random.shuffle(ports)
    for port in ports:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise ResourceError(
        f"the ports {SERVER_PORTS[0]} to {SERVER_PORTS[-1]} of {host} are all in use; end what uses them"
    )
