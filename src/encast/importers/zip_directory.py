"""Where the entries of an uncompressed zip archive lie, for mapping them.

Written by hand because ``zipfile`` neither says where an entry's bytes start nor bounds what a
hostile directory makes it allocate. Only what ``torch.save`` writes is accepted: one disk,
nothing encrypted, entries stored without compression. Zip64 is understood, checksums are not
verified (``torch.save`` may leave them out).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from encast.errors import CheckpointError
from encast.importers.files import MappedFile, quote

__all__ = ["ZipEntry", "read_zip_directory"]

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX_ENTRIES = 100_000
_COMMENT_LIMIT = 0xFFFF


@dataclass(frozen=True)
class ZipEntry:
    """The bytes of an entry in the archive's file."""

    offset: int
    size: int


def read_zip_directory(file: MappedFile) -> dict[str, ZipEntry]:
    """Entry name → where it lies; raises ``CheckpointError`` on anything that does not hold together."""
    where = str(file.path)
    directory, size, count = _find_directory(file, where)
    if count > _MAX_ENTRIES or size < count * _CENTRAL.size or directory + size > file.size:
        raise CheckpointError(f"{where}: its zip directory does not fit the file; it is truncated or damaged")
    data = file.bytes[directory : directory + size]
    entries: dict[str, ZipEntry] = {}
    position = 0
    try:
        for _ in range(count):
            fields = _CENTRAL.unpack_from(data, position)
            name_length, extra_length, comment_length = fields[10], fields[11], fields[12]
            after = position + _CENTRAL.size
            name = data[after : after + name_length].decode("utf-8", "replace")
            extra = data[after + name_length : after + name_length + extra_length]
            packed, unpacked, local = _zip64_sizes(extra, fields[8], fields[9], fields[16])
            which = f"{where}: entry {quote(name)}"
            if fields[0] != b"PK\x01\x02":
                raise CheckpointError(f"{where}: its zip directory is damaged at entry {len(entries)}")
            if fields[4] != 0 or fields[3] & 1 or packed != unpacked:
                raise CheckpointError(f"{which} is compressed or encrypted; torch.save stores entries as they are")
            if name in entries:
                raise CheckpointError(f"{which} stands twice in the archive")
            entries[name] = _locate(file, which, data[after : after + name_length], local, unpacked)
            position = after + name_length + extra_length + comment_length
    except struct.error:
        raise CheckpointError(f"{where}: its zip directory ends early; the file is truncated or damaged") from None
    return entries


def _find_directory(file: MappedFile, where: str) -> tuple[int, int, int]:
    tail_start = max(0, file.size - _END.size - _COMMENT_LIMIT)
    at = file.bytes.rfind(b"PK\x05\x06", tail_start)
    if at < 0 or at + _END.size > file.size:
        raise CheckpointError(f"{where}: a zip archive without its directory; the file is truncated, fetch it again")
    fields = _END.unpack_from(file.bytes, at)
    count, size, offset = fields[4], fields[5], fields[6]
    locator_at = at - _END64_LOCATOR.size
    if locator_at >= 0 and file.bytes[locator_at : locator_at + 4] == b"PK\x06\x07":
        end64_at = _END64_LOCATOR.unpack_from(file.bytes, locator_at)[2]
        if end64_at + _END64.size > locator_at or file.bytes[end64_at : end64_at + 4] != b"PK\x06\x06":
            raise CheckpointError(f"{where}: its zip64 directory is damaged")
        fields64 = _END64.unpack_from(file.bytes, end64_at)
        count, size, offset = fields64[7], fields64[8], fields64[9]
    return offset, size, count


def _zip64_sizes(extra: bytes, packed: int, unpacked: int, local: int) -> tuple[int, int, int]:
    """The sizes and the offset of an entry, with those that do not fit 32 bits taken from its zip64 field."""
    position = 0
    while position + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, position)
        if tag == 1:
            wide = position + 4
            if unpacked == 0xFFFFFFFF:
                unpacked, wide = struct.unpack_from("<Q", extra, wide)[0], wide + 8
            if packed == 0xFFFFFFFF:
                packed, wide = struct.unpack_from("<Q", extra, wide)[0], wide + 8
            if local == 0xFFFFFFFF:
                local = struct.unpack_from("<Q", extra, wide)[0]
            break
        position += 4 + length
    return packed, unpacked, local


def _locate(file: MappedFile, which: str, name: bytes, local: int, size: int) -> ZipEntry:
    if local + _LOCAL.size > file.size:
        raise CheckpointError(f"{which} starts outside of the file; it is truncated or damaged")
    fields = _LOCAL.unpack_from(file.bytes, local)
    start = local + _LOCAL.size + fields[9] + fields[10]
    if fields[0] != b"PK\x03\x04" or file.bytes[local + _LOCAL.size : local + _LOCAL.size + fields[9]] != name:
        raise CheckpointError(f"{which} is not where the directory says; the file is damaged")
    if start + size > file.size:
        raise CheckpointError(f"{which} reaches beyond the end of the file; it is truncated, fetch it again")
    return ZipEntry(start, size)
