"""Integers and what they stand for: ``scale * (q - zero)``; and which array of f32 was made of which integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from encast.errors import CheckpointError
from encast.ir import Integers

__all__ = ["Dequantised", "dequantize", "quantize"]

Array = np.ndarray[Any, Any]

_MOST_BYTES = 512 << 20
"""Of arrays beyond the one of each weight: the same integers with another scale."""


def dequantize(values: Array, scale: Array, zero: Array, axis: int, out: Array | None = None) -> Array:
    """``values: s8, u8 or i32``, ``scale: f32`` and ``zero`` of one number or one for each index of ``axis``: f32."""
    if out is None:
        out = np.empty(values.shape, np.float32)
    np.subtract(values, spread(zero, values.ndim, axis), out=out, dtype=np.float32, casting="unsafe")
    with np.errstate(over="ignore"):
        np.multiply(out, spread(scale, values.ndim, axis), out=out)
    return out


def quantize(numbers: Array, scale: Array, zero: Array, axis: int) -> Array:
    """``round(numbers / scale) + zero``, ties to even, saturated to the dtype of ``zero``; NaN becomes its zero."""
    limits = np.iinfo(zero.dtype)
    with np.errstate(all="ignore"):
        rounded = np.rint(numbers / spread(scale, numbers.ndim, axis))
    offset = spread(zero, numbers.ndim, axis).astype(np.float32)
    return np.asarray(np.clip(np.nan_to_num(rounded) + offset, limits.min, limits.max).astype(zero.dtype))


def spread(array: Array, rank: int, axis: int) -> Array:
    """One number, or a vector along ``axis``, so that it is spread over ``rank`` axes."""
    if array.size == 1:
        return array.reshape((1,) * rank)
    return array.reshape([-1 if place == axis % rank else 1 for place in range(rank)])


@dataclass(frozen=True)
class Made:
    """An array and what it was made of."""

    array: Array
    values: Array
    scale: Array
    zero: Array
    axis: int


class Dequantised:
    """The f32 arrays that integers of a file stand for, each made once; both readings of a file share them.

    ``stored``: bytes of all 8-bit integers of the file, and of those that it makes of its weights. Arrays are known by
    their address: they live as long as this.
    """

    def __init__(self, stored: int) -> None:
        self._left = 4 * stored + _MOST_BYTES
        self._made: dict[Any, Made] = {}
        self._by_address: dict[int, Made] = {}
        self._rounded: dict[Any, tuple[Array, Array]] = {}

    @property
    def used(self) -> bool:
        """Whether there are any."""
        return bool(self._made)

    def array(self, values: Array, scale: Array, zero: Array, axis: int, *, columns: bool, where: str) -> Array:
        """As ``dequantize``. ``columns``: whether the array lies column by column, as whoever turns it wants it.

        Raises ``CheckpointError`` where a number is beyond f32, and for far more arrays than the file has weights.
        """
        place = values.__array_interface__["data"][0]
        key = (place, values.shape, values.strides, scale.tobytes(), zero.tobytes(), axis, columns)
        if key not in self._made:
            self._left -= 4 * values.size
            if self._left < 0:
                raise CheckpointError(f"{where}: the same integers are dequantised with many scales; no exporter does")
            out = np.empty(values.shape, np.float32, "F" if columns else "C")
            array = dequantize(values, scale, zero, axis, out)
            if array.size and not (np.isfinite(array.min()) and np.isfinite(array.max())):
                raise CheckpointError(f"{where}: the scale makes numbers beyond f32; the file is damaged")
            # What an address stands for, and what it was made of, must not go.
            self._made[key] = self._by_address[array.__array_interface__["data"][0]] = Made(
                array, values, scale, zero, axis
            )
        return self._made[key].array

    def rounded(self, numbers: Array, scale: Array, zero: Array, axis: int) -> Array:
        """As ``quantize``, with the same array for the same numbers of a file, so that its address is known again."""
        place = numbers.__array_interface__["data"][0]
        key = (place, numbers.shape, numbers.strides, scale.tobytes(), zero.tobytes(), axis)
        if key not in self._rounded:
            self._rounded[key] = (quantize(numbers, scale, zero, axis), numbers)
        return self._rounded[key][0]

    def integers(self, array: Array) -> Integers | None:
        """Those that ``array: f32[n, k]`` was made of, or its transpose; None if it was made of none, with a scale for
        each column, or with negative ones, whose integers may be 128 for ours."""
        made = self._by_address.get(array.__array_interface__["data"][0])
        if made is None or not array.size or array.ndim != 2 or made.values.dtype == np.int32 or (made.scale < 0).any():
            return None
        for whole, values, axis in (
            (made.array, made.values, made.axis % 2),
            (made.array.T, made.values.T, 1 - made.axis % 2),
        ):
            if (array.shape, array.strides) != (whole.shape, whole.strides):
                continue
            if made.scale.size != 1 and axis != 0:
                return None
            rows = len(values)
            scale = np.ascontiguousarray(np.broadcast_to(made.scale.reshape(-1), rows))
            zero = np.broadcast_to(made.zero.reshape(-1), rows).astype(np.int32)
            return Integers(values, scale, zero)
        return None
