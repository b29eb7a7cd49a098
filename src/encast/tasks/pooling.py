"""One answer of those of a text's windows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np

from encast.errors import InputError
from encast.tasks.session import F32, Piece, Runs, Steps

__all__ = ["Pooling", "pool_windows", "wants_windows"]

F64 = np.ndarray[Any, np.dtype[np.float64]]

Pooling = Literal["mean", "max"]


def wants_windows(on_long: object, stride: object = None, pooling: object = None) -> bool:
    """Whether long texts are to become windows. Raises ``InputError`` for values that are unknown, and for options of
    windows without them.
    """
    if on_long not in ("truncate", "error", "windows"):
        raise InputError(f"on_long is {on_long!r}; 'truncate', 'error' and 'windows' are known")
    if pooling not in (None, "mean", "max"):
        raise InputError(f"pooling is {pooling!r}; 'mean' and 'max' are known")
    if on_long != "windows":
        for name, value in (("stride", stride), ("pooling", pooling)):
            if value is not None:
                raise InputError(f"{name} is {value!r}, which is for windows; ask for them with on_long='windows'")
    return on_long == "windows"


def pool_windows(
    pieces: Iterable[Piece],
    output: str,
    pooling: Pooling,
    read: Callable[[F32], F32 | F64],
    take: Callable[[int, F32 | F64, int], object],
) -> Steps[None]:
    """Gives ``take`` one row of every text, in order: ``(index of the text, row, number of its windows)``.

    With ``x_i = read(row i of the output)`` and ``n_i`` tokens of the text in window ``i``, "mean" is
    ``sum(n_i x_i) / sum(n_i)``, and "max" the largest ``x_i`` of each number. Both are computed in float64, window by
    window, so that no bit depends on how windows come together in runs. A text that is one window has its row as it is.
    """
    total: F64 = np.empty(0)
    tokens = count = 0
    for run in Runs(output, pieces):
        rows = yield run
        for window, row in zip(run.piece.windows, rows, strict=True):
            values = read(row)
            if window.is_first and window.is_last:
                take(window.index, values, 1)
                continue
            wide = values.astype(np.float64)
            if pooling == "mean":
                wide *= window.tokens
            if window.is_first:
                total, tokens, count = wide, window.tokens, 1
            else:
                total = total + wide if pooling == "mean" else np.maximum(total, wide)
                tokens, count = tokens + window.tokens, count + 1
            if window.is_last:
                take(window.index, total / tokens if pooling == "mean" else total, count)
