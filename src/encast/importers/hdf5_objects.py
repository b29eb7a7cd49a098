"""HDF5's object headers: the messages that say what a group or a dataset is.

"HDF5 File Format Specification Version 3.0", IV.A. A header of version 1 is, in bytes,

    1 version, 1 zero, 2 number of messages, 4 references, 4 size of the messages, 4 zeros, messages

and a message is 2 type, 2 size, 1 flags, 3 zeros, content. Version 2 begins with OHDR and has smaller fields. What does
not fit stands in further blocks, to which messages of type 0x10 lead.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from encast.errors import UnsupportedModelError
from encast.importers.hdf5_bytes import Hdf5Bytes

__all__ = ["Message", "read_messages"]

_CONTINUATION = 0x10
_SHARED = 2
_MOST_BLOCKS = 256
"""Of a header. Each attribute of a group may have one of its own."""


@dataclass(frozen=True)
class Message:
    """Its ``content`` begins at byte ``at``; ``kind`` is its number in the specification."""

    kind: int
    at: int
    size: int
    shared: bool

    def content(self, data: Hdf5Bytes, what: str) -> bytes:
        """Raises ``UnsupportedModelError`` when the content stands elsewhere and others use it too."""
        if self.shared:
            raise UnsupportedModelError(
                f"{data.where}: {what} is stored apart, for several objects; it is read where it stands in each"
            )
        return data.take(self.at, self.size, what)


def read_messages(data: Hdf5Bytes, address: int, what: str) -> list[Message]:
    """The messages of the object at ``address``; raises ``CheckpointError`` and ``UnsupportedModelError``."""
    head = data.take(address, 4, f"the header of {what}")
    read = _read_second if head == b"OHDR" else _read_first
    return list(read(data, address, f"the header of {what}"))


def _read_first(data: Hdf5Bytes, address: int, what: str) -> Iterator[Message]:
    version, _, count, _, size = data.numbers("BBHII", address, what)
    if version != 1:
        data.fail(f"{what} has version {version} at byte {address}, where 1 or OHDR is known")
    blocks = [(address + 16, size)]
    for at, length in blocks:
        end = at + length
        while at + 8 <= end and count:
            kind, size, flags = data.numbers("HHB3x", at, what)
            if at + 8 + size > end:
                data.fail(f"a message of {what} has {size} bytes, and {end - at - 8} are left to it")
            count -= 1
            message = Message(kind, at + 8, size, bool(flags & _SHARED))
            at += 8 + size
            if kind == _CONTINUATION:
                _follow(data, message, blocks, what)
            else:
                yield message


def _read_second(data: Hdf5Bytes, address: int, what: str) -> Iterator[Message]:
    version, flags = data.numbers("4xBB", address, what)
    if version != 2:
        data.fail(f"{what} begins with OHDR and has version {version}, where 2 is known")
    at = address + 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
    width = 1 << (flags & 3)
    size = int.from_bytes(data.take(at, width, what), "little")
    order = 2 if flags & 4 else 0  # every message then says when it was made
    blocks = [(at + width, size)]
    for index, (at, length) in enumerate(blocks):
        end = at + length
        if index:  # OCHK before the messages, a checksum behind them
            data.signed(b"OCHK", at, f"block of {what}")
            at, end = at + 4, end - 4
        while at + 4 + order <= end:
            kind, size, marks = data.numbers("BHB", at, what)
            at += 4 + order
            if at + size > end:
                data.fail(f"a message of {what} has {size} bytes, and {end - at} are left to it")
            message = Message(kind, at, size, bool(marks & _SHARED))
            at += size
            if kind == _CONTINUATION:
                _follow(data, message, blocks, what)
            else:
                yield message


def _follow(data: Hdf5Bytes, message: Message, blocks: list[tuple[int, int]], what: str) -> None:
    content = message.content(data, f"a block of {what}")
    if len(content) < 16:
        data.fail(f"{what} goes on at a place that is not said")
    at, size = struct.unpack_from("<QQ", content)
    data.take(at, 0, f"a block of {what}")
    data.take(at + size, 0, f"a block of {what}")
    if len(blocks) == _MOST_BLOCKS:
        data.fail(f"{what} goes on in more than {_MOST_BLOCKS} blocks, which none of Keras does")
    if any(begin < at + size and at < begin + length for begin, length in blocks):
        data.fail(f"{what} goes on at byte {at}, which belongs to it already")
    blocks.append((at, size))
