"""TensorFlow's checkpoints (V2, "tensor bundles"): ``PREFIX.index`` and ``PREFIX.data-00000-of-0000N``.

The index is a table (``table_file``) from variable names to ``BundleEntryProto``, and from "" to ``BundleHeaderProto``
(``tensorflow/core/protobuf/tensor_bundle.proto``); the tensors' bytes lie in the data files. Ranges and shapes are
validated on opening, and a tensor's CRC-32C when its elements are first asked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers.crc32c import crc32c, unmask
from encast.importers.files import Folder, MappedFile, quote, refuse_pointer
from encast.importers.protobuf import MALFORMED, Bytes, fields, integer, message
from encast.importers.table_file import read_table
from encast.importers.weights import DTYPES, StoredTensor

__all__ = ["DATA_FILE", "read_bundle", "shape_dims"]

DATA_FILE = re.compile(r"([^/]+)\.data-\d{5}-of-\d{5}")
"""A data file's name, which begins with its checkpoint's prefix."""

_DTYPES = {
    1: "F32", 2: "F64", 3: "I32", 4: "U8", 5: "I16", 6: "I8", 9: "I64", 10: "BOOL", 14: "BF16", 17: "U16", 19: "F16",
    22: "U32", 23: "U64",
}  # fmt: skip
"""``DataType`` of ``types.proto`` → our names."""

_NO_DTYPES = {0: "none", 7: "DT_STRING", 20: "DT_RESOURCE", 21: "DT_VARIANT"}
_VERSION = 1
_MAX_RANK = 32
_INDEX_LIMIT = 16 << 20
"""Bytes that an index may have; that of BERT-large with its optimiser has 100 kB."""
_OBJECTS = b"_CHECKPOINTABLE_OBJECT_GRAPH"
_SLICE = b"\0"
"""How the keys of a partitioned variable's slices begin (``EncodeTensorNameSlice``)."""


@dataclass(frozen=True)
class _Entry:
    """``BundleEntryProto``."""

    dtype: int = 0
    shape: tuple[int, ...] = ()
    shard: int = 0
    offset: int = 0
    size: int = 0
    crc: int = 0
    slices: int = 0


@dataclass
class _Elements:
    """The elements of a tensor, called for when they are needed; the checksum is compared once."""

    file: MappedFile
    entry: _Entry
    which: str
    checked: bool = field(default=False, init=False)

    def __call__(self) -> np.ndarray[Any, Any]:
        entry = self.entry
        if not self.checked:
            if crc32c(self.file.elements(np.dtype(np.uint8), entry.offset, entry.size)) != unmask(entry.crc):
                raise CheckpointError(
                    f"{self.which}: its bytes do not have the checksum that the index gives; the file is damaged, "
                    "fetch it again"
                )
            self.checked = True
        dtype = DTYPES[_DTYPES[entry.dtype]]
        return self.file.elements(dtype, entry.offset, math.prod(entry.shape)).reshape(entry.shape)


def read_bundle(folder: Folder, prefix: str) -> dict[str, StoredTensor]:
    """The variables of a checkpoint by name, validated against the sizes of its files.

    Raises ``CheckpointError`` when files are missing, damaged or contradict each other, and ``UnsupportedModelError``
    for a checkpoint of another form: objects (Keras), partitioned variables, big-endian.
    """
    where = str(folder.path(f"{prefix}.index"))
    data = folder.read(f"{prefix}.index", _INDEX_LIMIT)
    refuse_pointer(data, where)
    try:
        table = read_table(data)
        shards = _shards(table.pop(b"", None), where)
        if _OBJECTS in table:
            raise UnsupportedModelError(
                f"{where}: a checkpoint of objects (tf.train.Checkpoint, Keras), whose names depend on the program; "
                "encast reads checkpoints of names, which tf.compat.v1.train.Saver and Estimator write"
            )
        entries = {key: _entry(value) for key, value in table.items() if not key.startswith(_SLICE)}
    except MALFORMED as error:
        raise CheckpointError(
            f"{where}: not the index of a TensorFlow checkpoint, or a damaged one ({error}); fetch it again"
        ) from None
    tensors: dict[str, StoredTensor] = {}
    ranges: dict[int, list[tuple[int, int, str]]] = {}
    for key, entry in entries.items():
        name = key.decode("utf-8", "backslashreplace")
        tensors[name] = _stored(folder, prefix, shards, name, entry)
        ranges.setdefault(entry.shard, []).append((entry.offset, entry.offset + entry.size, name))
    for places in ranges.values():
        _check_apart(sorted(places), where)
    return tensors


