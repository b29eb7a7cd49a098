"""A server of real processes, for tests with clients."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Running", "running_server", "start_server"]

_CACHE = Path(tempfile.gettempdir()) / f"encast-test-cache-{os.getuid()}"


class Running:
    """``encast serve`` with these arguments, on a port that the system chooses; ready when this returns.

    ``out`` and ``err``: lines of its standard streams so far.
    """

    def __init__(self, *arguments: str | Path, env: dict[str, str] | None = None) -> None:
        self.out: list[str] = []
        self.err: list[str] = []
        self._more = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "encast.cli.main", "serve", *map(str, arguments), "--port", "0"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "ENCAST_CACHE_DIR": str(_CACHE), **(env or {})},
        )  # fmt: skip
        self._readers = [
            threading.Thread(target=self._read, args=(stream, lines), daemon=True)
            for stream, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()
        try:
            line = self.wait_for_line("out", r"serving .* at (https?://\S+)")
        except AssertionError:
            self.process.kill()
            raise
        found = re.search(r" at (https?://[^\s,;]+)", line)
        assert found is not None, line
        self.url = found[1]
        """Without a slash at the end."""

    def _read(self, stream: object, lines: list[str]) -> None:
        for line in stream:  # type: ignore[attr-defined]
            with self._more:
                lines.append(line.rstrip("\n"))
                self._more.notify_all()
        with self._more:
            self._more.notify_all()

    def wait_for_line(self, stream: str, pattern: str, *, after: int = 0, seconds: float = 60.0) -> str:
        """The first line of "out" or "err", from index ``after`` on, in which the pattern is found."""
        lines: list[str] = getattr(self, stream)

        def found() -> str | None:
            return next((line for line in lines[after:] if re.search(pattern, line)), None)

        with self._more:
            self._more.wait_for(lambda: found() is not None or self.process.poll() is not None, seconds)
        if found() is None:
            for reader in self._readers if self.process.poll() is not None else ():
                reader.join(5)
        line = found()
        assert line is not None, f"no {pattern!r} in {lines[after:]}; standard error: {self.err}"
        return line

    def children(self, module: str) -> list[int]:
        """The pids of its children that run ``encast.serve.MODULE``."""
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdecimal():
                with contextlib.suppress(OSError):
                    parent = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1]
                    words = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
                    if int(parent) == self.process.pid and f"encast.serve.{module}".encode() in words:
                        found.append(int(entry))
        return found

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, seconds: float = 60.0) -> int:
        """SIGTERM, and the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        finally:
            self.process.kill()
            self.process.wait()
            for reader in self._readers:
                reader.join(10)
            self.process.stdout.close()  # type: ignore[union-attr]
            self.process.stderr.close()  # type: ignore[union-attr]


@contextlib.contextmanager
def start_server(*arguments: str | Path, env: dict[str, str] | None = None) -> Iterator[Running]:
    """A ``Running`` server, which is ended."""
    server = Running(*arguments, env=env)
    try:
        yield server
    finally:
        server.end()


@contextlib.contextmanager
def running_server(*arguments: str | Path) -> Iterator[str]:
    """The URL of a server with these arguments, without a slash at the end; it must end well."""
    server = Running(*arguments)
    try:
        yield server.url
    finally:
        assert server.end() == 0, server.err
