"""Layer norms: the op of opset 17, and what its parts make of each other.

The parts come in two forms. torch divides centred rows by their deviation, and then multiplies by gamma and adds beta.
TensorFlow multiplies the rows, and apart from them their mean, by gamma over the deviation, and adds up what it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from encast.importers.onnx.reader import Reader, Value, handles
from encast.importers.onnx.values import Known, Seen, arguments, labels, shape_of

__all__ = ["affine", "divided", "layer_normalization", "rooted", "scale_of", "scaled", "shift_of", "shifted"]

Array = np.ndarray[Any, Any]

_DEVIATION = "a layer norm divides by the root of its own variance plus a number above 0"


@handles("LayerNormalization")
def layer_normalization(reader: Reader) -> list[Value]:
    """Over the columns, with gamma, and with beta or without."""
    rows = reader.rows(reader.inputs[0])
    gamma, beta = reader.known(1), reader.known(2)
    if gamma is not None and all(one is None for one in reader.inputs[2:]):
        beta = Known(reader.zeros(gamma.array.size), constant=True)
    given = reader.node.attributes
    columns = shape_of(rows.axes)[-1:]
    plain = labels(rows.axes[-1:]) == "n" and given.get("axis", -1) in (-1, len(rows.axes) - 1)
    if gamma is None or beta is None or not plain or not gamma.array.shape == beta.array.shape == columns:
        raise reader.fail("a layer norm goes over the columns and has gamma, and beta or none")
    eps = float(str(np.float32(given.get("epsilon", 1e-5))))
    names = [reader.constant(one, one.array.reshape(-1)) for one in (gamma, beta)]
    return [Seen(rows.kind, reader.emit("layer_norm", rows.value, *names, eps=eps), rows.axes)]


def divided(reader: Reader, centred: Seen, variance: Seen) -> Seen:
    """Centred rows over their deviation."""
    with np.errstate(all="ignore"):
        curve = _curve(variance) if reader.node.op == "Div" else 1.0 / _curve(variance)
    eps = _epsilon(variance, curve)
    if eps is None or centred.value != variance.value:
        raise reader.fail(_DEVIATION)
    return Seen("normed", centred.value, centred.axes, extra=(eps, None, centred.extra))


def affine(reader: Reader, seen: Seen, known: Known) -> Seen:
    """Times gamma, and then plus beta."""
    eps, gamma, kind = seen.extra
    if reader.node.op == "Mul" and gamma is None:
        return Seen("normed", seen.value, seen.axes, extra=(eps, known, kind))
    if reader.node.op == "Add" and gamma is not None:
        return _emit(reader, Seen(kind, seen.value, seen.axes), eps, gamma, known)
    raise reader.fail("a layer norm multiplies by gamma and then adds beta")


@dataclass(frozen=True)
class Scale:
    """Gamma over the deviation; ``beta`` is there once the scaled mean was taken from it."""

    eps: float
    gamma: Known
    beta: Known | None = None


def scale_of(reader: Reader, variance: Seen, gamma: Known) -> Seen:
    """One over the deviation, times gamma."""
    with np.errstate(all="ignore"):
        eps = _epsilon(variance, 1.0 / _curve(variance))
    if eps is None or variance.axes[-1:] != ((),):
        raise reader.fail(_DEVIATION)
    axes = (*variance.axes[:-1], (("n", gamma.array.size),))
    return Seen("norm scale", variance.value, axes, extra=Scale(eps, gamma))


def scaled(reader: Reader, seen: Seen, scale: Seen) -> Seen:
    """Rows, or their mean, times gamma over their deviation."""
    if seen.kind != "mean":
        seen = reader.rows(seen)
    made = "scaled mean" if seen.kind == "mean" else "scaled"
    wanted = scale.axes if made == "scaled" else (*scale.axes[:-1], ())
    if seen.kind not in ("mean", "rows", "sequences") or seen.axes != wanted or seen.curve is not None:
        raise reader.fail("gamma over a deviation is multiplied with the rows that it is of, or with their mean")
    if seen.value != scale.value:
        raise reader.fail(_DEVIATION)
    return Seen(made, seen.value, scale.axes, extra=scale.extra if made == "scaled mean" else (scale.extra, seen.kind))


def shift_of(mean: Seen, beta: Known) -> Seen:
    """Beta less the scaled mean."""
    held: Scale = mean.extra
    return Seen("norm shift", mean.value, mean.axes, extra=Scale(held.eps, held.gamma, beta))


def shifted(reader: Reader, rows: Seen, shift: Seen) -> Seen:
    """Scaled rows plus their shift: a layer norm."""
    held, kind = rows.extra
    whole: Scale = shift.extra
    alike = (rows.value, rows.axes, held.eps) == (shift.value, shift.axes, whole.eps)
    if not alike or held.gamma is not whole.gamma or whole.beta is None:
        raise reader.fail("a layer norm scales rows and their mean by the same gamma and deviation")
    return _emit(reader, Seen(kind, rows.value, rows.axes), held.eps, held.gamma, whole.beta)


@handles("RMSNormalization")
def _rms_normalization(reader: Reader) -> list[Value]:
    """The op of opset 23, over the columns."""
    rows, gamma, given = reader.rows(reader.inputs[0]), reader.known(1), reader.node.attributes
    plain = labels(rows.axes[-1:]) == "n" and given.get("axis", -1) in (-1, len(rows.axes) - 1)
    if gamma is None or not plain or gamma.array.shape != shape_of(rows.axes)[-1:]:
        raise reader.fail("a norm by the root mean square goes over the columns and has gamma")
    eps = float(str(np.float32(given.get("epsilon", 1e-5))))
    return [
        Seen(rows.kind, reader.emit("rms_norm", rows.value, reader.constant(gamma, gamma.array), eps=eps), rows.axes)
    ]


def rooted(reader: Reader, rows: Seen, square: Seen) -> Seen:
    """Rows over the root of their mean square (Zhang and Sennrich 2019), before gamma."""
    rows = reader.rows(rows)
    with np.errstate(all="ignore"):
        eps = _epsilon(square, _curve(square) if reader.node.op == "Div" else 1.0 / _curve(square))
    if eps is None or rows.value != square.value:
        raise reader.fail(
            "a norm by the root mean square divides by the root of its rows' own mean square plus a number"
        )
    return Seen("rooted", rows.value, rows.axes, extra=(eps, None, rows.kind))


def _curve(seen: Seen) -> Array:
    return arguments(seen) if seen.curve is None else seen.curve


def _epsilon(variance: Seen, deviation: Array) -> float | None:
    """What is added to a variance whose ``deviation`` is taken; None if it is none."""
    square = float(deviation[0]) ** 2
    fits = np.allclose(deviation, np.sqrt(arguments(variance) + square), rtol=1e-6, atol=0.0)
    return float(str(np.float32(square))) if square > 0.0 and fits else None


def _emit(reader: Reader, rows: Seen, eps: float, gamma: Known, beta: Known) -> Seen:
    names = [reader.constant(one, one.array.reshape(-1)) for one in (gamma, beta)]
    return Seen(rows.kind, reader.emit("layer_norm", rows.value, *names, eps=eps), rows.axes)
