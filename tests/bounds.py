"""How far a float32 engine may be from float64: a bound derived from epsilon, the inner sizes and the norms.

Model of rounding: every float32 operation returns its exact result times (1 + d), where the d are independent, have
mean zero and are at most ``unit`` = 2^-24 in size (Higham and Mary, "A new approach to probabilistic rounding error
analysis", SIAM J. Sci. Comput. 41, 2019). Then

- a dot product of ``k`` terms makes k + 1 such errors, each at most ``unit`` times a partial sum. The partial sums walk
  from 0 to the result y in steps x_j w_j, so their root mean square is at most about hypot(|x * w|, |y|) with the
  Euclidean norm of the elementwise product, and the error of the sum has a standard deviation of at most
  ``unit * sqrt(k + 1) * hypot(|x * w|, |y|)``. (|x * w| is |x| |w| / sqrt(k) where no channel stands out, and up to
  |x| |w| where one does: outliers are paid for where they are.)
- errors that come in with the operands leave with the first-order terms of the op, taken as independent: through
  ``x @ w`` with variance ``sum(w^2 var(x))``, through layer norm and softmax with their Jacobians, through an
  activation with its slope;
- exp, tanh and erf are allowed an error of their own, ``elementary``: relative for exp, absolute for the others.

The bound is ``confidence`` standard deviations. Six would do for one number; eight leaves room for the dependence that
the model ignores. It holds for any order of summation and with or without fused multiply-adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from encast.backends.reference import EVALUATORS, Context, Reference
from encast.batch import Batch
from encast.ir import Graph
from encast.ir.relative import distance_rows

__all__ = ["UNIT", "Rules", "Value", "allowed_difference", "exactly", "largest_excess", "per_head", "product", "turned"]

UNIT = 2.0**-24
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Value:
    """A float64 value and the standard deviation of its float32 error, elementwise."""

    exact: Array
    sigma: Array


@dataclass(frozen=True)
class _Probs:
    """Probabilities, and the errors of the scores that they come from: their own are tied by their sum."""

    exact: Array
    score_sigma: Array


def allowed_difference(
    graph: Graph,
    output: str,
    batch: Batch,
    select: Array | None = None,
    *,
    elementary: float = 4 * UNIT,
    confidence: float = 8.0,
) -> tuple[Array, Array]:
    """The output of a plain graph in float64, and how far from it a float32 engine may be, elementwise."""
    name = graph.outputs[output]
    rules = Rules(elementary)
    made = Reference(graph).values([name], batch, select, evaluators=rules.table())[name]
    return made.exact, confidence * made.sigma


def largest_excess(got: Array, exact: Array, allowed: Array) -> float:
    """The largest difference in units of what is allowed; at most 1 passes. Not-a-number counts as infinite."""
    if got.shape != exact.shape:
        raise AssertionError(f"shapes differ: {got.shape} and {exact.shape}")
    ratio = np.abs(got.astype(np.float64) - exact) / np.maximum(allowed, np.finfo(np.float64).tiny)
    return float(np.where(np.isnan(ratio), np.inf, ratio).max(initial=0.0))


class Rules:
    """For every plain op that makes floats: its exact value and how errors pass through it and begin in it."""

    def __init__(self, elementary: float) -> None:
        self.elementary = elementary

    def table(self) -> dict[str, Callable[..., Any]]:
        names = [
            "add",
            "scale",
            "linear",
            "layer_norm",
            "rms_norm",
            "activation",
            "gated_activation",
            "rotary",
            "attention_scores",
            "relative_bias",
            "linear_bias",
            "relative_scores",
            "window_rows",
            "local_mask",
            "hide_keys",
            "softmax",
            "attention_context",
            "pooling",
            "normalize",
            "concat",
        ]
        table = {name: getattr(self, name) for name in names}
        table |= {name: EVALUATORS[name] for name in ("position_ids", "seen_tokens")}
        table["embedding"] = lambda context, ids, rows: exactly(rows[ids])
        table["first_token"] = lambda context, x: _rows(x, context.cu_seqlens[:-1])
        table["select_rows"] = lambda context, x, select: _rows(x, select)
        return table

    def add(self, context: Context, a: Value, b: Value) -> Value:
        total = a.exact + b.exact
        return Value(total, np.sqrt(a.sigma**2 + b.sigma**2 + (UNIT * total) ** 2))

    def scale(self, context: Context, x: Value, *, factor: float) -> Value:
        exact = x.exact * factor
        return Value(exact, np.hypot(factor * x.sigma, 2 * UNIT * exact))

    def linear(
        self, context: Context, x: Value | Array, weight: Array, bias: Array | None, *, activation: str
    ) -> Value:
        made = product(_value(x), exactly(weight.T))
        exact = made.exact if bias is None else made.exact + bias
        return Value(exact, np.hypot(made.sigma, UNIT * np.abs(exact)))

    def layer_norm(self, context: Context, x: Value | Array, gamma: Array, beta: Array, *, eps: float) -> Value:
        x = _value(x)
        size = x.exact.shape[1]
        mean = x.exact.mean(axis=1, keepdims=True)
        centred = x.exact - mean
        inverse = 1.0 / np.sqrt((centred * centred).mean(axis=1, keepdims=True) + eps)
        unit_rows = centred * inverse
        exact = unit_rows * gamma + beta
        # d(unit_rows) = inverse * (dx - mean(dx) - unit_rows * mean(unit_rows * dx))
        variance = x.sigma**2
        passed = variance * (1 - 2 * (1 + unit_rows**2) / size)
        passed += variance.mean(axis=1, keepdims=True) / size
        passed += unit_rows**2 * (unit_rows**2 * variance).mean(axis=1, keepdims=True) / size
        passed += 2 * unit_rows * (unit_rows * variance).mean(axis=1, keepdims=True) / size
        of_mean = UNIT**2 / 3 * ((x.exact**2).mean(axis=1, keepdims=True) / 2 + size * mean**2 / 3)
        of_centring = (UNIT * centred) ** 2
        # Half of the relative error of the variance (a sum of squares), and four operations on the way to the result.
        of_scaling = UNIT * math.sqrt(size / 36 + 4) * unit_rows
        made = np.sqrt(inverse**2 * (np.maximum(passed, 0) + of_mean + of_centring) + of_scaling**2)
        return Value(exact, np.hypot(gamma * made, 2 * UNIT * exact))

    def rms_norm(self, context: Context, x: Value | Array, gamma: Array, *, eps: float) -> Value:
        x = _value(x)
        size = x.exact.shape[1]
        inverse = 1.0 / np.sqrt((x.exact**2).mean(axis=1, keepdims=True) + eps)
        unit_rows = x.exact * inverse
        exact = unit_rows * gamma
        # As above without a mean: d(unit_rows) = inverse * (dx - unit_rows * mean(unit_rows * dx))
        variance = x.sigma**2
        passed = variance * (1 - 2 * unit_rows**2 / size)
        passed += unit_rows**2 * (unit_rows**2 * variance).mean(axis=1, keepdims=True) / size
        of_scaling = UNIT * math.sqrt(size / 36 + 4) * unit_rows
        made = np.sqrt(inverse**2 * np.maximum(passed, 0) + of_scaling**2)
        return Value(exact, np.hypot(gamma * made, 2 * UNIT * exact))

    def activation(self, context: Context, x: Value, *, kind: str) -> Value:
        def apply(x: Array) -> Array:
            return np.asarray(EVALUATORS["activation"](context, x, kind=kind))

        step = 1e-4
        slope = (apply(x.exact + step) - apply(x.exact - step)) / (2 * step)
        # At the corner of relu the slope jumps; an error may cross it.
        slope = np.maximum(np.abs(slope), (kind == "relu") * (np.abs(x.exact) < 8 * x.sigma))
        exact = apply(x.exact)
        own = {"relu": 0.0, "tanh": self.elementary}.get(kind, self.elementary * np.abs(x.exact))
        return Value(exact, np.sqrt((slope * x.sigma) ** 2 + own**2 + (4 * UNIT * exact) ** 2))

    def gated_activation(self, context: Context, x: Value, *, kind: str) -> Value:
        half = x.exact.shape[1] // 2
        a = self.activation(context, Value(x.exact[:, :half], x.sigma[:, :half]), kind=kind)
        b = Value(x.exact[:, half:], x.sigma[:, half:])
        exact = a.exact * b.exact
        return Value(exact, np.sqrt((a.sigma * b.exact) ** 2 + (b.sigma * a.exact) ** 2 + (UNIT * exact) ** 2))

    def rotary(self, context: Context, x: Value, *, heads: int, theta: float, rate: float) -> Value:
        size = x.exact.shape[1] // heads
        angles = np.concatenate([np.arange(length) for _, _, length in context.sequences()])[:, None]
        angles = angles * rate * theta ** (-np.arange(0, size, 2) / size)
        return turned(x, np.cos(angles), np.sin(angles))

    def attention_scores(self, context: Context, q: Value, k: Value, *, heads: int) -> Value:
        parts = []
        for rows, _, _ in context.sequences():
            of_q, of_k = per_head(_rows(q, rows), heads), per_head(_rows(k, rows), heads)
            transposed = Value(of_k.exact.transpose(0, 2, 1), of_k.sigma.transpose(0, 2, 1))
            made = product(of_q, transposed)
            parts.append(Value(made.exact.reshape(heads, -1), made.sigma.reshape(heads, -1)))
        return _joined(parts, axis=1)

    def relative_bias(self, context: Context, scores: Value, table: Array, *, max_distance: int) -> Value:
        exact = EVALUATORS["relative_bias"](context, scores.exact, table, max_distance=max_distance)
        return Value(exact, np.hypot(scores.sigma, UNIT * exact))

    def linear_bias(self, context: Context, scores: Value, slopes: Array) -> Value:
        exact = EVALUATORS["linear_bias"](context, scores.exact, slopes)
        # The rounding of what is taken away, and that of the sum.
        return Value(exact, np.sqrt(scores.sigma**2 + UNIT**2 * (exact**2 + (exact - scores.exact) ** 2)))

    def relative_scores(
        self, context: Context, scores: Value, x: Value, table: Value | Array, *, of: str, max_distance: int
    ) -> Value:
        heads = len(scores.exact)
        table = _value(table)
        of_table = per_head(table, heads if table.exact.shape[1] == x.exact.shape[1] else 1)
        transposed = Value(of_table.exact.transpose(0, 2, 1), of_table.sigma.transpose(0, 2, 1))
        exact, sigma = scores.exact.copy(), scores.sigma.copy()
        for rows, pairs, length in context.sequences():
            made = product(per_head(_rows(x, rows), heads), transposed)
            queries, keys = np.arange(length)[:, None], np.arange(length)[None, :]
            place = (
                slice(None),
                queries if of == "query" else keys,
                distance_rows(queries - keys, len(table.exact) // 2, max_distance),
            )
            exact[:, pairs] += made.exact[place].reshape(heads, -1)
            of_sum = UNIT * exact[:, pairs]
            sigma[:, pairs] = np.sqrt(sigma[:, pairs] ** 2 + made.sigma[place].reshape(heads, -1) ** 2 + of_sum**2)
        return Value(exact, sigma)

    def window_rows(self, context: Context, x: Value, *, width: int) -> Value:
        return Value(*(EVALUATORS["window_rows"](context, part, width=width) for part in (x.exact, x.sigma)))

    def local_mask(self, context: Context, scores: Value, *, reach: int) -> Value:
        exact = EVALUATORS["local_mask"](context, scores.exact, reach=reach)
        return Value(exact, np.where(np.isinf(exact), 0.0, scores.sigma))

    def hide_keys(self, context: Context, scores: Value, seen: Any) -> Value:
        exact = EVALUATORS["hide_keys"](context, scores.exact, seen)
        return Value(exact, np.where(np.isinf(exact), 0.0, scores.sigma))

    def softmax(self, context: Context, scores: Value) -> _Probs:
        exact, sigma = np.empty_like(scores.exact), np.empty_like(scores.exact)
        for _, pairs, length in context.sequences():
            x = scores.exact[:, pairs].reshape(-1, length)
            below = x.max(axis=1, keepdims=True) - x
            probs = np.exp(-below)
            probs /= probs.sum(axis=1, keepdims=True)
            exact[:, pairs] = probs.reshape(len(exact), -1)
            # A relative error of an exponential counts like an absolute one of its score.
            own = np.where(np.isinf(below), 0.0, UNIT * below + self.elementary).reshape(len(exact), -1)
            sigma[:, pairs] = np.hypot(scores.sigma[:, pairs], own)
        return _Probs(exact, sigma)

    def attention_context(self, context: Context, probs: _Probs, v: Value) -> Value:
        heads = len(probs.exact)
        parts = []
        for rows, pairs, length in context.sequences():
            p = probs.exact[:, pairs].reshape(heads, length, length)
            of_v = per_head(_rows(v, rows), heads)
            made = product(exactly(p), of_v)
            # dp = p * (ds - sum(p * ds)), so the context c = sum(p * v) moves by sum(p * (v - c) * ds).
            weights = (p * probs.score_sigma[:, pairs].reshape(heads, length, length)) ** 2
            total = weights.sum(axis=2, keepdims=True)
            passed = weights @ of_v.exact**2 - 2 * made.exact * (weights @ of_v.exact) + made.exact**2 * total
            of_sum = UNIT * math.sqrt(length / 9 + 4) * made.exact
            sigma = np.sqrt(made.sigma**2 + np.maximum(passed, 0) + of_sum**2)
            parts.append(Value(*(x.transpose(1, 0, 2).reshape(length, -1) for x in (made.exact, sigma))))
        return _joined(parts, axis=0)

    def pooling(self, context: Context, x: Value, *, modes: list[str]) -> Value:
        exact = EVALUATORS["pooling"](context, x.exact, modes=modes)
        sigmas = []
        for rows, _, length in context.sequences():
            part = _rows(x, rows)
            weights = {
                "mean": np.full(length, 1 / length),
                "mean_sqrt_len_tokens": np.full(length, 1 / math.sqrt(length)),
                "weightedmean": np.arange(1, length + 1) * 2.0 / (length * (length + 1)),
            }
            row = []
            for mode in modes:
                if mode in weights:
                    made = product(exactly(weights[mode][None, :]), part)
                    row.append(np.hypot(made.sigma[0], 2 * UNIT * made.exact[0]))
                else:
                    index = {"cls": slice(0, 1), "lasttoken": slice(-1, None), "max": slice(None)}[mode]
                    row.append(part.sigma[index].max(axis=0))
            sigmas.append(np.concatenate(row))
        return Value(exact, np.array(sigmas))

    def normalize(self, context: Context, x: Value) -> Value:
        length = np.sqrt((x.exact**2).sum(axis=1, keepdims=True))
        exact = x.exact / length
        # d(exact) = (dx - exact * sum(exact * dx)) / length
        variance = x.sigma**2 / length**2
        passed = variance * (1 - 2 * exact**2) + exact**2 * (exact**2 * variance).sum(axis=1, keepdims=True)
        own = UNIT * math.sqrt(x.exact.shape[1] / 36 + 4) * exact
        return Value(exact, np.sqrt(np.maximum(passed, 0) + own**2))

    def concat(self, context: Context, a: Value, b: Value, c: Value | None) -> Value:
        return _joined([a, b, *(() if c is None else (c,))], axis=1)


def turned(x: Value, cos: Array, sin: Array) -> Value:
    """Every head's pairs turned, ``cos`` and ``sin``: ``[rows, head_dim / 2]``, each rounded once to float32."""
    half = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    a, b, of_a, of_b = (
        part.reshape(len(part), -1, 2, half)[:, :, side] for part in (x.exact, x.sigma) for side in (0, 1)
    )

    def whole(first: Array, second: Array) -> Array:
        return np.stack([first, second], axis=2).reshape(x.exact.shape)

    exact = whole(a * cos - b * sin, b * cos + a * sin)
    passed = whole((cos * of_a) ** 2 + (sin * of_b) ** 2, (cos * of_b) ** 2 + (sin * of_a) ** 2)
    terms = whole((a * cos) ** 2 + (b * sin) ** 2, (b * cos) ** 2 + (a * sin) ** 2)
    # Of each term the rounding of the table and that of the product, and that of the sum.
    return Value(exact, np.sqrt(passed + UNIT**2 * (2 * terms + exact**2)))


