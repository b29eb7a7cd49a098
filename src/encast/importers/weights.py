"""Tensors of a checkpoint, read when asked for.

The readers of the file formats validate ranges and shapes when a checkpoint is opened and
hand over ``StoredTensor``s; this module turns their elements into what architectures use.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from encast.errors import CheckpointError
from encast.importers.files import quote

__all__ = ["DTYPES", "WEIGHT_DTYPES", "StoredTensor", "TensorSource", "agreeing", "changed", "transposed"]

DTYPES: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # bit patterns; NumPy has no bfloat16
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("u1"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
}
"""Dtype names of the safetensors format → how their elements lie in a file."""

WEIGHT_DTYPES = ("F32", "F16", "BF16", "F64")
INTEGER_DTYPES = ("I64", "I32", "I16", "I8", "U32", "U16", "U8", "BOOL")

_SEARCH_CHUNK = 1 << 20


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: a key of ``DTYPES``, its shape, the file, and how to get at the elements.

    ``elements()`` gives an array of the shape and of dtype ``DTYPES[dtype]``, a view where possible.
    """

    dtype: str
    shape: tuple[int, ...]
    where: str
    elements: Callable[[], np.ndarray[Any, Any]]


def changed(
    tensor: StoredTensor, shape: tuple[int, ...], change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]
) -> StoredTensor:
    """The tensor with ``change`` made to its elements when they are asked for, which gives them ``shape``."""
    return StoredTensor(tensor.dtype, shape, tensor.where, partial(_change, tensor.elements, change))


def _change(
    elements: Callable[[], np.ndarray[Any, Any]], change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]
) -> np.ndarray[Any, Any]:
    return change(elements())


def transposed(tensor: StoredTensor) -> StoredTensor:
    return changed(tensor, tensor.shape[::-1], np.transpose)


def agreeing(one: StoredTensor, other: StoredTensor, complaint: str) -> StoredTensor:
    """What is stored twice, in one dtype and shape. Its elements, when they are asked for, are those of ``one``; raises
    ``CheckpointError`` with the ``complaint`` then where the other ones have other bits.
    """
    return StoredTensor(one.dtype, one.shape, one.where, _Twice(one, other, complaint))


@dataclass
class _Twice:
    """Elements that are stored twice, compared once."""

    one: StoredTensor
    other: StoredTensor
    complaint: str
    compared: bool = field(default=False, init=False)

    def __call__(self) -> np.ndarray[Any, Any]:
        elements = self.one.elements()
        if not self.compared:
            bits = np.dtype(f"u{elements.dtype.itemsize}")  # as numbers, NaN would differ from itself
            if not np.array_equal(elements.view(bits), self.other.elements().view(bits)):
                raise CheckpointError(f"{self.one.where}: {self.complaint}")
            self.compared = True
        return elements


class TensorSource:
    """A read-only mapping from names to tensors that reads nothing until a tensor is asked for."""

    def __init__(self, tensors: Mapping[str, StoredTensor], where: str) -> None:
        self._tensors = dict(tensors)
        self._where = where

    @staticmethod
    def of(arrays: Mapping[str, np.ndarray[Any, Any]], where: str = "memory") -> TensorSource:
        """A source over arrays of f32, f16, f64, i64 or i32 in memory; raises ``CheckpointError`` on others."""
        names = {DTYPES[name]: name for name in ("F64", "F32", "F16", "I64", "I32")}

        def stored(name: str, array: np.ndarray[Any, Any]) -> StoredTensor:
            if array.dtype not in names:
                raise CheckpointError(
                    f"{where}: tensor {quote(name)} has dtype {array.dtype}; {list(names)} can be held"
                )
            return StoredTensor(names[array.dtype], array.shape, where, lambda: array)

        return TensorSource({name: stored(name, array) for name, array in arrays.items()}, where)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._get(name).shape

    def dtype(self, name: str) -> str:
        """The stored dtype, by its safetensors name (``F32``, ``BF16``, ...)."""
        return self._get(name).dtype

    def stored(self, name: str) -> StoredTensor:
        """The tensor as it lies in its file; raises ``CheckpointError`` when the name is absent."""
        return self._get(name)

    def f32(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The tensor as a C-contiguous ``f32[shape]`` that must not be written to.

        A view of the memory-mapped file when it is stored as aligned F32, else a converted copy (F16 and
        BF16 exactly, F64 to nearest). Raises ``CheckpointError`` when the name is absent, the dtype is not
        one of weights, or a value is NaN, infinite or beyond f32, naming the value and its index.
        """
        tensor = self._get(name)
        if tensor.dtype not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"{tensor.where}: tensor {quote(name)} is stored as {tensor.dtype}; "
                f"weights must be one of {', '.join(WEIGHT_DTYPES)}, so save the model unquantised"
            )
        stored = tensor.elements()
        if tensor.dtype == "BF16":
            bits = np.left_shift(stored, 16, dtype=np.uint32)
            values = np.ascontiguousarray(bits).view(np.float32).reshape(tensor.shape)
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                values = np.require(stored, np.float32, ["C_CONTIGUOUS", "ALIGNED"]).reshape(tensor.shape)
        self._check_finite(name, tensor, values, stored)
        values.flags.writeable = False
        return values

    def i64(self, name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
        """An integer tensor (position ids and the like) as ``i64[shape]``; raises ``CheckpointError`` on others."""
        tensor = self._get(name)
        if tensor.dtype not in INTEGER_DTYPES:
            raise CheckpointError(
                f"{tensor.where}: tensor {quote(name)} is stored as {tensor.dtype}; integers are needed"
            )
        return np.ascontiguousarray(tensor.elements(), np.int64).reshape(tensor.shape)

    def _get(self, name: str) -> StoredTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            near = difflib.get_close_matches(name, self._tensors, 3)
            hint = f"; similar names are there: {', '.join(map(quote, near))}" if near else ""
            raise CheckpointError(
                f"{self._where}: no tensor is named {quote(name)} among its {len(self._tensors)}{hint}; "
                "the checkpoint is incomplete or belongs to another architecture than the config says"
            )
        return tensor

    @staticmethod
    def _check_finite(
        name: str, tensor: StoredTensor, values: np.ndarray[Any, Any], stored: np.ndarray[Any, Any]
    ) -> None:
        if values.size == 0:
            return
        # Extremes propagate NaN and show infinities without a temporary as large as the tensor.
        with np.errstate(invalid="ignore"):
            if math.isfinite(values.min()) and math.isfinite(values.max()):
                return
        flat = values.reshape(-1)
        for start in range(0, flat.size, _SEARCH_CHUNK):
            bad = np.flatnonzero(~np.isfinite(flat[start : start + _SEARCH_CHUNK]))
            if bad.size:
                index = tuple(int(i) for i in np.unravel_index(start + int(bad[0]), tensor.shape or (1,)))
                value = (
                    float(stored.reshape(tensor.shape)[index if tensor.shape else ()])
                    if tensor.dtype == "F64"
                    else (float(flat[start + int(bad[0])]))
                )
                why = "does not fit f32" if math.isfinite(value) else "is not a finite number"
                raise CheckpointError(
                    f"{tensor.where}: tensor {quote(name)} holds {value} at index {list(index)}, which {why}; "
                    "the training run diverged or the file is damaged"
                )
