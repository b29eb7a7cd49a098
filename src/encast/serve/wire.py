"""Messages between a front and an engine, and what an engine counts: frames on a Unix stream socket.

A frame is its length (u32, little-endian) and a MessagePack array. Times are seconds of ``time.monotonic``, one clock
for all processes of a machine. Arrays are bytes in the machine's order, i32 on the way in and f32 on the way out; they
are read where they lie in the frame.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import msgspec

from encast.serve.errors import Kind

__all__ = [
    "Cancel", "EngineStats", "Failed", "Frames", "FromEngine", "Rows", "Submit", "ToEngine", "frame", "peer_uid",
]  # fmt: skip

_LENGTH = struct.Struct("<I")

LONGEST_FRAME = 1 << 30
"""In bytes: a run of 2^20 tokens with 256 numbers each."""


class Submit(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """Wants an output of the model for the sequences of a packed batch.

    ``id``: of this run, chosen by the front, unique on its connection. ``arrived``: when the request that it belongs to
    came; ``before``: tokens of that request that ran or were submitted in runs before this one, so that a large request
    does not overtake others with each part. ``deadline``: after it nobody wants the answer. ``select``: see
    ``Runnable.run``. A run with ``before`` > 0 is of an accepted request and is never refused for load.
    """

    id: int
    output: str
    token_ids: memoryview
    cu_seqlens: memoryview
    token_type_ids: memoryview | None
    select: memoryview | None
    arrived: float
    deadline: float
    before: int


class Cancel(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """The client of this run has gone. It gets no answer."""

    id: int


class Rows(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """The answer: ``f32[rows, columns]``. ``queued_s``: until the last of its sequences was begun; ``run_s``: what the
    longest of its batches took; ``batch_tokens``: tokens of that batch. ``backlog_s``: how long a run would now wait.
    """

    id: int
    columns: int
    rows: memoryview
    queued_s: float
    run_s: float
    batch_tokens: int
    backlog_s: float


class Failed(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """No answer; see ``RefusalError``. ``kind`` "unprocessable" carries the words of an ``InputError``. ``full``: the
    queue has no room for runs like it, whatever time they have.
    """

    id: int
    kind: Kind
    message: str
    retry_after: float | None
    backlog_s: float
    full: bool = False


class EngineStats(msgspec.Struct, array_like=True, frozen=True):
    """To the supervisor, four times a second, as the ``data`` of ``control.Counted``. The first five fields say how it
    is now, the counts after them are since the start; ``batch_tokens``: of every batch since the message before.
    ``backlog_s``: how long a run would now wait. ``busy_s``: seconds of all instances of each group; ``instances``: how
    many each has.
    """

    queue_rows: int
    queue_tokens: int
    backlog_s: float
    running: int
    fronts: int
    runs: int
    rows: int
    tokens: int
    batches: int
    refused: int
    expired: int
    cancelled: int
    failed: int
    busy_s: list[float]
    instances: list[int]
    batch_tokens: list[int]


ToEngine = Submit | Cancel
FromEngine = Rows | Failed

_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytearray:
    """The bytes of a message."""
    buffer = bytearray(4)
    _encoder.encode_into(message, buffer, 4)
    _LENGTH.pack_into(buffer, 0, len(buffer) - 4)
    return buffer


def peer_uid(sock: socket.socket) -> int:
    """The user of the process at the other end of a Unix socket (of a listening one: who made it listen), as the kernel
    knows it.
    """
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid


class Frames:
    """Puts the frames of a stream together again from whatever pieces it arrives in."""

    def __init__(self, longest: int = LONGEST_FRAME) -> None:
        self._longest = longest
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[memoryview]:
        """The frames that are whole with ``data``, which are not copied where they lie in one piece; raises
        ``ValueError`` for one that is longer than any may be.
        """
        if self._rest:
            self._rest += data
            if len(self._rest) < 4 or len(self._rest) < 4 + self._length(self._rest, 0):
                return
            data, self._rest = bytes(self._rest), bytearray()
        view = memoryview(data)
        at = 0
        while len(data) - at >= 4:
            end = at + 4 + self._length(data, at)
            if end > len(data):
                break
            yield view[at + 4 : end]
            at = end
        self._rest += view[at:]

    def _length(self, data: bytes | bytearray, at: int) -> int:
        length: int = _LENGTH.unpack_from(data, at)[0]
        if length > self._longest:
            raise ValueError(f"a frame of {length} bytes; at most {self._longest} are sent")
        return length