def exactly(x: Array) -> Value:
    """A value that has no error."""
    return Value(x, np.zeros_like(x))


def _value(x: Value | Array) -> Value:
    """An operand that may be a constant, which has no error."""
    return x if isinstance(x, Value) else exactly(x)


def _rows(x: Value, index: Any) -> Value:
    return Value(x.exact[index], x.sigma[index])


def per_head(x: Value, heads: int) -> Value:
    """``[rows, heads * head_dim]`` as ``[heads, rows, head_dim]``."""
    return Value(*(part.reshape(len(part), heads, -1).transpose(1, 0, 2) for part in (x.exact, x.sigma)))


def _joined(parts: list[Value], axis: int) -> Value:
    return Value(*(np.concatenate([getattr(part, name) for part in parts], axis) for name in ("exact", "sigma")))


def product(a: Value, b: Value) -> Value:
    """``a @ b`` over the last two axes, with the error of the sums and the errors of both operands."""
    exact = a.exact @ b.exact
    squares_a, squares_b = a.exact**2, b.exact**2
    passed = squares_a @ b.sigma**2 + a.sigma**2 @ squares_b
    own = UNIT**2 / 3 * (a.exact.shape[-1] + 1) * (squares_a @ squares_b / 2 + exact**2 / 3)
    return Value(exact, np.sqrt(passed + own))
