"""Quantised graphs: 8-bit integers are read as the numbers that they stand for.

An integer ``q`` with scale ``s`` and zero point ``z`` stands for ``s * (q - z)``. So rows that are quantised and
dequantised again are the rows, and a product of integers, times the scales of both sides, is the product of what they
stand for. The integers of weights are kept beside the f32 numbers (``dequantised.py``).

Read are the nodes that ONNX Runtime's ``quantize_dynamic`` writes (DynamicQuantizeLinear, MatMulInteger), and pairs of
QuantizeLinear and DequantizeLinear as its ``quantize_static`` and others write them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers.files import quote
from encast.importers.onnx.arrangements import look_up
from encast.importers.onnx.dequantised import dequantize, quantize
from encast.importers.onnx.folding import place_of
from encast.importers.onnx.model import OnnxNode
from encast.importers.onnx.reader import HANDLERS, Reader, Value, handles
from encast.importers.onnx.values import Known, Rounding, Seen

__all__ = ["fold", "in_integers", "moved", "refuse_operators", "rows_in_bytes", "times_scale", "waits", "weight"]

Array = np.ndarray[Any, Any]

_MOVING = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity")
"""Ops that may stand between the look-up of bytes in a table and the node that dequantises them."""
_MOST_STEPS = 8
"""How many of them: a relative bias is turned and gets an axis."""

_PARTS = ("bytes", "byte scale", "byte zero", "integer sums", "table bytes")
_BYTES = (np.dtype("i1"), np.dtype("u1"))
_ATTRIBUTES = {"axis": None, "block_size": 0, "output_dtype": 0, "precision": 0, "saturate": 1}
"""Of both nodes, with the value that an attribute must have, or any."""


@dataclass(frozen=True)
class Quantised:
    """What bytes stand for: ``seen``; ``scheme``: the name of the node that found their scale at run time, or the fixed
    scale, zero point and dtype, and ``node`` the name of that which rounds."""

    seen: Seen
    scheme: Any
    node: str = ""


@dataclass(frozen=True)
class Sums:
    """A product of integers, before it is scaled. ``right``: rows in bytes, or the integers of a weight and their zero
    point."""

    left: Quantised
    right: Quantised | tuple[Known, Array | None]


@dataclass(frozen=True)
class Scale:
    """A product of the scales of ``schemes``, one or both sides of a product, and of ``weight``'s."""

    schemes: tuple[Any, ...]
    weight: Known | None = None


@dataclass(frozen=True)
class TableRows:
    """Rows of a table of integers, before it is known what these stand for; ``steps`` move them afterwards."""

    table: Known
    index: Known
    steps: tuple[tuple[OnnxNode, Sequence[Value | None]], ...] = ()


def in_integers(values: Sequence[Value | None]) -> bool:
    """Whether one of the values is integers, or belongs to some."""
    return any(isinstance(one, Seen) and one.kind in _PARTS for one in values)


def refuse_operators(reader: Reader) -> None:
    """Raises ``UnsupportedModelError`` for a node that computes with integers in one piece."""
    if reader.node.op.startswith("QLinear") or reader.node.op == "ConvInteger":
        raise UnsupportedModelError(
            f"{_at(reader)}: operators on integers in one piece (QuantFormat.QOperator of ONNX Runtime) are not read; "
            "quantise the model with QuantFormat.QDQ, or with quantize_dynamic, or compile its checkpoint"
        )


# Rows


@handles("DynamicQuantizeLinear")
def _dynamic(reader: Reader) -> list[Value]:
    """Bytes with a scale and a zero point for all rows, found at run time; encast's int8 finds them row by row."""
    seen, made = reader.inputs[0], reader.node.outputs[0]
    if not isinstance(seen, Seen) or seen.kind in _PARTS or len(reader.inputs) != 1:
        raise reader.fail("rows of the encoder are quantised")
    reader.note_activations("dynamic")
    return [
        Seen("bytes", seen.value, seen.axes, seen.curve, Quantised(seen, made)),
        Seen("byte scale", "", (), None, Scale((made,))),
        Seen("byte zero", "", (), None, made),
    ]


@handles("QuantizeLinear")
def _quantize(reader: Reader) -> list[Value]:
    """Bytes with a fixed scale and zero point."""
    seen = reader.inputs[0]
    scale, zero, _ = _parameters(reader)
    if not isinstance(seen, Seen) or seen.kind in _PARTS or scale.size != 1:
        raise reader.fail("rows of the encoder are quantised, with one scale")
    if zero.dtype not in _BYTES:
        raise reader.fail("rows are quantised to 8 bits")
    reader.note_activations("static")
    made = reader.node.outputs[0]
    reader.rounded.add(made)
    return [Seen("bytes", seen.value, seen.axes, seen.curve, Quantised(seen, _scheme(scale, zero), made))]


