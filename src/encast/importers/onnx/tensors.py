"""Tensors of an ONNX file: in the message itself, or in a file beside it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers.files import Folder, quote
from encast.importers.protobuf import Bytes, fields, integer, message, text, varint

__all__ = ["DTYPES", "OnnxTensor", "bounded", "narrowed", "numbers_of", "read_tensor", "rounding_of"]

DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<f4"),
    2: np.dtype("u1"),
    3: np.dtype("i1"),
    5: np.dtype("<i2"),
    6: np.dtype("<i4"),
    7: np.dtype("<i8"),
    9: np.dtype("?"),
    10: np.dtype("<f2"),
    11: np.dtype("<f8"),
}
"""TensorProto.DataType → how elements lie in a file."""
_BFLOAT16 = 16
_ROUNDINGS = {10: 2.0**-11, _BFLOAT16: 2.0**-8}
"""Of the types of 16 bits: how far a number may be from the one that it was rounded from, relative to that."""

_MOST_DIMS = 8
_MOST_ELEMENTS = 1 << 40
_MOST_NUMBERS = 1 << 20
"""Numbers that are not raw bytes cost far more memory than they have bytes in the file."""
_FLOAT32 = 1
_FLOAT, _INT32, _INT64, _DOUBLE = 4, 5, 7, 10
_TYPED: dict[int, np.dtype[Any]] = {_FLOAT: np.dtype("<f4"), _DOUBLE: np.dtype("<f8")}


@dataclass(frozen=True)
class OnnxTensor:
    """``array()`` gives the elements, a view of the file where they lie in it as they are; bf16 becomes f32.

    ``rounding``: that of ``rounding_of`` its type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    array: Callable[[], np.ndarray[Any, Any]]
    rounding: float = 0.0


def rounding_of(kind: Any) -> float:
    """How far, relatively, numbers of a type of 16 bits may be from what they were rounded from; 0 for other types."""
    return _ROUNDINGS.get(kind, 0.0) if isinstance(kind, int) else 0.0


def narrowed(array: np.ndarray[Any, Any], kind: Any) -> np.ndarray[Any, Any]:
    """What Cast to the data type ``kind`` makes of an array; bf16 stays f32, with the numbers of bf16."""
    if kind != _BFLOAT16:
        return array.astype(DTYPES[kind])
    wide = array.astype(np.float32)
    bits = wide.view(np.uint32)
    # To the nearest, and of two to the even one; what is no number stays none.
    even = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.asarray(np.where(np.isnan(wide), wide, even.view(np.float32)))


