"""The header of ``weights.safetensors``, written with every tensor on a 64-byte boundary and read with suspicion.

    u64 length of the header | header: JSON, padded with spaces | tensors, one after the other

The format allows no holes between tensors, so where a tensor does not end on a boundary, a tensor ``__pad.N``
of zero bytes follows it. The padded header puts the first tensor on a boundary. The file thus stays readable by
any safetensors library, and the mapped bytes are aligned for every vector width.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from encast.artifact.pack import StoredSpec
from encast.artifact.strict_json import parse_json
from encast.errors import ArtifactError

__all__ = ["ALIGNMENT", "PAD", "Layout", "StoredTensor", "header_size", "layout", "parse_header"]

ALIGNMENT = 64
PAD = "__pad."
MAX_HEADER = 100_000_000
"""The largest header that safetensors libraries accept."""

_TO_FILE = {"f32": "F32", "bf16": "BF16", "s8": "I8", "i32": "I32", "u16": "U16", "u8": "U8"}
_FROM_FILE = {value: key for key, value in _TO_FILE.items()}
_ITEM_BYTES = {"f32": 4, "bf16": 2, "s8": 1, "i32": 4, "u16": 2, "u8": 1}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file: ``offset`` counts from the start of the file; ``xxh64`` (seed 0) is of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    xxh64: int


@dataclass(frozen=True)
class Layout:
    """Where everything goes: the header's bytes, and each tensor's spec (None for padding) with its size."""

    header: bytes
    tensors: tuple[tuple[str, StoredSpec | None, int], ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(size for _, _, size in self.tensors)


def layout(specs: Iterable[StoredSpec], metadata: Mapping[str, str]) -> Layout:
    """Lays tensors out in the order given; raises ``ArtifactError`` for a name that padding uses or that is double."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    tensors: list[tuple[str, StoredSpec | None, int]] = []
    offset = 0

    def place(name: str, dtype: str, shape: tuple[int, ...], spec: StoredSpec | None, nbytes: int) -> None:
        nonlocal offset
        header[name] = {"dtype": _TO_FILE[dtype], "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        tensors.append((name, spec, nbytes))
        offset += nbytes

    for spec in specs:
        if spec.name.startswith("__") or spec.name in header:
            raise ArtifactError(f"a tensor cannot be stored as {spec.name!r}: the name is reserved or taken")
        place(spec.name, spec.dtype, spec.shape, spec, spec.nbytes)
        if offset % ALIGNMENT:
            gap = ALIGNMENT - offset % ALIGNMENT
            place(f"{PAD}{len(tensors)}", "u8", (gap,), None, gap)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return Layout(len(text).to_bytes(8, "little") + text, tuple(tensors))


def header_size(start: bytes, file_size: int, where: str) -> int:
    """The bytes of length and header together, from the first eight; raises ``ArtifactError`` if they lie."""
    if len(start) < 8:
        raise ArtifactError(f"{where} has {file_size} bytes; the header's length alone takes 8: compile again")
    size = int.from_bytes(start[:8], "little")
    if size > MAX_HEADER or 8 + size > file_size:
        raise ArtifactError(
            f"{where}: the header claims {size} bytes, the file has {file_size}: it is damaged or truncated"
        )
    if (8 + size) % ALIGNMENT:
        raise ArtifactError(f"{where}: the header ends at {8 + size}, which is no multiple of {ALIGNMENT}")
    return 8 + size


def parse_header(header: bytes, file_size: int, checksums: Mapping[str, int], where: str) -> dict[str, StoredTensor]:
    """The tensors that a header (length included) describes, padding included, in file order.

    Raises ``ArtifactError`` unless they are well-formed, aligned, and cover the file exactly, one after the other.
    """
    entries = parse_json(header[8:], f"{where}: header")
    if not isinstance(entries, dict):
        raise ArtifactError(f"{where}: the header is no JSON object")
    entries.pop("__metadata__", None)
    tensors: dict[str, StoredTensor] = {}
    end = len(header)
    for name, entry in entries.items():
        dtype, shape, begin, stop = _entry(entry, name, where)
        offset = len(header) + begin
        if offset != end:
            raise ArtifactError(f"{where}: tensor {name!r} begins at byte {offset}, the one before it ends at {end}")
        if not name.startswith(PAD) and offset % ALIGNMENT:
            raise ArtifactError(f"{where}: tensor {name!r} begins at byte {offset}, no multiple of {ALIGNMENT}")
        nbytes = math.prod(shape) * _ITEM_BYTES[dtype]
        if stop - begin != nbytes:
            raise ArtifactError(
                f"{where}: tensor {name!r} is {dtype}{list(shape)}, {nbytes} bytes, but has {stop - begin}"
            )
        if name not in checksums:
            raise ArtifactError(f"{where}: tensor {name!r} has no checksum in card.json")
        end = offset + nbytes
        tensors[name] = StoredTensor(dtype, shape, offset, nbytes, checksums[name])
    if end != file_size:
        raise ArtifactError(
            f"{where}: the tensors end at byte {end}, the file has {file_size}: it is truncated or too long"
        )
    missing = sorted(set(checksums) - set(tensors))
    if missing:
        raise ArtifactError(f"{where} lacks tensors that card.json lists: {missing[:5]}")
    return tensors


def _entry(entry: Any, name: str, where: str) -> tuple[str, tuple[int, ...], int, int]:
    """Dtype, shape and data offsets of one tensor, checked for form."""
    problem = ""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        problem = "has not exactly dtype, shape and data_offsets"
    elif not isinstance(entry["dtype"], str) or entry["dtype"] not in _FROM_FILE:
        problem = f"has dtype {entry['dtype']!r}; one of {sorted(_FROM_FILE)} is needed"
    elif not _is_counts(entry["shape"]) or not 1 <= len(entry["shape"]) <= 4:
        problem = f"has shape {entry['shape']!r}"
    elif not _is_counts(entry["data_offsets"]) or len(entry["data_offsets"]) != 2:
        problem = f"has data_offsets {entry['data_offsets']!r}"
    if problem:
        raise ArtifactError(f"{where}: tensor {name!r} {problem}")
    begin, stop = entry["data_offsets"]
    return _FROM_FILE[entry["dtype"]], tuple(entry["shape"]), begin, stop


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 48 for item in value)
