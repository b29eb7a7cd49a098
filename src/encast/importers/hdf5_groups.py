"""The links of an HDF5 group: names and the addresses of what they lead to.

"HDF5 File Format Specification Version 3.0": groups of the older form (III.A to III.D) have a B-tree whose leaves are
tables of symbols and a heap of names; groups of the newer form have messages (IV.A.2.g), as long as links are few.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NoReturn

from encast.errors import UnsupportedModelError
from encast.importers.files import quote
from encast.importers.hdf5_bytes import UNDEFINED, Hdf5Bytes
from encast.importers.hdf5_objects import Message

__all__ = ["is_group", "read_links"]

_LINK_INFO, _LINK, _SYMBOL_TABLE = 0x02, 0x06, 0x11
_LONGEST_NAME = 512
_MOST_LINKS = 10_000
"""Of a group. An optimizer has two for each weight of the model, all in one group."""
_MOST_LEVELS = 8
"""Of a B-tree; each has up to 32 branches."""
_SOFT_LINK = 2
"""Of a symbol: its ``cache type``."""
_ENTRY = struct.Struct("<QQI20x")


def is_group(messages: Sequence[Message]) -> bool:
    """Whether they are of a group of either form: they say where its links are, or are links."""
    return any(message.kind in (_LINK_INFO, _LINK, _SYMBOL_TABLE) for message in messages)


def read_links(data: Hdf5Bytes, messages: Sequence[Message], what: str) -> dict[str, int]:
    """Name → address of the object's header; ``what`` names the group.

    Raises ``CheckpointError`` for what is damaged, and ``UnsupportedModelError`` for links that lead elsewhere and for
    groups of the newer form with so many links that an index has them.
    """
    links: dict[str, int] = {}
    for message in messages:
        if message.kind == _SYMBOL_TABLE:
            found = _symbols(data, message.content(data, what), what)
        elif message.kind == _LINK:
            found = iter((_link(data, message.content(data, what), what),))
        elif message.kind == _LINK_INFO:
            _refuse_index(data, message.content(data, what), what)
            continue
        else:
            continue
        for name, address in found:
            if name in links:
                data.fail(f"{what} has two links named {quote(name)}")
            if len(links) == _MOST_LINKS:
                data.fail(f"{what} has more than {_MOST_LINKS} links, which no model needs")
            links[name] = address
    return links


def _name(data: Hdf5Bytes, stored: bytes, what: str) -> str:
    try:
        name = stored.decode("utf-8")
    except UnicodeDecodeError:
        data.fail(f"a name in {what} is not UTF-8")
    if not name or "/" in name or "\0" in name or name == ".":
        data.fail(f"{what} has a link named {quote(name)}")
    return name


# The older form


def _symbols(data: Hdf5Bytes, content: bytes, what: str) -> Iterator[tuple[str, int]]:
    if len(content) < 16:
        data.fail(f"{what} does not say where its links are")
    tree, heap = struct.unpack_from("<QQ", content)
    data.signed(b"HEAP", heap, f"heap of the names in {what}")
    size, _, names = data.numbers("8xQQQ", heap, f"the heap of the names in {what}")
    data.take(names + size, 0, f"the heap of the names in {what}")
    for table in _leaves(data, tree, what):
        data.signed(b"SNOD", table, f"table of symbols in {what}")
        (count,) = data.numbers("6xH", table, f"a table of symbols in {what}")
        entries = data.take(table + 8, count * _ENTRY.size, f"a table of {count} symbols in {what}")
        for offset, address, cache in _ENTRY.iter_unpack(entries):
            if offset >= size:
                data.fail(f"a name in {what} lies outside of its heap")
            end = data.file.bytes.find(b"\0", names + offset, names + min(size, offset + _LONGEST_NAME + 1))
            if end < 0:
                data.fail(f"a name in {what} has more than {_LONGEST_NAME} bytes or no end")
            name = _name(data, data.take(names + offset, end - names - offset, f"a name in {what}"), what)
            if cache == _SOFT_LINK:
                _refuse_link(data, name, "a soft link", what)
            yield name, address


def _leaves(data: Hdf5Bytes, root: int, what: str) -> Iterator[int]:
    """The tables of symbols, in order. Levels go down by one, so no path through the tree is endless."""
    waiting = [(root, -1)]
    while waiting:
        address, expected = waiting.pop()
        if expected == 0:
            yield address
            continue
        data.signed(b"TREE", address, f"B-tree of {what}")
        kind, level, count = data.numbers("4xBBH", address, f"the B-tree of {what}")
        if kind != 0 or level >= _MOST_LEVELS or expected not in (-1, level + 1):
            data.fail(f"the B-tree of {what} has a node of kind {kind} and level {level} at byte {address}")
        places = data.numbers(f"{2 * count}Q", address + 24, f"the B-tree of {what}")
        waiting += [(child, level) for child in reversed(places[1::2])]


# The newer form


def _link(data: Hdf5Bytes, content: bytes, what: str) -> tuple[str, int]:
    """Version, flags, then what the flags say: kind, order of creation, character set, length of the name."""
    flags = content[1] if len(content) > 1 else 0
    if content[:1] != b"\1":
        data.fail(f"a link of {what} has version {content[0] if content else 'none'}, where 1 is known")
    at = 2
    kind = 0
    if flags & 0x08:
        kind = content[at] if at < len(content) else 0
        at += 1
    at += (8 if flags & 0x04 else 0) + (1 if flags & 0x10 else 0)
    width = 1 << (flags & 3)
    length = int.from_bytes(content[at : at + width], "little")
    at += width
    if length > _LONGEST_NAME or at + length > len(content):
        data.fail(f"a link of {what} has a name of {length} bytes, more than there are or than {_LONGEST_NAME}")
    name = _name(data, content[at : at + length], what)
    if kind != 0:
        kinds = {1: "a soft link", 64: "a link to another file"}
        _refuse_link(data, name, kinds.get(kind, f"a link of kind {kind}"), what)
    if at + length + 8 > len(content):
        data.fail(f"the link {quote(name)} of {what} leads nowhere")
    return name, int.from_bytes(content[at + length : at + length + 8], "little")


def _refuse_link(data: Hdf5Bytes, name: str, kind: str, what: str) -> NoReturn:
    raise UnsupportedModelError(
        f"{data.where}: {quote(name)} in {what} is {kind}, which is not followed; store the dataset itself there"
    )


def _refuse_index(data: Hdf5Bytes, content: bytes, what: str) -> None:
    at = 2 + (8 if len(content) > 1 and content[1] & 1 else 0)
    if len(content) < at + 8:
        data.fail(f"{what} says nothing of where its links are")
    if int.from_bytes(content[at : at + 8], "little") != UNDEFINED:
        raise UnsupportedModelError(
            f"{data.where}: the links of {what} are in an index of the newer form (libver='latest' or track_order), "
            "which is not read; write the file with h5py's defaults, as Keras does"
        )
