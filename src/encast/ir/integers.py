"""``Integers``: the 8-bit integers that a weight was stored as, beside its f32 values.

A checkpoint that is quantised already says ``weight = scale * (values - zero)``. A product in int8 takes these integers
as they are; rounding the f32 values anew would give others wherever the largest of a row is not 127.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from encast.errors import GraphError

__all__ = ["Integers"]

Array = np.ndarray[Any, Any]

_BLOCK = 1 << 22
"""Elements that are worked on at a time, so that temporaries stay small beside the weight."""
_LEAST_SCALE = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Integers:
    """``values: s8[n, k]`` or ``u8[n, k]``; ``scale: f32[n]`` and ``zero: i32[n]`` of each row.

    Raises ``GraphError`` for other shapes and dtypes.
    """

    values: Array
    scale: Array
    zero: Array

    def __post_init__(self) -> None:
        if self.values.dtype not in (np.int8, np.uint8) or self.values.ndim != 2:
            raise GraphError(f"integers are {self.values.dtype}{list(self.values.shape)}; s8 or u8 [n, k] are needed")
        for what, array, dtype in (("scale", self.scale, np.float32), ("zero", self.zero, np.int32)):
            if array.shape != self.values.shape[:1] or array.dtype != dtype:
                raise GraphError(
                    f"the {what} of integers {list(self.values.shape)} is {array.dtype}{list(array.shape)}; one "
                    f"{np.dtype(dtype)} for each row is needed"
                )

    def narrow(self) -> tuple[Array, Array]:
        """``values - zero`` as ``s8[n, k]``, and ``bool[n]``: the rows that s8 holds; the others are zeros.

        A row with a scale below the smallest normal f32 counts as not held, since f32 arithmetic may flush it.
        """
        rows, columns = self.values.shape
        narrow = np.zeros((rows, columns), np.int8)
        fits = self.scale >= _LEAST_SCALE
        step = max(1, _BLOCK // max(1, columns))
        for begin in range(0, rows, step):
            wide = self.values[begin : begin + step].astype(np.int32) - self.zero[begin : begin + step, None]
            held = (wide.min(axis=1, initial=0) >= -128) & (wide.max(axis=1, initial=0) <= 127)
            fits[begin : begin + step] &= held
            narrow[begin : begin + step] = np.where(fits[begin : begin + step, None], wide, 0)
        return narrow, fits

    def scaled(self, factor: float) -> Integers:
        """The same integers for ``factor`` times the weight; exact for a power of two, else each scale is rounded."""
        return Integers(self.values, (self.scale * np.float64(factor)).astype(np.float32), self.zero)

    def rows(self, start: int, stop: int) -> Integers:
        """Those of the rows from ``start`` to before ``stop``."""
        return Integers(self.values[start:stop], self.scale[start:stop], self.zero[start:stop])

    @staticmethod
    def stacked(parts: Sequence[Integers | None]) -> Integers | None:
        """The rows of all parts in this order; None where one has none, or where they are not of one dtype."""
        held = [part for part in parts if part is not None]
        if len(held) < len(parts) or len({part.values.dtype for part in held}) != 1:
            return None
        return Integers(
            np.concatenate([part.values for part in held]),
            np.concatenate([part.scale for part in held]),
            np.concatenate([part.zero for part in held]),
        )
