"""HDF5's datasets as stored tensors: element type, shape, and where the elements lie.

"HDF5 File Format Specification Version 3.0", IV.A.2.b (dataspace), d (datatype) and i (data layout). What Keras writes
is read: numbers, in one piece. Everything else is refused by its name.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from encast.errors import UnsupportedModelError
from encast.importers.files import MappedFile
from encast.importers.hdf5_bytes import UNDEFINED, Hdf5Bytes
from encast.importers.hdf5_objects import Message
from encast.importers.weights import DTYPES, StoredTensor

__all__ = ["Dataset", "is_dataset", "read_dataset"]

_DATASPACE, _DATATYPE, _EXTERNAL, _LAYOUT, _FILTERS = 0x01, 0x03, 0x07, 0x08, 0x0B
_MAX_RANK = 32

# Offset and precision in bits; place and size of exponent and mantissa; bias.
_FLOATS = {
    (2, 0, 16, 10, 5, 0, 10, 15): "F16",
    (2, 0, 16, 7, 8, 0, 7, 127): "BF16",
    (4, 0, 32, 23, 8, 0, 23, 127): "F32",
    (8, 0, 64, 52, 11, 0, 52, 1023): "F64",
}
_INTEGERS = {
    (1, False): "U8", (1, True): "I8", (2, False): "U16", (2, True): "I16",
    (4, False): "U32", (4, True): "I32", (8, False): "U64", (8, True): "I64",
}  # fmt: skip
_CLASSES = {
    2: "times", 3: "strings", 4: "bit fields", 6: "records", 7: "references", 9: "values of any length", 10: "arrays",
    11: "complex numbers",
}  # fmt: skip
_FIXED, _FLOAT, _OPAQUE, _ENUM = 0, 1, 5, 8
_CONTIGUOUS = 1
_LAYOUTS = {0: "compact, within the header", 2: "in chunks", 3: "virtual, of other datasets"}
_FILTER_NAMES = {
    1: "gzip", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scale-offset", 32000: "lzf", 32001: "blosc",
    32015: "zstd",
}  # fmt: skip


@dataclass(frozen=True)
class Dataset:
    """``begin`` and ``end`` are the bytes of its elements in the file, equal where it has none."""

    tensor: StoredTensor
    begin: int
    end: int


def is_dataset(messages: Sequence[Message]) -> bool:
    """Whether they are of a dataset: they say where its elements lie."""
    return any(message.kind == _LAYOUT for message in messages)


def read_dataset(data: Hdf5Bytes, messages: Sequence[Message], what: str) -> Dataset:
    """The dataset of these messages, which ``what`` names; its elements are not touched.

    Raises ``CheckpointError`` for what is damaged, ``UnsupportedModelError`` for forms that Keras does not write.
    """
    contents = {
        message.kind: message.content(data, what)
        for message in messages
        if message.kind in (_DATASPACE, _DATATYPE, _LAYOUT, _FILTERS)
    }
    if any(message.kind == _EXTERNAL for message in messages):
        raise UnsupportedModelError(f"{data.where}: the elements of {what} lie in other files, which are not opened")
    if _DATASPACE not in contents or _DATATYPE not in contents:
        data.fail(f"{what} has no shape or no type")
    dtype = _dtype(data, contents[_DATATYPE], what)
    shape = _shape(data, contents[_DATASPACE], what)
    size = math.prod(shape) * DTYPES[dtype].itemsize
    address, stored = _place(data, contents[_LAYOUT], contents.get(_FILTERS, b""), what)
    if size and address == UNDEFINED:
        data.fail(f"{what} has the shape {list(shape)} and no elements, so it was never written")
    if stored != size:
        data.fail(f"{what}, {dtype}{list(shape)}, needs {size} bytes and has {stored}")
    if size:
        data.take(address + size, 0, what)
    else:
        address = 0
    elements = partial(_elements, data.file, dtype, address, shape)
    return Dataset(StoredTensor(dtype, shape, data.where, elements), address, address + size)


def _elements(file: MappedFile, dtype: str, offset: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return file.elements(DTYPES[dtype], offset, math.prod(shape)).reshape(shape)


def _shape(data: Hdf5Bytes, content: bytes, what: str) -> tuple[int, ...]:
    if len(content) < 4 or content[0] not in (1, 2):
        data.fail(f"the shape of {what} has a form that is not known (version {content[0] if content else 'none'})")
    version, rank, _, kind = content[:4]
    if version == 2 and kind == 2:
        raise UnsupportedModelError(f"{data.where}: {what} has no elements (a null dataspace); a tensor is needed")
    at = 8 if version == 1 else 4
    if rank > _MAX_RANK or len(content) < at + 8 * rank:
        data.fail(f"{what} has {rank} dimensions, more than are stored or than {_MAX_RANK}")
    shape = struct.unpack_from(f"<{rank}Q", content, at)
    if math.prod(filter(None, shape)) >= 2**60:
        data.fail(f"the shape {list(shape)} of {what} has more elements than memory can hold")
    return shape


def _dtype(data: Hdf5Bytes, content: bytes, what: str) -> str:
    if len(content) < 8:
        data.fail(f"{what} has no type")
    kind, bits = content[0] & 15, int.from_bytes(content[1:4], "little")
    (size,) = struct.unpack_from("<I", content, 4)
    found = _CLASSES.get(kind, f"a type of class {kind}")
    if kind in (_FIXED, _FLOAT) and bits & 1:
        raise UnsupportedModelError(f"{data.where}: {what} is big-endian; little-endian numbers are read")
    if kind == _FIXED:
        found = f"integers of {size} bytes"
        if (size, bool(bits & 8)) in _INTEGERS and content[8:12] == struct.pack("<HH", 0, 8 * size):
            return _INTEGERS[size, bool(bits & 8)]
    if kind == _FLOAT and len(content) >= 20:
        found = f"floating-point numbers of {size} bytes"
        dtype = _FLOATS.get((size, *struct.unpack_from("<HHBBBBI", content, 8)))
        # Sign in the last bit, and a leading one that is not stored (bits 4 and 5).
        if dtype is not None and bits >> 8 & 0xFF == 8 * size - 1 and bits >> 4 & 3 == 2:
            return dtype
    if kind == _OPAQUE:
        found = f"{size} bytes without a meaning"
        if size == 2:  # so h5py stores bfloat16, which NumPy has no name for
            return "BF16"
    if kind == _ENUM and size == 1:  # so h5py stores truth values
        return "BOOL"
    raise UnsupportedModelError(f"{data.where}: {what} has {found}; integers, F16, BF16, F32 and F64 are read")


def _place(data: Hdf5Bytes, content: bytes, filters: bytes, what: str) -> tuple[int, int]:
    """Address and size of the elements."""
    version, kind = content[:2] if len(content) >= 2 else (0, 0)
    if version not in (3, 4, 5):
        raise UnsupportedModelError(
            f"{data.where}: {what} is laid out in version {version}, and 3 to 5 are read; copy the file by h5repack"
        )
    if kind != _CONTIGUOUS:
        used = _filters(filters)
        raise UnsupportedModelError(
            f"{data.where}: {what} is stored {_LAYOUTS.get(kind, f'in layout {kind}')}"
            f"{', with ' + ' and '.join(used) if used else ''}; it is read in one piece, as Keras writes it: "
            "`h5repack -l CONTI -f NONE OLD NEW` does that"
        )
    if len(content) < 18:
        data.fail(f"{what} does not say where its elements are")
    return struct.unpack_from("<QQ", content, 2)


def _filters(content: bytes) -> list[str]:
    """The names of the filters in a message, as far as it is well formed."""
    version, count = content[:2] if len(content) >= 2 else (0, 0)
    at = 8 if version == 1 else 2
    names: list[str] = []
    for _ in range(min(count, 32)):
        if version not in (1, 2) or at + 8 > len(content):
            break
        (number,) = struct.unpack_from("<H", content, at)
        named = version == 1 or number >= 256
        length = int.from_bytes(content[at + 2 : at + 4], "little") if named else 0
        values = int.from_bytes(content[at + 6 : at + 8] if named else content[at + 4 : at + 6], "little")
        names.append(_FILTER_NAMES.get(number, f"filter {number}"))
        padded = values + values % 2 if version == 1 else values
        at += (8 if named else 6) + length + 4 * padded
    return names
