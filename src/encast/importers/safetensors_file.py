"""The safetensors format: 8 bytes of header length, a JSON header, and the tensors' bytes.

The header is parsed and validated here rather than by the ``safetensors`` package, so that
each way in which a file can lie gets its own message and no tensor is touched on opening.
The rules are the format's own (its README, "Format"): ranges cover the data without overlap
or hole, and the header has at most 100 MB.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from encast.errors import CheckpointError
from encast.importers.files import MappedFile, parse_json, quote, refuse_pointer
from encast.importers.weights import DTYPES, StoredTensor

__all__ = ["parse_header", "read_safetensors"]

HEADER_LIMIT = 100_000_000
_MAX_RANK = 32
_FIELDS = {"dtype", "shape", "data_offsets"}


def read_safetensors(file: MappedFile) -> dict[str, StoredTensor]:
    """The tensors of a file, validated against its size; raises ``CheckpointError``."""
    where = str(file.path)
    head = file.bytes[:8]
    if len(head) < 8:
        raise CheckpointError(f"{where}: {file.size} bytes; a safetensors file starts with 8 bytes of header length")
    refuse_pointer(file.bytes[:32], where)
    length = int.from_bytes(head, "little")
    if length > HEADER_LIMIT:
        raise CheckpointError(
            f"{where}: says that its header has {length} bytes, the format allows {HEADER_LIMIT}; "
            "this is not a safetensors file or it is damaged"
        )
    if length > file.size - 8:
        raise CheckpointError(
            f"{where}: says that its header has {length} bytes, but {file.size - 8} follow; "
            "the file is truncated or damaged, so fetch it again"
        )
    start = 8 + length
    ranges = parse_header(file.bytes[8:start], file.size - start, where)
    return {
        name: StoredTensor(dtype, shape, where, partial(_elements, file, DTYPES[dtype], start + begin, shape))
        for name, (dtype, shape, begin) in ranges.items()
    }


def _elements(file: MappedFile, dtype: np.dtype[Any], offset: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return file.elements(dtype, offset, math.prod(shape)).reshape(shape)


def parse_header(header: bytes, data_size: int, where: str) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Name → (dtype, shape, first byte within the data) of a header whose data has ``data_size`` bytes."""
    if not header.startswith(b"{"):
        raise CheckpointError(f"{where}: the header does not start with '{{'; this is not a safetensors file")
    entries = parse_json(header, f"{where} (header)")
    if not isinstance(entries, dict):
        raise CheckpointError(f"{where}: the header is not a JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{where}: __metadata__ must be an object of strings")
    tensors: dict[str, tuple[str, tuple[int, ...], int]] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, entry in entries.items():
        dtype, shape, begin, end = _parse_entry(entry, f"{where}: tensor {quote(name)}", data_size)
        tensors[name] = (dtype, shape, begin)
        ranges.append((begin, end, name))
    _check_cover(sorted(ranges), data_size, where)
    return tensors


def _parse_entry(entry: Any, which: str, data_size: int) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or set(entry) != _FIELDS:
        raise CheckpointError(f"{which}: its entry must be an object of exactly {', '.join(sorted(_FIELDS))}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{which}: unknown dtype {quote(dtype)}; known are {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > _MAX_RANK or not all(_is_size(size) for size in shape):
        raise CheckpointError(f"{which}: its shape must be a list of at most {_MAX_RANK} integers from 0 to 2^63 - 1")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise CheckpointError(f"{which}: data_offsets must be two integers from 0 to 2^63 - 1")
    begin, end = offsets
    if begin > end:
        raise CheckpointError(f"{which}: data_offsets {begin} to {end} run backwards")
    if end > data_size:
        raise CheckpointError(
            f"{which}: its bytes {begin} to {end} lie outside of the {data_size} that the file holds; "
            "the file is truncated or damaged, so fetch it again"
        )
    count = math.prod(shape)
    if math.prod(size for size in shape if size) >= 2**63:
        raise CheckpointError(f"{which}: its shape {shape} has more elements than 64 bits count")
    if count * DTYPES[dtype].itemsize != end - begin:
        raise CheckpointError(
            f"{which}: {dtype}{shape} needs {count * DTYPES[dtype].itemsize} bytes, its range has {end - begin}"
        )
    return dtype, tuple(shape), begin, end


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _check_cover(ranges: list[tuple[int, int, str]], data_size: int, where: str) -> None:
    reached, previous = 0, ""
    for begin, end, name in ranges:
        if begin < reached:
            raise CheckpointError(f"{where}: the bytes of tensors {quote(previous)} and {quote(name)} overlap")
        if begin > reached:
            raise CheckpointError(
                f"{where}: bytes {reached} to {begin}, before tensor {quote(name)}, belong to no tensor"
            )
        reached, previous = end, name
    if reached != data_size:
        raise CheckpointError(f"{where}: the last {data_size - reached} bytes belong to no tensor")
