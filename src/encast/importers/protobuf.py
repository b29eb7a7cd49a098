"""The wire format of protocol buffers, for the few fields that importers read of files whose schema they know.

Source: the encoding guide of protocol buffers. Unknown fields are skipped, as the format asks. Damage shows as one of
``MALFORMED``, which a reader turns into an error that names its file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

__all__ = ["MALFORMED", "Bytes", "fields", "integer", "message", "text", "varint"]

Bytes = bytes | memoryview

MALFORMED = (IndexError, struct.error, TypeError, ValueError)
"""What the functions below raise on bytes that are no message of the kind that is asked for."""


def fields(data: Bytes) -> Iterator[tuple[int, int | Bytes]]:
    """(field number, value): integers for varints, slices of ``data`` for everything else."""
    position = 0
    while position < len(data):
        tag, position = varint(data, position)
        wire = tag & 7
        if wire == 0:
            value, position = varint(data, position)
            yield tag >> 3, value
            continue
        if wire == 2:
            size, position = varint(data, position)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {position}")
        if position + size > len(data):
            raise ValueError(f"a field reaches beyond the end at byte {position}")
        yield tag >> 3, data[position : position + size]
        position += size


def varint(data: Bytes, position: int) -> tuple[int, int]:
    """The integer that starts at ``position``, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError(f"an integer of more than ten bytes at byte {position}")


def message(value: int | Bytes) -> Bytes:
    """A value that holds bytes or another message."""
    if isinstance(value, int):
        raise TypeError("a number where bytes are needed")
    return value


def text(value: int | Bytes) -> str:
    return bytes(message(value)).decode("utf-8")


def integer(value: int | Bytes) -> int:
    """A varint; negative ones are those above 2^63, which no reader accepts."""
    if not isinstance(value, int):
        raise TypeError("bytes where a number is needed")
    return value