def _shards(header: bytes | None, where: str) -> int:
    """How many data files there are, by ``BundleHeaderProto``."""
    if header is None:
        raise ValueError("it has no header")
    shards = 0
    for number, value in fields(header):
        if number == 1:
            shards = integer(value)
        elif number == 2 and integer(value) != 0:
            raise UnsupportedModelError(f"{where}: written on a big-endian machine, which is not read; save it again")
        elif number == 3:
            for inner, version in fields(message(value)):
                if inner == 2 and integer(version) > _VERSION:
                    raise UnsupportedModelError(f"{where}: version {integer(version)}; version {_VERSION} is read")
    if not 1 <= shards < 1 << 31:
        raise ValueError(f"it says that it has {shards} data files")
    return shards


def _entry(data: bytes) -> _Entry:
    numbers = {1: 0, 3: 0, 4: 0, 5: 0}
    shape: list[int] = []
    crc = slices = 0
    for number, value in fields(data):
        if number in numbers:
            numbers[number] = integer(value)
        elif number == 2:
            for size in shape_dims(value):
                shape.append(size)
                if len(shape) > _MAX_RANK:
                    raise ValueError(f"a shape of more than {_MAX_RANK} dimensions")
        elif number == 6:
            crc = int.from_bytes(message(value)[:4], "little")
        elif number == 7:
            slices += 1
    return _Entry(numbers[1], tuple(shape), numbers[3], numbers[4], numbers[5], crc, slices)


def shape_dims(shape: int | Bytes) -> Iterator[int]:
    """The sizes of a ``TensorShapeProto``; unknown ones are 2^64 - 1. Raises what ``MALFORMED`` has."""
    for number, value in fields(message(shape)):
        if number == 2:
            yield next((integer(size) for inner, size in fields(message(value)) if inner == 1), 0)


def _stored(folder: Folder, prefix: str, shards: int, name: str, entry: _Entry) -> StoredTensor:
    which = f"{folder.path(prefix)}: variable {quote(name)}"
    if entry.dtype not in _DTYPES:
        raise CheckpointError(
            f"{which}: its dtype is {_NO_DTYPES.get(entry.dtype, f'number {entry.dtype}')}, which is not read; "
            "save the model's variables alone, as numbers"
        )
    if entry.slices:
        raise UnsupportedModelError(
            f"{which}: partitioned into {entry.slices} slices, which are not joined; load it in TensorFlow without a "
            "partitioner and save it again"
        )
    dtype = _DTYPES[entry.dtype]
    if math.prod(filter(None, entry.shape)) >= 2**63:
        raise CheckpointError(f"{which}: its shape {list(entry.shape)} has more elements than 64 bits count")
    count = math.prod(entry.shape)
    if count * DTYPES[dtype].itemsize != entry.size:
        raise CheckpointError(
            f"{which}: {dtype}{list(entry.shape)} needs {count * DTYPES[dtype].itemsize} bytes, the index gives it "
            f"{entry.size}; the index is damaged"
        )
    if entry.shard >= shards:
        raise CheckpointError(f"{which}: said to lie in data file {entry.shard} of {shards}, counted from 0")
    shard = f"{prefix}.data-{entry.shard:05d}-of-{shards:05d}"
    if not folder.has(shard):
        raise CheckpointError(f"{which}: its file {quote(shard)} is missing; the download did not finish")
    file = folder.map(shard)
    refuse_pointer(file.bytes[:32], str(file.path))
    if entry.offset + entry.size > file.size:
        raise CheckpointError(
            f"{which}: its bytes {entry.offset} to {entry.offset + entry.size} lie outside of {quote(shard)}, which "
            f"has {file.size}; the file is truncated or damaged, so fetch it again"
        )
    return StoredTensor(dtype, entry.shape, str(file.path), _Elements(file, entry, which))


def _check_apart(places: list[tuple[int, int, str]], where: str) -> None:
    reached, previous = 0, ""
    for begin, end, name in places:
        if begin < reached and begin < end:
            raise CheckpointError(f"{where}: the bytes of variables {quote(previous)} and {quote(name)} overlap")
        if end > reached:
            reached, previous = end, name
