"""Columns of rows: queries, keys and values that one product makes side by side, and gates with what they multiply."""

from __future__ import annotations

import numpy as np

from encast.importers.onnx.reader import Reader
from encast.importers.onnx.values import ARGUMENTS, Axes, Seen, labels, shape_of

__all__ = ["gated", "part", "side"]


def part(reader: Reader, seen: Seen, start: int, stop: int, axes: Axes) -> Seen:
    """Columns ``start`` to ``stop`` of rows that one product makes: what lies in them has these ``axes``."""
    if seen.kind == "part":
        first = seen.extra[0]
        return Seen("part", seen.value, axes, None, (first + start, first + stop))
    rows = reader.rows(seen)
    node = reader.graph.producer(rows.value)
    if rows.kind != "rows" or node is None or node.op != "linear":
        raise reader.fail("columns are taken of rows that are the product of rows with one weight")
    return Seen("part", rows.value, axes, None, (start, stop))


def side(reader: Reader, seen: Seen, axis: int, place: int, kept: Axes) -> Seen | None:
    """One of queries, keys and values, where they lie side by side and each is in heads: number ``place`` of ``axis``.

    ``kept``: what stands for the axis afterwards, of size 1 or nothing. None for rows in any other arrangement.
    """
    order = [label for one in seen.axes for label, _ in one]
    # Columns that were cut twice: their first part was taken for heads, the second for parts of a head. With one head
    # they were cut once.
    inner = [label for label in order if label in ("p", "d")]
    if labels(seen.axes[axis : axis + 1]) != "h" or sorted(order) != sorted(["b", "s", "h", *inner]):
        return None
    if inner not in (["p", "d"], ["d"]) or seen.curve is not None or seen.kind not in ("rows", "product", "part"):
        return None
    renamed = {"p": "h"} if "p" in inner else {"d": "n"}
    width = int(np.prod([size for one in seen.axes for label, size in one if label in inner]))
    axes = tuple(tuple((renamed.get(label, label), size) for label, size in one) for one in seen.axes)
    return part(reader, seen, place * width, (place + 1) * width, (*axes[:axis], *kept, *axes[axis + 1 :]))


def gated(reader: Reader, gate: Seen, other: Seen) -> Seen | None:
    """``activation(gate) * other`` (Shazeer 2020), None where these are not rows of one product or of two alike."""
    kinds = ("rows", "part")
    if gate.kind not in kinds or other.kind not in kinds or gate.curve is None or gate.axes != other.axes:
        return None
    if labels(gate.axes) not in ("b,s,n", "bs,n"):
        return None
    kind = reader.activation(gate.curve)
    width = shape_of(gate.axes)[-1]
    if kind is None or not _is_itself(other):
        return None
    whole = gate.value
    if not (gate.value == other.value and (gate.extra, other.extra) == ((0, width), (width, 2 * width))) or (
        reader.graph.type_of(whole).shape[1] != 2 * width
    ):
        made = reader.stacked([reader.rows(Seen(one.kind, one.value, one.axes, None, one.extra)).value
                               for one in (gate, other)])  # fmt: skip
        if made is None:
            return None
        whole = made
    return Seen("rows", reader.emit("gated_activation", whole, kind=kind), gate.axes)


def _is_itself(seen: Seen) -> bool:
    return seen.curve is None or bool(np.array_equal(seen.curve, ARGUMENTS))