def _scheme(scale: Array, zero: Array) -> tuple[float, int, str]:
    return float(scale.reshape(())), int(zero.reshape(())), zero.dtype.name


@handles("DequantizeLinear")
def _dequantize(reader: Reader) -> list[Value]:
    seen = reader.inputs[0]
    if not isinstance(seen, Seen) or seen.kind not in ("bytes", "table bytes"):
        raise reader.fail("integers are dequantised: those of a weight, or rows that were quantised before")
    if seen.kind == "table bytes":
        return [_looked_up(reader, seen.extra)]
    held: Quantised = seen.extra
    if isinstance(held.scheme, str):
        _check_own(reader, held, reader.inputs[1:2], reader.inputs[2:3])
        return [_restored(seen)]
    scale, zero, _ = _parameters(reader)
    if scale.size != 1 or _scheme(scale, zero) != held.scheme:
        raise reader.fail(f"rows are dequantised as they were quantised, with {held.scheme}")
    exact = scale >= np.finfo(np.float32).tiny
    fixed = (held.scheme[0], held.scheme[1] - int(np.iinfo(zero.dtype).min)) if exact else None
    restored = _restored(seen, Rounding(held.node, fixed))
    if restored.hidden is None:
        return [restored]
    limits = np.iinfo(zero.dtype)
    lowest, highest = (held.scheme[0] * (int(one) - held.scheme[1]) for one in (limits.min, limits.max))
    return [replace(restored, hidden=min(max(restored.hidden, lowest), highest))]


def _restored(seen: Seen, rounded: Rounding | None = None) -> Seen:
    """What bytes stand for, in the arrangement that they have now."""
    inner: Seen = seen.extra.seen
    return replace(inner, axes=seen.axes, rounded=rounded)


def _check_own(reader: Reader, held: Quantised, scale: Sequence[Value | None], zero: Sequence[Value | None]) -> None:
    """Raises unless scale and zero point are those that the bytes were made with."""
    own = [(one.kind, one.extra) for one in (*scale, *zero) if isinstance(one, Seen)]
    wanted = [("byte scale", Scale((held.scheme,)))] if scale else []
    if own != [*wanted, ("byte zero", held.scheme)]:
        raise reader.fail("rows in bytes come with the scale and the zero point of the node that made them")


# Products


@handles("MatMulInteger")
def _matmul(reader: Reader) -> list[Value]:
    left, right = reader.inputs[:2]
    zeros = (*reader.inputs[2:], None, None)
    if not isinstance(left, Seen) or not _is_dynamic(left):
        raise reader.fail("a product of integers has rows on its left that DynamicQuantizeLinear made")
    _check_own(reader, left.extra, (), zeros[:1])
    rows = Quantised(_restored(left), left.extra.scheme)
    if isinstance(right, Known):
        zero = zeros[1]
        if right.array.dtype not in _BYTES or right.array.ndim != 2 or not right.constant:
            raise reader.fail("the weight of a product of integers is constant integers of 8 bits, [inputs, outputs]")
        if zero is not None and not (isinstance(zero, Known) and zero.constant):
            raise reader.fail("the zero point of a weight is constant")
        return [Seen("integer sums", "", (), None, Sums(rows, (right, None if zero is None else zero.array)))]
    if not isinstance(right, Seen) or not _is_dynamic(right):
        raise reader.fail("a product of integers is that with a weight, or with rows that DynamicQuantizeLinear made")
    _check_own(reader, right.extra, (), zeros[1:2])
    return [Seen("integer sums", "", (), None, Sums(rows, Quantised(_restored(right), right.extra.scheme)))]


def _is_dynamic(seen: Seen) -> bool:
    return seen.kind == "bytes" and isinstance(seen.extra.scheme, str)


def times_scale(reader: Reader) -> list[Value]:
    """Mul of two scales, or of the sums of a product of integers and the scales of both of its sides."""
    a, b = reader.inputs if len(reader.inputs) == 2 else (None, None)
    if isinstance(b, Seen) and (b.kind == "integer sums" or not isinstance(a, Seen)):
        a, b = b, a
    fits = reader.node.op == "Mul" and isinstance(a, Seen) and a.kind in ("byte scale", "integer sums")
    if fits and isinstance(a, Seen) and a.kind == "byte scale":
        mine: Scale = a.extra
        lone = mine.weight is None and len(mine.schemes) == 1
        if lone and isinstance(b, Seen) and b.kind == "byte scale" and b.extra == Scale(b.extra.schemes[:1]):
            return [Seen("byte scale", "", (), None, Scale((*mine.schemes, *b.extra.schemes)))]
        if lone and isinstance(b, Known) and b.constant:
            return [Seen("byte scale", "", (), None, Scale(mine.schemes, b))]
    elif fits and isinstance(a, Seen) and isinstance(b, Seen) and b.kind == "byte scale":
        return _scaled(reader, a.extra, b.extra)
    raise reader.fail("the sums of a product of integers are multiplied by the scales of both of its sides")


