"""Messages between a front and an engine: frames on a Unix stream socket.

A frame is its length (u32, little-endian) and a MessagePack array. Times are seconds of ``time.monotonic``, one clock
for all processes of a machine. Arrays are bytes in the machine's order: i32 on the way in, f32 on the way out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from encast.serve.errors import Kind

__all__ = ["Cancel", "Failed", "Frames", "FromEngine", "Rows", "Submit", "ToEngine", "frame"]

_LENGTH = struct.Struct("<I")

LONGEST_FRAME = 1 << 30


class Submit(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """Wants an output of the model for the sequences of a packed batch.

    ``id``: of this run, chosen by the front, unique on its connection. ``arrived``: when the request that it belongs to
    came; ``before``: tokens of that request that ran or were submitted in runs before this one, so that a large request
    does not overtake others with each part. ``deadline``: after it nobody wants the answer. ``select``: see
    ``Runnable.run``. A run with ``before`` > 0 is of an accepted request and is never refused for load.
    """

    id: int
    output: str
    token_ids: bytes
    cu_seqlens: bytes
    token_type_ids: bytes | None
    select: bytes | None
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
    rows: bytes
    queued_s: float
    run_s: float
    batch_tokens: int
    backlog_s: float


class Failed(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """No answer; see ``RefusalError``. ``kind`` "unprocessable" carries the words of an ``InputError``."""

    id: int
    kind: Kind
    message: str
    retry_after: float | None
    backlog_s: float


ToEngine = Submit | Cancel
FromEngine = Rows | Failed

_encoder = msgspec.msgpack.Encoder()


def frame(message: ToEngine | FromEngine) -> bytes:
    """The bytes of a message."""
    buffer = bytearray(4)
    _encoder.encode_into(message, buffer, 4)
    _LENGTH.pack_into(buffer, 0, len(buffer) - 4)
    return bytes(buffer)


class Frames:
    """Puts the frames of a stream together again from whatever pieces it arrives in."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that are whole with ``data``; raises ``ValueError`` for one that is longer than any may be."""
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= 4:
            (length,) = _LENGTH.unpack_from(self._buffer, at)
            if length > LONGEST_FRAME:
                raise ValueError(f"a frame of {length} bytes; at most {LONGEST_FRAME} are sent")
            if len(self._buffer) - at - 4 < length:
                break
            yield bytes(self._buffer[at + 4 : at + 4 + length])
            at += 4 + length
        del self._buffer[:at]
