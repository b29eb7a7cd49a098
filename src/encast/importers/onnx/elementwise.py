"""Elementwise ops: activations in any writing, norms in their parts, sums of rows.

A function of one value is followed by its results at fixed arguments, so that every writing of GELU is read alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from encast.importers.onnx.arrangements import with_positions
from encast.importers.onnx.attention import add_mask, choose, weaker
from encast.importers.onnx.disentangled import added, as_table, together_relative
from encast.importers.onnx.norm import affine, divided, rooted, scale_of, scaled, shift_of, shifted
from encast.importers.onnx.packed import gated
from encast.importers.onnx.pooling import average, keep_real, normalised
from encast.importers.onnx.quantised import in_integers, times_scale
from encast.importers.onnx.reader import Reader, Value, erf, handles
from encast.importers.onnx.rotary import is_in_heads, times_angles, turned
from encast.importers.onnx.smoothed import smoothed
from encast.importers.onnx.values import Known, Seen, arguments, labels, shape_of, together

__all__: list[str] = []

Array = np.ndarray[Any, Any]

_UNARY: dict[str, Callable[[Array], Array]] = {
    "Erf": erf,
    "Tanh": np.tanh,
    "Relu": lambda x: np.maximum(x, 0.0),
    "Sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)),
    "Sqrt": np.sqrt,
    "Neg": np.negative,
    "Exp": np.exp,
    "Reciprocal": lambda x: 1.0 / x,
}
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Pow": np.power,
    "Max": np.maximum,
    "Min": np.minimum,
}
_CURVED = (
    *("rows", "sequences", "scores", "centred", "variance", "squares", "mean square"),
    *("part", "half", "table", "by position", "picked"),
)
_OPEN = ("product", "masked", "normed", "rooted")
"""Kinds that become rows as soon as something else is done with them."""


def _curve(seen: Seen) -> Array:
    return arguments(seen) if seen.curve is None else seen.curve


def _curved(seen: Seen, function: Callable[[Array], Array]) -> list[Value]:
    with np.errstate(all="ignore"):
        curve = np.asarray(function(_curve(seen)), np.float64)
        # What a mask has added goes through it as scores do: those of tokens are small beside it.
        hidden = None if seen.hidden is None else float(function(np.array(seen.hidden)))
    return [Seen(seen.kind, seen.value, seen.axes, curve, seen.extra, hidden=hidden)]


def _open(reader: Reader, seen: Value | None) -> Seen:
    """A value of which a function can be taken."""
    if not isinstance(seen, Seen):
        raise reader.fail("an elementwise function takes rows or scores first")
    if seen.kind in _OPEN:
        seen = reader.rows(seen)
    if seen.kind not in _CURVED:
        raise reader.fail("an elementwise function takes rows or scores")
    return seen


@handles(*_UNARY)
def _unary(reader: Reader) -> list[Value]:
    seen = _open(reader, reader.inputs[0])
    return _curved(seen, _UNARY[reader.node.op])


@handles("Gelu")
def _gelu(reader: Reader) -> list[Value]:
    seen = _open(reader, reader.inputs[0])
    form = reader.node.attributes.get("approximate", "none")
    if form == "none":
        return _curved(seen, lambda x: 0.5 * x * (1.0 + erf(x / np.sqrt(2.0))))
    if form == "tanh":
        return _curved(seen, lambda x: 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3))))
    raise reader.fail("approximate is none or tanh")


@handles("Clip")
def _clip(reader: Reader) -> list[Value]:
    seen = reader.inputs[0]
    bounds = [reader.scalar(one) for one in (*reader.inputs[1:], None, None)[:2]]
    if not isinstance(seen, Seen) or any(reader.known(place) is None for place in range(1, len(reader.inputs))
                                         if reader.inputs[place] is not None):  # fmt: skip
        raise reader.fail("Clip takes numbers as bounds")
    seen = _open(reader, seen)
    return _curved(seen, lambda x: x if bounds == [None, None] else np.clip(x, bounds[0], bounds[1]))


@handles("IsNaN")
def _is_nan(reader: Reader) -> list[Value]:
    seen = reader.inputs[0]
    if not isinstance(seen, Seen) or seen.kind != "probabilities":
        raise reader.fail("only attention probabilities are asked whether they are NaN")
    return [Seen("invalid", seen.value, seen.axes)]


@handles("Where")
def _where(reader: Reader) -> list[Value]:
    condition, yes, no = reader.inputs
    if isinstance(condition, Seen):
        same = isinstance(no, Seen) and (no.value, no.axes) == (condition.value, condition.axes)
        if condition.kind == "invalid" and same and no is not None and reader.scalar(yes) is not None:
            return [no]  # rows without any key, which texts do not have
        raise reader.fail("a condition must not depend on the rows")
    if condition is None:
        raise reader.fail("a condition and two values are needed")
    return choose(reader, condition.array.astype(bool), yes, no)


@handles(*_BINARY)
def _binary(reader: Reader) -> list[Value]:
    if len(reader.inputs) != 2:
        raise reader.fail(f"{reader.node.op} takes two values")
    if in_integers(reader.inputs):
        return times_scale(reader)
    a, b = reader.inputs
    if isinstance(a, Seen) and isinstance(b, Seen):
        return _of_two(reader, a, b)
    if isinstance(a, Seen) and isinstance(b, Known):
        return _with_known(reader, a, b, swapped=False)
    if isinstance(a, Known) and isinstance(b, Seen):
        if reader.node.op == "Sub" and b.kind == "mean" and (table := as_table(reader, a)) is not None:
            return _of_two(reader, table, b)
        return _with_known(reader, b, a, swapped=True)
    raise reader.fail("two values are needed")


def _of_two(reader: Reader, a: Seen, b: Seen) -> list[Value]:
    op = reader.node.op
    a, b = (reader.rows(one) if one.kind in _OPEN else one for one in (a, b))
    axes = together(a.axes, b.axes)
    whole = axes == a.axes  # else a size of 1 is spread over another axis than that of the same rows
    if op == "Sub" and a.kind in ("rows", "sequences", "table") and b.kind == "mean" and whole and _same(reader, a, b):
        return [Seen("centred", b.value, a.axes, extra=a.kind)]
    if op in ("Div", "Mul") and a.kind == "centred" and b.kind == "variance" and a.curve is None and whole:
        return [divided(reader, a, b)]
    if op in ("Div", "Mul") and "mean square" in (a.kind, b.kind) and a.kind != b.kind:
        rows, square = (a, b) if b.kind == "mean square" else (b, a)
        if (op == "Mul" or square is b) and together(rows.axes, square.axes) == rows.axes:
            return [rooted(reader, rows, square)]
    if op == "Mul" and "norm scale" in (a.kind, b.kind):
        return [scaled(reader, *((a, b) if b.kind == "norm scale" else (b, a)))]
    if op == "Add" and {a.kind, b.kind} == {"scaled", "norm shift"}:
        return [shifted(reader, *((a, b) if a.kind == "scaled" else (b, a)))]
    if op == "Div" and b.kind == "squares" and whole:
        return [normalised(reader, a, b)]
    if op == "Add" and {a.kind, b.kind} <= {"picked", "relative"}:
        return [together_relative(reader, a, b)]
    if op == "Add" and "scores" in (a.kind, b.kind) and {a.kind, b.kind} & {"picked", "relative"}:
        return [added(reader, *((a, b) if a.kind == "scores" else (b, a)))]
    if op == "Add" and {a.kind, b.kind} == {"scores", "bias"}:
        scores, bias = (a, b) if a.kind == "scores" else (b, a)
        return [_biased(reader, scores, bias)]
    if op == "Add" and {a.kind, b.kind} == {"cosines", "sines"}:
        return [turned(reader, *((a, b) if a.kind == "cosines" else (b, a)))]
    if a.kind in _CURVED and a.axes == b.axes and _of_one(a, b):
        other = _curve(b)
        return _curved(a, lambda x: _BINARY[op](x, other))
    if op == "Mul":
        found = gated(reader, a, b) if a.curve is not None else gated(reader, b, a)
        if found is not None:
            return [found]
    if op == "Add" and {a.kind, b.kind} <= {"rows", "sequences"}:
        first, second = reader.rows(a), reader.rows(b)
        names = {labels(first.axes), labels(second.axes)}
        if len(names) == 1 or names == {"b,s,n", "s,n"}:
            fuller = max(first.axes, second.axes, key=lambda one: len(labels(one)))
            if together(first.axes, second.axes) == fuller:
                return [Seen(first.kind, reader.emit("add", first.value, second.value), fuller)]
    raise reader.fail(
        f"{op} takes rows and rows (only Add), a value and a number, or the parts of a layer norm, of an activation or "
        "of a normalisation in their order"
    )


def _of_one(a: Seen, b: Seen) -> bool:
    """Whether both are functions of one value."""
    if (a.kind, a.value) != (b.kind, b.value) or a.hidden is not None or b.hidden is not None:
        return False  # of masked scores one function is taken
    # It tells apart columns and tables, which have names or numbers, and indices, which are one object in one value.
    return a.extra is b.extra or (isinstance(a.extra, int | str) and bool(a.extra == b.extra))


def _same(reader: Reader, rows: Seen, mean: Seen) -> bool:
    return reader.finished(rows).value == mean.value


def _biased(reader: Reader, scores: Seen, bias: Seen) -> Seen:
    fits = labels(scores.axes) == "b,h,q,k" and labels(bias.axes) in ("h,q,k", "b,h,q,k")
    if not fits or together(scores.axes, bias.axes) != scores.axes:
        raise reader.fail("a relative bias is added to scores of the same arrangement")
    scores = reader.finished(scores)
    name = reader.emit("relative_bias", scores.value, bias.value, max_distance=bias.extra)
    return Seen("scores", name, scores.axes, hidden=weaker(scores.hidden, bias.hidden))


def _with_known(reader: Reader, seen: Seen, known: Known, *, swapped: bool) -> list[Value]:
    op, array = reader.node.op, known.array
    vector = known.constant and array.ndim >= 1 and array.shape == (*(1,) * (array.ndim - 1), array.size)
    wide = vector and shape_of(seen.axes)[-1:] == (array.size,) and array.ndim <= len(seen.axes)
    if op == "Add" and seen.kind == "product" and seen.curve is None and wide:
        weight, kind = seen.extra
        bias = reader.constant(known, array.reshape(-1))
        name = reader.emit("linear", seen.value, reader.constant(weight, weight.array.T), bias, activation="none")
        return [Seen(kind, name, seen.axes)]
    if seen.kind == "rooted" and wide and op == "Mul" and seen.extra[1] is None:
        return [Seen("rooted", seen.value, seen.axes, extra=(seen.extra[0], known, seen.extra[2]))]
    if seen.kind == "normed" and wide and op in ("Mul", "Add"):
        return [affine(reader, seen, known)]
    if op == "Mul" and seen.kind in ("rows", "sequences", "product") and wide and array.size > 1:
        return [smoothed(reader, seen, known)]
    if op == "Mul" and seen.kind == "variance" and vector and array.size > 1:
        return [scale_of(reader, seen, known)]
    if op == "Sub" and seen.kind == "scaled mean" and wide and swapped:
        return [shift_of(seen, known)]
    number = reader.scalar(known)
    if number is not None and seen.kind in (*_CURVED, "product") and array.ndim <= len(seen.axes):
        seen = _open(reader, seen)
        function = _BINARY[op]
        return _curved(seen, lambda x: function(number, x) if swapped else function(x, number))
    if op == "Add" and seen.kind in ("scores", "bias"):
        return [add_mask(reader, seen, array)]
    if op == "Add" and seen.kind in ("rows", "product") and _of_positions(reader, known):
        return [with_positions(reader, reader.rows(seen), known)]
    varies = not known.constant or (reader.probe.fixed and array.ndim > 1)
    if op == "Mul" and varies and (seen.kind == "turned" or is_in_heads(seen)):
        return [times_angles(reader, seen, array)]
    if op == "Mul" and seen.kind in ("rows", "product"):
        return [keep_real(reader, reader.rows(seen), array)]
    if op == "Div" and seen.kind == "sum" and not swapped:
        return [average(reader, seen, array)]
    raise reader.fail(
        f"{op} of a value and an array is a bias of a product, gamma and beta of a norm, a number, or a mask made of "
        "the attention mask"
    )


def _of_positions(reader: Reader, known: Known) -> bool:
    """Whether an array may hold rows of positions."""
    return (known.constant and reader.probe.fixed) or reader.table(known) is not None