def _widened(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """bf16 as f32: the upper half of its bits."""
    return np.asarray((array.astype(np.uint32) << np.uint32(16)).view(np.float32))


def read_tensor(data: Bytes, folder: Folder | None, where: str) -> OnnxTensor:
    """Checks that shape, dtype and bytes fit each other. ``folder``: where a file beside may lie, None if none may."""
    shape: list[int] = []
    kind, name, location = 0, "", 0
    raw: Bytes | None = None
    typed: dict[int, list[Any]] = {}
    external: dict[str, str] = {}
    for number, value in fields(data):
        if number == 1:
            bounded(shape, numbers_of(value), where)
        elif number == 2:
            kind = integer(value)
        elif number == 3:
            raise UnsupportedModelError(f"{where}: a tensor in segments, which no exporter writes")
        elif number in _TYPED:
            typed.setdefault(number, []).append(message(value))
        elif number in (_INT32, _INT64):
            bounded(typed.setdefault(number, []), numbers_of(value), where)
        elif number == 8:
            name = text(value)
        elif number == 9:
            raw = message(value)
        elif number == 13:
            pair = {key: text(item) for key, item in fields(message(value))}
            external[pair.get(1, "")] = pair.get(2, "")
        elif number == 14:
            location = integer(value)
    at = f"{where}: the tensor {quote(name)}"
    if kind not in DTYPES and kind != _BFLOAT16:
        raise UnsupportedModelError(
            f"{at} has data type {kind}; f32, f64, f16, bf16, integers and booleans are read: export the model in f32"
        )
    dtype = DTYPES[kind] if kind in DTYPES else np.dtype("<u2")
    if len(shape) > _MOST_DIMS or any(dim < 0 for dim in shape) or math.prod(shape) > _MOST_ELEMENTS:
        raise CheckpointError(f"{at} has shape {shape[:20]}; the file is damaged")
    count = math.prod(shape)
    nbytes = count * dtype.itemsize
    array: Callable[[], np.ndarray[Any, Any]]
    if location == 1:
        array = _external(external, nbytes, dtype, folder, at)
    elif raw is not None:
        if len(raw) != nbytes:
            raise CheckpointError(f"{at} has {len(raw)} bytes; its shape {shape} and dtype {dtype} ask for {nbytes}")
        array = partial(_view, raw, dtype)
    else:
        values = _typed_values(typed, dtype, at)
        if values.size != count:
            raise CheckpointError(f"{at} has {values.size} elements; its shape {shape} asks for {count}")
        array = partial(np.asarray, values)
    final = tuple(shape)
    if kind == _BFLOAT16:
        halves = array
        array, dtype = lambda: _widened(halves()), DTYPES[_FLOAT32]
    return OnnxTensor(name, final, dtype, lambda: array().reshape(final), rounding_of(kind))


def _view(data: Bytes, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    held: Any = data
    array: np.ndarray[Any, Any] = np.frombuffer(held, dtype)
    return array


def numbers_of(value: int | Bytes) -> Iterator[int]:
    """int64s, one or packed."""
    if isinstance(value, int):
        yield value - (1 << 64) if value >= 1 << 63 else value
        return
    position = 0
    while position < len(value):
        number, position = varint(value, position)
        yield number - (1 << 64) if number >= 1 << 63 else number


def bounded(numbers: list[Any], more: Iterable[Any], where: str) -> None:
    """Adds ``more`` to ``numbers``, one by one and no more than a file may hold."""
    for number in more:
        if len(numbers) == _MOST_NUMBERS:
            raise UnsupportedModelError(
                f"{where}: more than {_MOST_NUMBERS} numbers one by one, which no exporter writes"
            )
        numbers.append(number)


def _typed_values(typed: dict[int, list[Any]], dtype: np.dtype[Any], at: str) -> np.ndarray[Any, Any]:
    if len(typed) > 1:
        raise CheckpointError(f"{at} has its elements in several forms; the file is damaged")
    if not typed:
        return np.empty(0, dtype)
    number, parts = next(iter(typed.items()))
    fitting = {_FLOAT: "f4", _DOUBLE: "f8", _INT64: "i8"}.get(number)
    if fitting is not None and dtype != np.dtype(f"<{fitting}"):
        raise CheckpointError(f"{at} is {dtype} and has elements of another type; the file is damaged")
    if number in _TYPED:
        return np.frombuffer(b"".join(bytes(part) for part in parts), _TYPED[number])
    if number == _INT32 and dtype == np.dtype("<f2"):
        return np.array([part & 0xFFFF for part in parts], np.uint16).view(np.float16)
    try:
        return np.array(parts, np.int64).astype(dtype)
    except OverflowError:
        raise CheckpointError(f"{at} has an element beyond 64 bits; the file is damaged") from None


def _external(
    entries: dict[str, str], nbytes: int, dtype: np.dtype[Any], folder: Folder | None, at: str
) -> Callable[[], np.ndarray[Any, Any]]:
    name = entries.get("location", "")
    parts = PurePosixPath(name).parts
    if folder is None or len(parts) != 1 or "\\" in name or "\0" in name or parts[0] in ("..", "."):
        raise CheckpointError(
            f"{at} lies in {quote(name)}; weights may lie in a file beside the model, in the same folder"
        )
    name = parts[0]  # without the "./" that some exporters put before it
    if not folder.has(name):
        raise CheckpointError(f"{at} lies in {quote(name)}, which is not in {folder.root}; copy it there")
    home = os.path.realpath(folder.root)
    if os.path.commonpath([home, os.path.realpath(folder.path(name))]) != home:
        raise CheckpointError(f"{at} lies in {quote(name)}, a link out of the model's folder; copy the file there")
    try:
        offset, length = int(entries.get("offset", "0")), int(entries.get("length", str(nbytes)))
    except ValueError:
        raise CheckpointError(f"{at} has no numbers for its place in {quote(name)}; the file is damaged") from None
    mapped = folder.map(name)
    if length != nbytes or offset < 0 or offset + nbytes > mapped.size:
        raise CheckpointError(
            f"{at} is said to be bytes {offset} to {offset + length} of {quote(name)} with {mapped.size}; its shape "
            f"and dtype ask for {nbytes}: the files do not belong together, or the copy is incomplete"
        )
    return lambda: mapped.elements(dtype, offset, nbytes // dtype.itemsize)