def _scaled(reader: Reader, sums: Sums, scale: Scale) -> list[Value]:
    left, right = sums.left, sums.right
    inputs: list[Value | None] = [left.seen]
    if isinstance(right, Quantised):
        wanted = sorted((left.scheme, right.scheme)), False
        inputs.append(right.seen)
    else:
        wanted = [left.scheme], True
        if scale.weight is not None:
            weight, zero = right
            factors = scale.weight.array
            if zero is not None and max(zero.ndim, factors.ndim) <= 1 and 1 in (zero.size, factors.size):
                factors, zero = np.broadcast_arrays(factors, zero)  # one number beside one for each output
            array = _checked(reader, weight.array, factors, zero, 1, columns=True)
            inputs.append(Known(array, constant=True, name=weight.name))
    if (sorted(scale.schemes), scale.weight is not None) != wanted:
        raise reader.fail("the sums of a product of integers are multiplied by the scales of both of its sides")
    reader.inputs = inputs
    return HANDLERS["MatMul"](reader)


# Constants and tables


def weight(reader: Reader) -> Known:
    """DequantizeLinear of constants."""
    scale, zero, axis = _parameters(reader)
    x = reader.known(0)
    if x is None:
        raise reader.fail("integers are needed")
    # With a scale for each output of [inputs, outputs] whoever reads it turns it.
    columns = x.array.ndim == 2 and scale.size > 1 and axis % 2 == 1
    return Known(_checked(reader, x.array, scale, zero, axis, columns=columns), constant=True, name=x.name)


def fold(reader: Reader) -> list[Array] | None:
    """QuantizeLinear and DequantizeLinear of known arrays; None for other ops."""
    if reader.node.op not in ("QuantizeLinear", "DequantizeLinear"):
        return None
    scale, zero, axis = _parameters(reader)
    x = reader.known(0)
    if x is None:
        raise reader.fail("an array is needed")
    if reader.node.op == "DequantizeLinear":
        _check(reader, x.array, scale, zero, axis)
        return [dequantize(x.array, scale, zero, axis)]
    if x.array.dtype != np.float32 or zero.dtype not in _BYTES:
        raise reader.fail("f32 numbers are quantised to 8 bits")
    _check_parameters(reader, x.array.shape, scale, zero, axis)
    if x.constant and x.name:
        return [reader.dequantised.rounded(x.array, scale, zero, axis)]
    return [quantize(x.array, scale, zero, axis)]


def rows_in_bytes(table: Known, index: Known) -> list[Value] | None:
    """Gather of rows of a table of 8-bit integers; None if it is no such table."""
    if table.array.dtype not in _BYTES or table.array.ndim != 2:
        return None
    return [Seen("table bytes", "", (), None, TableRows(table, index))]


def waits(reader: Reader) -> bool:
    """Whether the node moves rows of a table of integers."""
    first = reader.inputs[0] if reader.inputs else None
    return isinstance(first, Seen) and first.kind == "table bytes" and reader.node.op in _MOVING


def moved(reader: Reader) -> list[Value]:
    """A node that ``waits`` is done when it is known what the integers stand for."""
    held: TableRows = reader.inputs[0].extra  # type: ignore[union-attr]
    if len(held.steps) == _MOST_STEPS:
        raise reader.fail(f"rows of a table are dequantised at most {_MOST_STEPS} nodes behind the look-up")
    steps = (*held.steps, (reader.node, tuple(reader.inputs[1:])))
    return [Seen("table bytes", "", (), None, TableRows(held.table, held.index, steps))]


def _looked_up(reader: Reader, held: TableRows) -> Value:
    scale, zero, axis = _parameters(reader)
    if scale.size != 1:
        raise reader.fail("a table that is dequantised behind the look-up has one scale")
    array = _checked(reader, held.table.array, scale, zero, axis)
    rows = look_up(reader, Known(array, constant=True, name=held.table.name), held.index)
    if rows is None:
        raise reader.fail("rows of a table are picked by ids, or by distances")
    node, inputs = reader.node, reader.inputs
    value = rows[0]
    for step, rest in held.steps:
        reader.node, reader.inputs = step, [value, *rest]
        value = HANDLERS[step.op](reader)[0]
    reader.node, reader.inputs = node, inputs
    return value


