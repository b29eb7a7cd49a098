"""Reads the symbols of ELF64 objects, with nothing but the standard library: this test must not depend on binutils."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Symbol", "read_symbols"]

_SECTION_SYMBOL_TABLE = 2
_BINDINGS = {0: "local", 1: "global", 2: "weak", 10: "unique"}
_TYPES = {0: "none", 1: "object", 2: "function", 3: "section", 4: "file", 6: "tls", 10: "ifunc"}


@dataclass(frozen=True)
class Symbol:
    name: str  # as the linker sees it (mangled)
    binding: str  # local, global, weak, unique
    type: str  # function, object, ...
    defined: bool


def read_symbols(path: Path) -> list[Symbol]:
    """All named symbols of an object file; raises ``ValueError`` when it is no little-endian ELF64 file."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{path} is no little-endian ELF64 file")
    (sections_at,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    if count == 0:  # more sections than fit the header: the first one's size says how many
        (count,) = struct.unpack_from("<Q", data, sections_at + 32)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, sections_at + size * index) for index in range(count)]
    symbols = []
    for _, kind, _, _, offset, length, link, _, _, entry in sections:
        if kind != _SECTION_SYMBOL_TABLE:
            continue
        names_at = sections[link][4]
        for at in range(offset, offset + length, entry):
            name_at, info, _, section = struct.unpack_from("<IBBH", data, at)
            if name_at == 0:
                continue
            start = names_at + name_at
            name = data[start : data.index(b"\0", start)].decode("utf-8", "replace")
            symbols.append(
                Symbol(name, _BINDINGS.get(info >> 4, "other"), _TYPES.get(info & 15, "other"), section != 0)
            )
    return symbols
