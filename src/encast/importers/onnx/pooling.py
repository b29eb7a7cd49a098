"""Reductions: means and variances of norms, sums of tokens, lengths of rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from encast.importers.onnx.folding import axes_of, place_of
from encast.importers.onnx.reader import Reader, Value, handles
from encast.importers.onnx.values import Axes, Known, Seen, arguments, labels, shape_of

__all__ = ["average", "keep_real", "normalised"]

Array = np.ndarray[Any, Any]

_LEAST_LENGTH = 1e-8
"""The op divides by at least 1e-12; a larger bound that no row of a real model comes near is the same."""
_LEAST_NARROW_LENGTH = 2.0**-23
"""The same in f16, where converters write at least 1e-7 for what is smaller."""


@handles("ReduceMean", "ReduceSum", "ReduceMax", "ReduceL2")
def _reduce(reader: Reader) -> list[Value]:
    given = [one.array if isinstance(one, Known) else None for one in reader.inputs]
    return _along(reader, reader.node.op, axes_of(reader.node, given))


@handles("GlobalAveragePool")
def _pool(reader: Reader) -> list[Value]:
    """What tf2onnx makes of a mean over the last of three axes."""
    seen = reader.inputs[0]
    if not isinstance(seen, Seen) or len(seen.axes) != 3:
        raise reader.fail("GlobalAveragePool is the mean over the last of three axes")
    return _along(reader, "ReduceMean", [2])


def _along(reader: Reader, op: str, axes: list[int] | None) -> list[Value]:
    seen = reader.inputs[0]
    if not isinstance(seen, Seen) or axes is None or len(axes) != 1:
        raise reader.fail("a reduction of rows goes over one axis")
    if seen.kind == "product":
        seen = reader.finished(seen)
    rank = len(seen.axes)
    place = place_of(axes[0], rank)
    keep = bool(reader.node.attributes.get("keepdims", 1))
    left: Axes = (*seen.axes[:place], *(((),) if keep else ()), *seen.axes[place + 1 :])
    if place == rank - 1 and labels(seen.axes[-1:]) == "n":
        squared = seen.curve is not None and np.allclose(seen.curve, arguments(seen) ** 2, rtol=1e-6)
        if op == "ReduceMean" and seen.kind in ("rows", "sequences") and squared:
            return [Seen("mean square", seen.value, left, extra=seen.kind)]
        if op == "ReduceMean" and seen.kind in ("rows", "sequences", "table"):
            return [Seen("mean", reader.finished(seen).value, left)]
        if op == "ReduceMean" and seen.kind == "centred" and squared:
            return [Seen("variance", seen.value, left)]
        if op == "ReduceSum" and seen.kind in ("rows", "sequences") and squared:
            return [Seen("squares", seen.value, left, extra=seen.kind)]
        if op == "ReduceL2" and seen.kind in ("rows", "sequences"):
            lone = Seen("squares", reader.finished(seen).value, left, extra=seen.kind)
            return [Seen(lone.kind, lone.value, left, np.sqrt(arguments(lone)), seen.kind)]
    if labels(seen.axes) == "b,s,n" and labels(seen.axes[place : place + 1]) == "s":
        if op == "ReduceSum" and seen.kind == "masked":
            return [Seen("sum", seen.value, left)]
        if op == "ReduceMax" and seen.kind == "lowered":
            return [Seen("sequences", reader.emit("pooling", seen.value, modes=["max"]), left)]
    raise reader.fail(
        "reductions are those of a layer norm, a sum or maximum over the tokens of which padding is taken out, and the "
        "length of a row"
    )


def keep_real(reader: Reader, rows: Seen, array: Array) -> Seen:
    """Rows times the attention mask."""
    wanted = reader.probe.mask[:, :, None]
    if (
        rows.kind == "rows"
        and labels(rows.axes) == "b,s,n"
        and len(rows.axes) == 3
        and np.array_equal(
            np.broadcast_to(array, shape_of(rows.axes)),
            np.broadcast_to(wanted, shape_of(rows.axes)),
        )
    ):
        return Seen("masked", rows.value, rows.axes)
    raise reader.fail("rows are multiplied by numbers, or by the attention mask before they are added up")


def average(reader: Reader, total: Seen, array: Array) -> Seen:
    """The sum of a sequence's rows over their number, or over its root."""
    lengths = reader.probe.mask.sum(1).astype(np.float64)
    flat = np.broadcast_to(array, shape_of(total.axes)).reshape(len(lengths), -1)
    for mode, counts in (("mean", lengths), ("mean_sqrt_len_tokens", np.sqrt(lengths))):
        if flat.size and np.allclose(flat, counts[:, None], rtol=1e-6, atol=0.0):
            return Seen("sequences", reader.emit("pooling", total.value, modes=[mode]), total.axes)
    raise reader.fail("a sum of rows is divided by the number of tokens, or by its root")


def normalised(reader: Reader, rows: Seen, squares: Seen) -> Seen:
    """Rows over their length."""
    rows = reader.rows(rows)
    length = squares.curve
    least = _LEAST_NARROW_LENGTH if reader.rounding else _LEAST_LENGTH
    if (
        rows.value == squares.value
        and length is not None
        and 0.0 <= length[0] <= least
        and np.allclose(length, np.maximum(np.sqrt(arguments(squares)), length[0]), rtol=1e-6, atol=0.0)
    ):
        return Seen(rows.kind, reader.emit("normalize", rows.value), rows.axes)
    raise reader.fail(f"a normalisation divides a row by its own length, or by at most {least} if that is larger")