# Scales and zero points


def _parameters(reader: Reader) -> tuple[Array, Array, int]:
    """Scale, zero point (zeros where there is none) and axis of QuantizeLinear and DequantizeLinear."""
    for name, value in reader.node.attributes.items():
        if name not in _ATTRIBUTES or _ATTRIBUTES[name] not in (None, value):
            raise reader.fail(
                f"{quote(name)} is {quote(str(value))}; a scale for all, or for each index of one axis, is read"
            )
    given = reader.inputs[1:]
    if not 1 <= len(given) <= 2 or not all(isinstance(one, Known) and one.constant for one in given if one is not None):
        raise reader.fail("scale and zero point are constants")
    scale, zero = given[0], (*given[1:], None)[0]
    if not isinstance(scale, Known):
        raise reader.fail("a scale is needed")
    first = reader.inputs[0]
    kind = np.dtype("u1")
    if reader.node.op == "DequantizeLinear" and isinstance(first, Known):
        kind = first.array.dtype
    elif isinstance(first, Seen) and first.kind == "table bytes":
        kind = first.extra.table.array.dtype
    array = np.zeros(scale.array.shape, kind) if not isinstance(zero, Known) else zero.array
    axis = reader.node.attributes.get("axis", 1)
    if not isinstance(axis, int):
        raise reader.fail(f"axis is {quote(str(axis))}; a number is needed")
    if isinstance(first, Seen):
        _check_parameters(reader, None, scale.array, array, axis)
    return scale.array, array, axis


def _checked(
    reader: Reader, values: Array, scale: Array, zero: Array | None, axis: int, *, columns: bool = False
) -> Array:
    """The f32 numbers of constant integers, after all checks."""
    zero = np.zeros(scale.shape, values.dtype) if zero is None else zero
    _check(reader, values, scale, zero, axis)
    return reader.dequantised.array(values, scale, zero, axis, columns=columns, where=_at(reader))


def _check(reader: Reader, values: Array, scale: Array, zero: Array, axis: int) -> None:
    if values.dtype not in (*_BYTES, np.int32):
        raise CheckpointError(
            f"{_at(reader)} takes integers of {values.dtype}; s8, u8 and, for biases, i32 are dequantised"
        )
    if zero.dtype != values.dtype:
        raise CheckpointError(
            f"{_at(reader)}: the integers are {values.dtype}, their zero point is {zero.dtype}; both have one dtype"
        )
    if values.dtype == np.int32 and zero.any():
        raise CheckpointError(f"{_at(reader)}: the zero point of integers of 32 bits is 0")
    # A negative scale is NNCF's way to spend -128 on the largest of a row's numbers.
    _check_parameters(reader, values.shape, scale, zero, axis, signed=True)


def _check_parameters(
    reader: Reader, shape: tuple[int, ...] | None, scale: Array, zero: Array, axis: int, *, signed: bool = False
) -> None:
    """``shape``: of what is scaled, None where one scale is needed. ``signed``: whether scales may be negative."""
    wanted = "one number"
    fits = scale.shape in ((), (1,))
    if shape is not None and not fits:
        try:
            place = place_of(axis, len(shape))
        except ValueError as error:
            raise CheckpointError(f"{_at(reader)}: {error}; the scale has shape {list(scale.shape)}") from None
        wanted += f", or {shape[place]}, one for each index of axis {place}"
        fits = scale.shape == (shape[place],)
    if not fits:
        raise CheckpointError(f"{_at(reader)}: the scale has shape {list(scale.shape)}; {wanted} is needed")
    if zero.shape != scale.shape and not (zero.size == 1 and scale.size == 1):
        raise CheckpointError(
            f"{_at(reader)}: the scale has shape {list(scale.shape)}, the zero point {list(zero.shape)}; they have one"
        )
    fine = np.isfinite(scale) & ((scale != 0) if signed else (scale > 0))
    if scale.dtype != np.float32 or not fine.all():
        wrong = scale.reshape(-1)[~fine.reshape(-1)][:1].tolist()
        found = f"holds {wrong[0]}" if wrong else f"is {scale.dtype}"
        raise CheckpointError(
            f"{_at(reader)}: the scale {found}; finite f32 numbers {'other than' if signed else 'above'} 0 are needed: "
            "quantise the model without this node"
        )


def _at(reader: Reader) -> str:
    return f"{reader.where}: {reader.node.label}"
