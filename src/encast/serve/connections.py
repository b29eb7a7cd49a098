"""The engine's side of its sockets: never blocking, and bounded where the other side does not read."""

from __future__ import annotations

import select
import socket
import threading
from typing import TYPE_CHECKING

from encast.serve.join import Arrays
from encast.serve.wire import Frames

if TYPE_CHECKING:
    from encast.serve.queue import Job

__all__ = ["Asked", "Connection"]

_MOST_UNSENT = 256 << 20
_READ = 256 << 10
_LONGEST_SUBMIT = 64 << 20


class Asked:
    """Who asked for a job, by which number, with which arrays."""

    __slots__ = ("arrays", "connection", "id")

    def __init__(self, connection: Connection, id: int, arrays: Arrays) -> None:
        self.connection, self.id, self.arrays = connection, id, arrays


class Connection:
    """A front's socket, or the supervisor's. Any thread may call ``send``; all else belongs to the one that polls."""

    def __init__(self, sock: socket.socket, poll: select.epoll) -> None:
        sock.setblocking(False)
        self.jobs: dict[int, Job] = {}
        """Without an answer, by their number."""
        self._sock, self._poll = sock, poll
        self._frames = Frames(_LONGEST_SUBMIT)
        # One buffer for all reads: recv(_READ) takes that much from the heap each time and gives most of it back, by
        # which the heap grew by 1.3 MB in 9,000 queries.
        self._received = memoryview(bytearray(_READ))
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._open = True
        poll.register(sock, select.EPOLLIN)

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def unsent(self) -> int:
        """Bytes that the other side has not taken yet."""
        return len(self._unsent)

    def read(self) -> list[memoryview] | None:
        """The frames that have come; None when the other side is gone. Raises ``ValueError`` for a frame too long."""
        try:
            count = self._sock.recv_into(self._received)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return list(self._frames.feed(bytes(self._received[:count]))) if count else None

    def send(self, data: bytes | bytearray) -> None:
        """Sends now what the socket takes and the rest as it takes more. A side that lets too much lie is cut off."""
        with self._lock:
            if not self._open:
                return
            sent = 0
            if not self._unsent:
                try:
                    sent = self._sock.send(data)
                except BlockingIOError:
                    pass
                except OSError:  # gone; the poll says so too
                    return
                if sent == len(data):
                    return
                self._poll.modify(self._sock, select.EPOLLIN | select.EPOLLOUT)
            self._unsent += memoryview(data)[sent:]
            if len(self._unsent) > _MOST_UNSENT:
                self._sock.shutdown(socket.SHUT_RDWR)

    def flush(self) -> None:
        """Sends more of what is left; the socket can be written again."""
        with self._lock:
            if not self._open or not self._unsent:
                return
            try:
                sent = self._sock.send(self._unsent)
            except OSError:
                return
            del self._unsent[:sent]
            if not self._unsent:
                self._poll.modify(self._sock, select.EPOLLIN)

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                self._poll.unregister(self._sock)
                self._sock.close()
                self._unsent.clear()
