"""``.params``: the named arrays that MXNet's ``nd.save`` writes, up to MXNet 1.9 (``src/ndarray/ndarray.cc`` there).

All numbers are little-endian. The file is u64 0x112, u64 0, u64 count, the arrays, u64 count, and for each array u64
length and the bytes of its name. An array of versions 2 and 3 is

    u32 magic, i32 storage type, i32 rank, i64 sizes[rank], i32 device kind, i32 device, i32 dtype, elements

Version 1 has no storage type. The oldest form has no magic either: the rank stands in its place, and sizes are u32.
"""

from __future__ import annotations

import math
import struct
from functools import partial
from typing import Any

import numpy as np

from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers.files import MappedFile, quote, refuse_pointer
from encast.importers.weights import DTYPES, StoredTensor

__all__ = ["read_params"]

_LIST_MAGIC = 0x112
_V1, _V2, _V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
_MAX_RANK = 32
_MAX_ARRAYS = 4096
_LONGEST_NAME = 256
_SMALLEST_ARRAY = 21
"""Bytes of the oldest form with rank 1 and one element of one byte."""

_DTYPES = ("F32", "F64", "F16", "U8", "I32", "I8", "I64", "BOOL", "I16", "U16", "U32", "U64", "BF16")
"""By MXNet's number (mshadow's ``TypeFlag``)."""
_SPARSE = {1: "row_sparse", 2: "csr"}


class _Cursor:
    """A place in the file that moves on with what is read, and never behind the end."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.at = 0

    @property
    def left(self) -> int:
        return self.file.size - self.at

    def skip(self, size: int, what: str) -> int:
        """Moves over ``size`` bytes and returns where they start."""
        if size > self.left:
            raise CheckpointError(
                f"{self.file.path}: {what} needs {size} bytes at byte {self.at}, but {self.left} follow; the file is "
                "truncated or damaged, so fetch it again"
            )
        start, self.at = self.at, self.at + size
        return start

    def numbers(self, form: str, what: str) -> tuple[int, ...]:
        start = self.skip(struct.calcsize("<" + form), what)
        return struct.unpack_from("<" + form, self.file.bytes, start)

    def number(self, form: str, what: str) -> int:
        return self.numbers(form, what)[0]


def read_params(file: MappedFile) -> dict[str, StoredTensor]:
    """The arrays of a file by the names that stand in it, every size checked against the file's.

    Raises ``CheckpointError`` for what is damaged, and ``UnsupportedModelError`` for sparse arrays and unknown dtypes.
    """
    where = str(file.path)
    refuse_pointer(file.bytes[:32], where)
    if file.bytes[:4] == b"PK\x03\x04":
        raise UnsupportedModelError(
            f"{where}: a zip archive, as MXNet 2 and GluonNLP 1 write; files of MXNet 1 (nd.save, save_parameters, "
            "export) are read"
        )
    cursor = _Cursor(file)
    magic, _ = cursor.numbers("QQ", "the header")
    if magic != _LIST_MAGIC:
        raise CheckpointError(f"{where}: does not start with 0x112; this is not a file of MXNet's nd.save")
    count = _count(cursor, "arrays", _SMALLEST_ARRAY)
    arrays = [_read_array(cursor, f"array {index}") for index in range(count)]
    named = _count(cursor, "names", 8)
    if named != count:
        hint = "; it was saved from a list: save a dict, as save_parameters does" if named == 0 else ""
        raise CheckpointError(f"{where}: has {count} arrays and {named} names{hint}")
    tensors: dict[str, StoredTensor] = {}
    for array in arrays:
        name = _read_name(cursor)
        if name in tensors:
            raise CheckpointError(f"{where}: two arrays are named {quote(name)}; the file is damaged")
        tensors[name] = array
    if cursor.left:
        raise CheckpointError(f"{where}: {cursor.left} bytes follow the last name and belong to nothing")
    return tensors


def _count(cursor: _Cursor, what: str, smallest: int) -> int:
    count = cursor.number("Q", f"the number of {what}")
    if count > _MAX_ARRAYS or count * smallest > cursor.left:
        raise CheckpointError(
            f"{cursor.file.path}: says that {count} {what} follow, and {cursor.left} bytes do (at most {_MAX_ARRAYS} "
            f"{what} are read); the file is truncated or damaged, so fetch it again"
        )
    return count


def _read_array(cursor: _Cursor, what: str) -> StoredTensor:
    where = f"{cursor.file.path}: {what}"
    magic = cursor.number("I", what)
    if magic in (_V2, _V3):
        storage = cursor.number("i", what)
        if storage != 0:
            kind = _SPARSE.get(storage, f"storage type {storage}")
            raise UnsupportedModelError(
                f"{where} is stored as {kind}; dense arrays are read: convert it with tostype('default')"
            )
    if magic in (_V1, _V2, _V3):
        rank, size = cursor.number("i", what), "q"
    elif magic <= _MAX_RANK:
        rank, size = magic, "I"
    else:
        raise CheckpointError(f"{where} starts with {magic:#x}, which begins no array; the file is damaged")
    if rank > _MAX_RANK:
        raise CheckpointError(f"{where} says that it has {rank} dimensions, at most {_MAX_RANK} are read")
    shape = cursor.numbers(size * max(rank, 0), what)
    if rank < 1 or min(shape) < 1:
        # Since version 3 shapes are NumPy's, where unknown sizes are -1.
        empty = magic == _V3 and rank >= 0 and min(shape, default=0) >= 0
        reason = (
            "which no parameter of a model has"
            if empty
            else "and no values; it was saved before the model saw its first input"
        )
        raise CheckpointError(f"{where} has the shape {list(shape)}, {reason}")
    _, _, flag = cursor.numbers("iii", what)
    if not 0 <= flag < len(_DTYPES):
        raise UnsupportedModelError(f"{where} has dtype number {flag}; known are {dict(enumerate(_DTYPES))}")
    dtype = _DTYPES[flag]
    start = cursor.skip(math.prod(shape) * DTYPES[dtype].itemsize, f"{what}, {dtype}{list(shape)},")
    return StoredTensor(dtype, shape, str(cursor.file.path), partial(_elements, cursor.file, dtype, start, shape))


def _elements(file: MappedFile, dtype: str, offset: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return file.elements(DTYPES[dtype], offset, math.prod(shape)).reshape(shape)


def _read_name(cursor: _Cursor) -> str:
    length = cursor.number("Q", "a name's length")
    if length > _LONGEST_NAME:
        raise CheckpointError(
            f"{cursor.file.path}: says that a name has {length} bytes, at most {_LONGEST_NAME} are read; the file is "
            "damaged"
        )
    start = cursor.skip(length, "a name")
    try:
        return cursor.file.bytes[start : start + length].decode("utf-8")
    except UnicodeDecodeError:
        raise CheckpointError(f"{cursor.file.path}: a name at byte {start} is not UTF-8; the file is damaged") from None
