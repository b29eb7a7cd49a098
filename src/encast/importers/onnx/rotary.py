"""Rotary positions (Su et al. 2021): queries and keys in heads, whose pairs of columns are turned.

Exporters write them as ``x * cos + turn(x) * sin``, where ``turn`` puts the second half of a head's columns, negated,
before the first. Cosines and sines follow from the positions; base and rate are read from the angles of the probe,
and every angle must be what these two give.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from encast.importers.onnx.folding import place_of
from encast.importers.onnx.reader import Reader, Value, handles
from encast.importers.onnx.values import ARGUMENTS, Seen, labels, shape_of

__all__ = ["half", "is_in_heads", "times_angles", "turned"]

Array = np.ndarray[Any, Any]

_ROUNDING = 2e-6
"""How far, relatively, the base that angles in f32 give is from the one that they were made with."""
_DIGITS = 8


def is_in_heads(seen: Seen) -> bool:
    """Whether they have axes of sequences, heads and positions in some order, and then that of a head's columns.

    One head may have an axis of size 1 that is nobody's.
    """
    alone = [one[0][0] if len(one) == 1 else "" for one in seen.axes]
    return sorted(alone[:-1]) in (["b", "h", "s"], ["", "b", "s"]) and alone[-1] in ("d", "n")


def half(reader: Reader, seen: Seen, start: int, stop: int) -> Seen | None:
    """Columns of every head, None unless they are one of its halves."""
    width = shape_of(seen.axes)[-1]
    if not is_in_heads(seen) or width % 2 or (start, stop) not in ((0, width // 2), (width // 2, width)):
        return None
    rows = reader.rows(seen)
    return Seen("half", rows.value, (*rows.axes[:-1], _columns(rows, width // 2)), None, int(start > 0))


def _columns(seen: Seen, width: int) -> tuple[tuple[str, int], ...]:
    """The last axis with another number of columns."""
    return ((seen.axes[-1][0][0], width),)


@handles("Concat")
def _concat(reader: Reader) -> list[Value]:
    first, second = reader.inputs if len(reader.inputs) == 2 else (None, None)
    if isinstance(first, Seen) and isinstance(second, Seen) and (first.kind, second.kind) == ("half", "half"):
        last = place_of(reader.node.attributes.get("axis", 0), len(first.axes)) == len(first.axes) - 1
        negated = first.curve is not None and np.array_equal(first.curve, -ARGUMENTS) and second.curve is None
        alike = (first.value, first.axes) == (second.value, second.axes)
        if last and negated and alike and (first.extra, second.extra) == (1, 0):
            return [Seen("turned", first.value, (*first.axes[:-1], _columns(first, 2 * shape_of(first.axes)[-1])))]
    raise reader.fail(
        "rows are put together where rotary positions turn them: the second half of each head's columns, negated, and "
        "then the first"
    )


def times_angles(reader: Reader, seen: Seen, array: Array) -> Seen:
    """Rows in heads times cosines, or what ``turn`` made of them times sines."""
    if not is_in_heads(seen) or array.ndim > 4:
        raise reader.fail("rotary positions turn [sequences, heads, positions, columns]")
    kind, value = ("sines", seen.value) if seen.kind == "turned" else ("cosines", reader.rows(seen).value)
    return Seen(kind, value, seen.axes, extra=_of_texts(reader, seen, array))


def _of_texts(reader: Reader, seen: Seen, array: Array) -> Array:
    """Cosines or sines of every token: ``[sequences, positions, columns of a head]``."""
    places = {one[0][0] if one and one[0][0] in ("b", "s") else "h": place for place, one in enumerate(seen.axes[:-1])}
    wide = array.reshape((1,) * (4 - array.ndim) + array.shape)
    shape = shape_of(seen.axes)
    if wide.shape[places["h"]] != 1 or np.broadcast_shapes(wide.shape, shape) != shape:
        raise reader.fail("cosines and sines are those of positions, the same for every head")
    turned = wide.transpose(places["b"], places["h"], places["s"], 3)[:, 0]
    return np.broadcast_to(turned, (*reader.probe.ids.shape, shape[-1]))


@handles("RotaryEmbedding")
def _rotary_embedding(reader: Reader) -> list[Value]:
    """The op of opset 23, of all columns of rows in heads; cosines and sines are those of the first halves."""
    seen, given = reader.inputs[0], reader.node.attributes
    caches = [reader.known(1), reader.known(2)]
    whole = not given.get("interleaved", 0) and not given.get("rotary_embedding_dim", 0)
    alone = all(one is None for one in reader.inputs[3:])
    if isinstance(seen, Seen) and labels(seen.axes) in ("b,h,s,d", "b,s,n") and whole and alone and is_in_heads(seen):
        rows = reader.rows(seen)
        sides = []
        for kind, one in zip(("cosines", "sines"), caches, strict=True):
            fits = one is not None and not one.constant and one.array.ndim == 3
            if one is None or not fits or one.array.shape[-1] * 2 != shape_of(rows.axes)[-1]:
                break
            array = np.concatenate([one.array, one.array], axis=-1)
            sides.append(Seen(kind, rows.value, rows.axes, extra=_of_texts(reader, rows, array[:, None])))
        else:
            return [turned(reader, *sides)]
    raise reader.fail(
        "RotaryEmbedding turns all columns of [sequences, heads, positions, columns], not interleaved, by cosines and "
        "sines [batch, sequence, half of the columns] that follow from the positions"
    )


def turned(reader: Reader, cosines: Seen, sines: Seen) -> Seen:
    """The sum of both."""
    if cosines.value != sines.value or cosines.axes != sines.axes:
        raise reader.fail("cosines and sines of rotary positions are those of the same rows")
    theta, rate = _read_angles(reader, cosines.extra, sines.extra)
    heads = next((size for one in cosines.axes for label, size in one if label == "h"), 1)
    return Seen("rows", reader.emit("rotary", cosines.value, heads=heads, theta=theta, rate=rate), cosines.axes)


def _read_angles(reader: Reader, cosines: Array, sines: Array) -> tuple[float, float]:
    """Base and rate of angles ``[sequences, positions, columns of a head]``, as op ``rotary`` has them."""
    real = reader.probe.mask.astype(bool)
    positions = np.broadcast_to(np.arange(real.shape[1]), real.shape)[real]
    cosines, sines = cosines.astype(np.float64)[real], sines.astype(np.float64)[real]
    pairs = cosines.shape[-1] // 2
    if pairs < 2:
        raise reader.fail("rotary positions turn heads of at least 4 columns, of which the base follows")
    steps = np.arctan2(sines, cosines)[positions == 1][0, :pairs]
    # A file with 16-bit numbers may compute its angles in f32 all the same.
    rounding = reader.rounding if _is_narrow(cosines) and _is_narrow(sines) else 0.0
    reader.angles = max(reader.angles, rounding)
    slack = max(_ROUNDING, 4.0 * rounding)
    if (steps > 0.0).all():
        rate = _shortest(float(steps[0]), slack)
        theta = _shortest(float(steps[-1] / rate) ** (-pairs / (pairs - 1)), slack)
        turns = rate * theta ** (-np.arange(pairs) / pairs)
        angles = np.tile(positions[:, None] * turns, 2)
        # Narrow files may compute the angles themselves in 16 bits.
        allowed = 1e-6 + 2.0 * rounding + (4e-7 + 4.0 * rounding) * angles
        if (np.abs(cosines - np.cos(angles)) <= allowed).all() and (np.abs(sines - np.sin(angles)) <= allowed).all():
            return theta, rate
    raise reader.fail(
        "rotary positions turn pair i of a head's d columns by position * rate * base ** (-2 i / d); these angles are "
        "others"
    )


def _is_narrow(numbers: Array) -> bool:
    """Whether all are numbers of f16 or of bf16."""
    wide = numbers.astype(np.float32)
    return bool((wide == wide.astype(np.float16)).all() or (wide.view(np.uint32) & 0xFFFF == 0).all())


def _shortest(value: float, slack: float) -> float:
    """The number with the fewest digits that is no further away than ``slack``, relatively."""
    for digits in range(_DIGITS):
        short = float(f"{value:.{digits}e}")
        if abs(short - value) <= slack * abs(value):
            return short
    return value
