"""What instances write, brought to one output: whole lines, each with its instance, and never a wait for the reader."""

from __future__ import annotations

import abc
import json
import os
import signal
from collections import deque

__all__ = ["JsonOutput", "LineBuffer", "Output", "PrefixOutput", "Sink"]

# Lines beyond it are broken, lest one without end fill the memory.
LONGEST_LINE = 1 << 20
# With so much on its way to a slow reader, nothing more is read from the instances: they wait in turn.
_BACKLOG = 1 << 20
# A pipe that poll(2) calls writable takes as much as this (PIPE_BUF) without blocking.
_PIECE = 4096


class LineBuffer:
    """Bytes in pieces to whole lines. A carriage return is no end of one: programs draw progress with it."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are complete now, each with its end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) >= LONGEST_LINE:
            lines.append(self._rest[:LONGEST_LINE])
            self._rest = self._rest[LONGEST_LINE:]
        return [line + b"\n" for line in lines]

    def finish(self) -> list[bytes]:
        """What is left, which the writer did not end."""
        left = [self._rest + b"\n"] if self._rest else []
        self._rest = b""
        return left


class Sink:
    """A descriptor that is written to as fast as it takes, and no faster."""

    def __init__(self, descriptor: int, name: str) -> None:
        self.descriptor, self.name = descriptor, name
        self.broken = False  # nothing can be written any more
        self._queue: deque[bytes] = deque()
        self._bytes = 0

    @property
    def pending(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._queue)

    @property
    def full(self) -> bool:
        """Whether enough waits that nothing should be added."""
        return self._bytes >= _BACKLOG

    def put(self, data: bytes) -> None:
        """Takes a line; loses it when nothing can be written."""
        if not self.broken:
            self._queue.append(data)
            self._bytes += len(data)

    def write(self) -> OSError | None:
        """Writes what the descriptor takes now, of which poll(2) has said that it takes something.

        Returns what has broken it, once: a pipe without reader, a terminal that hung up, a full disk.
        """
        piece = b""
        while self._queue and len(piece) < _PIECE:
            piece += self._queue.popleft()
        piece, rest = piece[:_PIECE], piece[_PIECE:]
        try:
            done = os.write(self.descriptor, piece)
        except BlockingIOError:  # somebody else made it non-blocking
            done = 0
        except OSError as error:
            self.broken = True
            self._queue.clear()
            self._bytes = 0
            return error
        self._bytes -= done
        if left := piece[done:] + rest:
            self._queue.appendleft(left)
        return None


class Output(abc.ABC):
    """Where lines and events go."""

    sinks: tuple[Sink, ...]

    @abc.abstractmethod
    def line(self, instance: int, stream: str, line: bytes) -> None:
        """A whole line that an instance wrote to ``stream`` (``stdout``, ``stderr``), its end included."""

    @abc.abstractmethod
    def note(self, text: str) -> None:
        """What the launcher has to say itself."""

    def ended(self, instance: int, code: int) -> None:  # noqa: B027, most have nothing to say of it
        """An instance has ended, with an exit code as a shell counts it."""

    def lost(self, sink: Sink, error: OSError) -> int:
        """The exit code for a sink that ``error`` broke; says so on the other one, unless it is that nobody reads."""
        if isinstance(error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        text = f"encast: error: {sink.name} cannot be written ({error.strerror}); make room or write it elsewhere\n"
        for other in self.sinks:
            other.put(text.encode())
        return os.EX_IOERR


class PrefixOutput(Output):
    """Lines as they are, behind ``[INSTANCE] ``; with ``prefix`` False, as they are alone."""

    def __init__(self, instances: int, *, prefix: bool = True, stdout: int = 1, stderr: int = 2) -> None:
        self._out, self._err = Sink(stdout, "standard output"), Sink(stderr, "standard error")
        if os.path.sameopenfile(stdout, stderr):
            # One file or terminal: one queue, so that a line is never in the middle of another.
            self._err = self._out
        self.sinks = (self._out,) if self._err is self._out else (self._out, self._err)
        self._width = len(str(instances - 1)) if prefix else 0

    def line(self, instance: int, stream: str, line: bytes) -> None:
        prefix = f"[{instance:{self._width}}] ".encode() if self._width else b""
        (self._out if stream == "stdout" else self._err).put(prefix + line)

    def note(self, text: str) -> None:
        self._err.put(f"encast: {text}\n".encode(errors="backslashreplace"))


class JsonOutput(Output):
    """An event a line, all on ``stdout``: ``line``, ``note``, ``ended``. ``stderr`` is for the loss of that alone."""

    def __init__(self, stdout: int = 1, stderr: int = 2) -> None:
        self._out = Sink(stdout, "standard output")
        self.sinks = (self._out, Sink(stderr, "standard error"))

    def line(self, instance: int, stream: str, line: bytes) -> None:
        text = line.decode(errors="replace").removesuffix("\n")
        self._put({"event": "line", "instance": instance, "stream": stream, "text": text})

    def note(self, text: str) -> None:
        self._put({"event": "note", "text": text})

    def ended(self, instance: int, code: int) -> None:
        self._put({"event": "ended", "instance": instance, "code": code})

    def _put(self, event: dict[str, object]) -> None:
        self._out.put(json.dumps(event).encode() + b"\n")
