"""LevelDB's table format, in which TensorFlow stores the index of a checkpoint.

Source: ``tensorflow/core/lib/io`` (``format.cc``, ``block.cc``, ``table_builder.cc``), LevelDB's ``table_format.md``.
A block is entries whose keys leave out what they share with the key before, then the restart points, where a key is
whole, then a byte of compression and a masked CRC-32C. The last 48 bytes of the file say where the index block lies,
whose values say where the data blocks lie.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from encast.importers.crc32c import crc32c, unmask
from encast.importers.protobuf import varint

__all__ = ["is_table", "read_table"]

_FOOTER = 48
_MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
_TRAILER = 5
_NO_COMPRESSION, _SNAPPY = 0, 1
_MOST_KEY_BYTES = 1 << 24
"""Of all keys together. Shared parts would let a small file ask for any amount; BERT-large's keys have 100 kB."""
_MOST_BLOCKS = 1_000
"""A checksum takes milliseconds, however short the block. TensorFlow's have 256 kB: BERT-large's entries fill one."""
_MOST_ENTRIES = 20_000
"""BERT-large has 1,200 variables with its optimiser's; an entry takes many times its bytes, in time and memory."""


def is_table(tail: bytes) -> bool:
    """Whether a file that ends in ``tail`` (8 bytes or more) is a table."""
    return tail.endswith(_MAGIC)


def read_table(data: bytes) -> dict[bytes, bytes]:
    """Key → value, in the keys' order; raises ``ValueError`` or ``IndexError`` on what is no whole, valid table.

    Every byte that is used was checked against its CRC. Blocks must lie one after the other, as every writer puts
    them, so that no byte is read twice.
    """
    footer = len(data) - _FOOTER
    if footer < 0 or not is_table(data):
        raise ValueError("the mark at its end is missing")
    _, position = _handle(data, footer)
    (offset, size), position = _handle(data, position)
    if position > len(data) - len(_MAGIC):
        raise ValueError("its footer is too long")
    blocks = _Blocks(data[:footer])
    table: dict[bytes, bytes] = {}
    reached, last = 0, None
    for _, value in blocks.entries(offset, size):
        (begin, length), _ = _handle(value, 0)
        if begin < reached or begin + length > offset:
            raise ValueError(f"the block at byte {begin} overlaps another one")
        reached = begin + length + _TRAILER
        for key, content in blocks.entries(begin, length):
            if last is not None and key <= last:
                raise ValueError(f"the keys of the block at byte {begin} are not in order")
            last = key
            table[key] = content
            if len(table) > _MOST_ENTRIES:
                raise ValueError(f"it has more than {_MOST_ENTRIES} entries")
    return table


def _handle(data: bytes, position: int) -> tuple[tuple[int, int], int]:
    """Offset and size of a block, and where the handle ends."""
    offset, position = varint(data, position)
    size, position = varint(data, position)
    return (offset, size), position


@dataclass
class _Blocks:
    """Blocks of a table's ``data``, the index block one of them, with what was read of them so far."""

    data: bytes
    count: int = field(default=0, init=False)
    key_bytes: int = field(default=0, init=False)

    def entries(self, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
        """The entries of a block, in order."""
        block = self._checked(offset, size)
        end = size - 4
        if end >= 0:
            end -= 4 * struct.unpack_from("<I", block, end)[0]
        if end < 0:
            raise ValueError(f"the block at byte {offset} has no room for its restart points")
        position, key = 0, b""
        while position < end:
            shared, position = varint(block, position)
            own, position = varint(block, position)
            length, position = varint(block, position)
            if shared > len(key) or position + own + length > end:
                raise ValueError(f"an entry of the block at byte {offset} reaches beyond it")
            self.key_bytes += shared + own
            if self.key_bytes > _MOST_KEY_BYTES:
                raise ValueError(f"its keys have more than {_MOST_KEY_BYTES} bytes")
            key = key[:shared] + block[position : position + own]
            position += own
            yield key, block[position : position + length]
            position += length

    def _checked(self, offset: int, size: int) -> bytes:
        """The bytes of a block without compression that have its checksum."""
        data = self.data
        if offset + size + _TRAILER > len(data):
            raise ValueError(f"the block at byte {offset} with {size} bytes reaches beyond the end")
        self.count += 1
        if self.count > _MOST_BLOCKS:
            raise ValueError(f"it has more than {_MOST_BLOCKS} blocks")
        kind, stored = struct.unpack_from("<BI", data, offset + size)
        if crc32c(data[offset : offset + size + 1]) != unmask(stored):
            raise ValueError(f"the block at byte {offset} does not have the checksum that stands behind it")
        if kind != _NO_COMPRESSION:
            name = "Snappy" if kind == _SNAPPY else f"method {kind}"
            raise ValueError(
                f"the block at byte {offset} is compressed by {name}, which is not read; no TensorFlow since 1.2 "
                "compresses: load the checkpoint there and save it again"
            )
        return data[offset : offset + size]
