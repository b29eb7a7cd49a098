"""One function an op: its definition in ``encast.ir.ops``, spelled out in NumPy.

An evaluator gets the context, the operands in the table's order (None for an absent one) and the attributes by
name, and returns the value, or a tuple of values.
"""

# mypy: disable-error-code="no-any-return"
# (NumPy types the result of an operator between two arrays as Any.)

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from encast.backends.reference.coarse import BUMPS, coarse
from encast.errors import GraphError
from encast.ir.blocks import unpack_blocks
from encast.ir.ops import ATTENTION_KEY_BLOCK, LOCAL_QUERY_BLOCK
from encast.ir.relative import distance_origin, distance_rows, relative_buckets, unpack_distances

__all__ = ["EVALUATORS", "Context", "Float64", "Quantized"]

Float64 = np.ndarray[Any, np.dtype[np.float64]]
Ids = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class Context:
    """What evaluators know of the batch besides their operands: ``cu_seqlens: i32[seqs + 1]``."""

    cu_seqlens: Ids

    def sequences(self) -> Iterator[tuple[slice, slice, int]]:
        """For every sequence: its rows, its columns in a value of ``pairs``, and its length."""
        pairs = 0
        for begin, end in zip(self.cu_seqlens[:-1], self.cu_seqlens[1:], strict=True):
            length = int(end) - int(begin)
            yield slice(int(begin), int(end)), slice(pairs, pairs + length * length), length
            pairs += length * length

    def attended(self, seen: Ids | None) -> Iterator[tuple[slice, int, int]]:
        """For every sequence: its rows, its length, and how many of its first tokens are keys."""
        lengths = np.diff(self.cu_seqlens) if seen is None else seen
        for (rows, _, length), keys in zip(self.sequences(), lengths, strict=True):
            yield rows, length, int(keys)


@dataclass(frozen=True)
class Quantized:
    """A q8 value: ``bytes: u8[rows, cols]``, ``scale: f32[rows]``, ``zero: i32[rows]``."""

    bytes: np.ndarray[Any, np.dtype[np.uint8]]
    scale: np.ndarray[Any, np.dtype[np.float32]]
    zero: np.ndarray[Any, np.dtype[np.int32]]

    def centred(self) -> Float64:
        """``byte - zero``, exact."""
        return self.bytes.astype(np.float64) - self.zero[:, None]


EVALUATORS: dict[str, Callable[..., Any]] = {}


def _evaluates(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        EVALUATORS[name] = function
        return function

    return register


# Plain ops


@_evaluates("position_ids")
def _position_ids(context: Context, token_ids: Ids, *, offset: int, skip_id: int) -> Ids:
    positions = np.empty_like(token_ids)
    for rows, _, length in context.sequences():
        if skip_id < 0:
            positions[rows] = np.arange(length) + offset
        else:
            counted = token_ids[rows] != skip_id
            positions[rows] = np.where(counted, np.cumsum(counted) - 1 + offset, offset - 1)
    return positions


@_evaluates("embedding")
def _embedding(context: Context, ids: Ids, table: Float64) -> Float64:
    return table[ids]


@_evaluates("add")
def _add(context: Context, a: Float64, b: Float64) -> Float64:
    return a + b


@_evaluates("scale")
def _scale(context: Context, x: Float64, *, factor: float) -> Float64:
    return x * factor


@_evaluates("linear")
def _linear(context: Context, x: Float64, weight: Float64, bias: Float64 | None, *, activation: str) -> Float64:
    product = x @ weight.T
    return _activated(product if bias is None else product + bias, activation)


@_evaluates("layer_norm")
def _layer_norm(context: Context, x: Float64, gamma: Float64, beta: Float64, *, eps: float) -> Float64:
    centred = x - x.mean(axis=1, keepdims=True)
    variance = (centred * centred).mean(axis=1, keepdims=True)
    return centred / np.sqrt(variance + eps) * gamma + beta


@_evaluates("rms_norm")
def _rms_norm(context: Context, x: Float64, gamma: Float64, *, eps: float) -> Float64:
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps) * gamma


_erf = np.frompyfunc(math.erf, 1, 1)


def _activated(x: Float64, kind: str) -> Float64:
    if kind == "gelu":
        return 0.5 * x * (1.0 + np.asarray(_erf(x / math.sqrt(2.0)), np.float64))
    if kind == "gelu_tanh":
        return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    if kind == "relu":
        return np.maximum(x, 0.0)
    if kind == "silu":
        # x * sigmoid(x), with the exponential of a number that is never positive, which cannot overflow.
        decay = np.exp(-np.abs(x))
        return x * np.where(x >= 0.0, 1.0, decay) / (1.0 + decay)
    if kind in BUMPS:
        return coarse(x, kind)
    return np.tanh(x) if kind == "tanh" else x


@_evaluates("activation")
def _activation(context: Context, x: Float64, *, kind: str) -> Float64:
    return _activated(x, kind)


@_evaluates("gated_activation")
def _gated_activation(context: Context, x: Float64, *, kind: str) -> Float64:
    a, b = np.split(x, 2, axis=1)
    return _activated(a, kind) * b


@_evaluates("rotary")
def _rotary(context: Context, x: Float64, *, heads: int, theta: float, rate: float) -> Float64:
    size = x.shape[1] // heads
    angles = _positions(context)[:, None] * rate * theta ** (-np.arange(0, size, 2) / size)
    return _turned(x, np.cos(angles), np.sin(angles))


def _positions(context: Context) -> Ids:
    """The place of every row in its sequence."""
    return np.concatenate([np.empty(0, np.int32), *(np.arange(length) for _, _, length in context.sequences())])


def _turned(x: Float64, cos: Float64, sin: Float64) -> Float64:
    """Every head of ``x`` with its pairs turned; ``cos`` and ``sin`` are ``[rows, head_dim / 2]``."""
    pairs = x.reshape(len(x), -1, 2, cos.shape[1])
    a, b = pairs[:, :, 0], pairs[:, :, 1]
    cos, sin = cos[:, None], sin[:, None]
    return np.stack([a * cos - b * sin, b * cos + a * sin], axis=2).reshape(x.shape)


def _per_head(x: Float64, heads: int) -> Float64:
    """``[rows, heads * head_dim]`` as ``[heads, rows, head_dim]``."""
    return x.reshape(x.shape[0], heads, -1).transpose(1, 0, 2)


@_evaluates("attention_scores")
def _attention_scores(context: Context, q: Float64, k: Float64, *, heads: int) -> Float64:
    parts = [
        (_per_head(q[rows], heads) @ _per_head(k[rows], heads).transpose(0, 2, 1)).reshape(heads, -1)
        for rows, _, _ in context.sequences()
    ]
    return np.concatenate([np.empty((heads, 0)), *parts], axis=1)


@_evaluates("relative_bias")
def _relative_bias(context: Context, scores: Float64, table: Float64, *, max_distance: int) -> Float64:
    result = scores.copy()
    for _, pairs, length in context.sequences():
        positions = np.arange(length)
        buckets = relative_buckets(positions[None, :] - positions[:, None], table.shape[0], max_distance)
        result[:, pairs] += table[buckets.reshape(-1)].T
    return result


@_evaluates("linear_bias")
def _linear_bias(context: Context, scores: Float64, slopes: Float64) -> Float64:
    result = scores.copy()
    for _, pairs, length in context.sequences():
        positions = np.arange(length)
        distances = np.abs(positions[None, :] - positions[:, None]).reshape(-1)
        result[:, pairs] -= slopes[:, None] * distances
    return result


@_evaluates("relative_scores")
def _relative_scores(
    context: Context, scores: Float64, x: Float64, table: Float64, *, of: str, max_distance: int
) -> Float64:
    result = scores.copy()
    by_head = _per_head(table, len(scores) if table.shape[1] == x.shape[1] else 1).transpose(0, 2, 1)
    for rows, pairs, length in context.sequences():
        queries, keys = np.arange(length)[:, None], np.arange(length)[None, :]
        at = distance_rows(queries - keys, len(table) // 2, max_distance)
        products = _per_head(x[rows], len(scores)) @ by_head
        result[:, pairs] += products[:, queries if of == "query" else keys, at].reshape(len(scores), -1)
    return result


@_evaluates("local_mask")
def _local_mask(context: Context, scores: Float64, *, reach: int) -> Float64:
    result = scores.copy()
    for _, pairs, length in context.sequences():
        result[:, pairs][:, _far(np.arange(length), np.arange(length), reach).reshape(-1)] = -np.inf
    return result


def _far(queries: Any, keys: Any, reach: int) -> Any:
    """``bool[queries, keys]``: whether a key is further than ``reach`` from a query."""
    return np.abs(keys[None, :] - queries[:, None]) > reach


@_evaluates("seen_tokens")
def _seen_tokens(context: Context, token_ids: Ids, *, token: int, most: int) -> Ids:
    counts = []
    for rows, _, length in context.sequences():
        at_end = int(np.cumprod(token_ids[rows][::-1] == token).sum())
        counts.append(max(length - min(at_end, most), 1))
    return np.array(counts, np.int32)


@_evaluates("hide_keys")
def _hide_keys(context: Context, scores: Float64, seen: Ids) -> Float64:
    result = scores.copy()
    for (_, pairs, length), count in zip(context.sequences(), seen, strict=True):
        result[:, pairs].reshape(-1, length, length)[:, :, count:] = -np.inf
    return result


@_evaluates("softmax")
def _softmax(context: Context, scores: Float64) -> Float64:
    result = np.empty_like(scores)
    for _, pairs, length in context.sequences():
        rows = scores[:, pairs].reshape(-1, length)
        powers = np.exp(rows - rows.max(axis=1, keepdims=True))
        result[:, pairs] = (powers / powers.sum(axis=1, keepdims=True)).reshape(scores.shape[0], -1)
    return result


@_evaluates("attention_context")
def _attention_context(context: Context, probs: Float64, v: Float64) -> Float64:
    heads = probs.shape[0]
    result = np.empty_like(v)
    for rows, pairs, length in context.sequences():
        mixed = probs[:, pairs].reshape(heads, length, length) @ _per_head(v[rows], heads)
        result[rows] = mixed.transpose(1, 0, 2).reshape(length, -1)
    return result


@_evaluates("window_rows")
def _window_rows(context: Context, x: Float64, *, width: int) -> Float64:
    reach, cols = width // 2, x.shape[1]
    result = np.zeros((len(x), width * cols))
    for rows, _, length in context.sequences():
        around = np.pad(x[rows], ((reach, reach), (0, 0)))
        result[rows] = np.concatenate([around[place : place + length] for place in range(width)], axis=1)
    return result


@_evaluates("first_token")
def _first_token(context: Context, x: Float64) -> Float64:
    return x[context.cu_seqlens[:-1]]


@_evaluates("select_rows")
def _select_rows(context: Context, x: Float64, select: Ids) -> Float64:
    return x[select]


def _pooled(x: Float64, mode: str) -> Float64:
    if mode == "cls":
        return x[0]
    if mode == "lasttoken":
        return x[-1]
    if mode == "max":
        return x.max(axis=0)
    if mode == "weightedmean":
        weights = np.arange(1.0, len(x) + 1.0)
        return weights @ x / weights.sum()
    return x.sum(axis=0) / (len(x) if mode == "mean" else math.sqrt(len(x)))


@_evaluates("pooling")
def _pooling(context: Context, x: Float64, *, modes: Sequence[str]) -> Float64:
    rows = [np.concatenate([_pooled(x[rows], mode) for mode in modes]) for rows, _, _ in context.sequences()]
    return np.array(rows, np.float64).reshape(-1, x.shape[1] * len(modes))


@_evaluates("normalize")
def _normalize(context: Context, x: Float64) -> Float64:
    return x / np.maximum(np.sqrt((x * x).sum(axis=1, keepdims=True)), 1e-12)


@_evaluates("concat")
def _concat(context: Context, a: Float64, b: Float64, c: Float64 | None) -> Float64:
    return np.concatenate([a, b, *(() if c is None else (c,))], axis=1)


# Fused ops


@_evaluates("embed_layer_norm")
def _embed_layer_norm(
    context: Context,
    token_ids: Ids,
    token_type_ids: Ids | None,
    word: Float64,
    position: Float64 | None,
    token_type: Float64 | None,
    gamma: Float64,
    beta: Float64,
    *,
    eps: float,
    position_offset: int,
    position_skip_id: int,
) -> Float64:
    total = word[token_ids]
    if token_type is not None:
        total = total + token_type[token_type_ids]
    if position is not None:
        total = total + position[_position_ids(context, token_ids, offset=position_offset, skip_id=position_skip_id)]
    return _layer_norm(context, total, gamma, beta, eps=eps)


@_evaluates("attention")
def _attention(
    context: Context,
    qkv: Float64,
    bias: Float64 | None,
    seen: Ids | None = None,
    *,
    heads: int,
    scale: float,
    products: str,
) -> Float64:
    hidden = qkv.shape[1] // 3
    result = np.empty((len(qkv), hidden))
    for rows, length, keys in context.attended(seen):
        q, k, v = (_per_head(part, heads) for part in np.split(qkv[rows], 3, axis=1))
        k, v = k[:, :keys], v[:, :keys]
        added: Any = 0.0
        if bias is not None:
            positions = np.arange(length)
            added = bias[:, positions[None, :keys] - positions[:, None] + (bias.shape[1] + 1) // 2 - 1]
        mixed = np.empty((heads, length, hidden // heads))
        for head in range(heads):
            one = added if bias is None else added[head]
            mixed[head] = _ATTENTION[products](q[head], k[head], v[head], one, scale)
        result[rows] = mixed.transpose(1, 0, 2).reshape(length, -1)
    return result


@_evaluates("local_attention")
def _local_attention(
    context: Context, qkv: Float64, seen: Ids | None = None, *, heads: int, scale: float, products: str, reach: int
) -> Float64:
    hidden = qkv.shape[1] // 3
    result = np.empty((len(qkv), hidden))
    for rows, length, last in context.attended(seen):
        q, k, v = (_per_head(part, heads) for part in np.split(qkv[rows], 3, axis=1))
        for begin in range(0, length, LOCAL_QUERY_BLOCK):
            queries = np.arange(begin, min(begin + LOCAL_QUERY_BLOCK, length))
            keys = np.arange(max(begin - reach, 0), min(begin + LOCAL_QUERY_BLOCK + reach, last))
            hidden_keys = np.where(_far(queries, keys, reach), -np.inf, 0.0)
            for head in range(heads):
                columns = slice(head * (hidden // heads), (head + 1) * (hidden // heads))
                result[rows][queries, columns] = _ATTENTION[products](
                    q[head][queries], k[head][keys], v[head][keys], hidden_keys, scale
                )
    return result


@_evaluates("disentangled_attention")
def _disentangled_attention(
    context: Context,
    qkv: Float64,
    key_table: Float64 | None,
    query_table: Float64 | None,
    *,
    heads: int,
    scale: float,
    products: str,
    shared: bool,
) -> Float64:
    hidden = qkv.shape[1] // 3
    result = np.empty((len(qkv), hidden))
    tables = [
        None if table is None else unpack_distances(table, 1 if shared else heads, hidden // heads)
        for table in (key_table, query_table)
    ]
    for rows, _, length in context.sequences():
        q, k, v = (_per_head(part, heads) for part in np.split(qkv[rows], 3, axis=1))
        queries, keys = np.arange(length)[:, None], np.arange(length)[None, :]
        for head in range(heads):
            added: Any = 0.0
            for table, x, at, distances in zip(
                tables, (q, k), (queries, keys), (keys - queries, queries - keys), strict=True
            ):
                if table is not None:
                    vectors = table[0 if shared else head]
                    added = added + (x[head] @ vectors.T)[at, distances + distance_origin(len(vectors))]
            columns = slice(head * (hidden // heads), (head + 1) * (hidden // heads))
            result[rows][:, columns] = _ATTENTION[products](q[head], k[head], v[head], added * scale, scale)
    return result


@_evaluates("rotary_qkv")
def _rotary_qkv(context: Context, qkv: Float64, table: Float64, *, heads: int) -> Float64:
    turned = qkv.shape[1] // 3 * 2
    cos, sin = np.split(table[_positions(context)], 2, axis=1)
    return np.concatenate([_turned(qkv[:, :turned], cos, sin), qkv[:, turned:]], axis=1)


def _attention_f32(q: Float64, k: Float64, v: Float64, added: Any, scale: float) -> Float64:
    scores = q @ k.T * scale + added
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers @ v / powers.sum(axis=1, keepdims=True)


def _attention_bf16(q: Float64, k: Float64, v: Float64, added: Any, scale: float) -> Float64:
    q, k, v = (_bf16(part) for part in (q, k, v))
    scores = q @ k.T * scale + added
    powers = _bf16(np.exp(scores - scores.max(axis=1, keepdims=True)))
    return powers @ v / powers.sum(axis=1, keepdims=True)


def _attention_int8(q: Float64, k: Float64, v: Float64, added: Any, scale: float) -> Float64:
    one, levels = np.float32(1), np.float32(127)
    q32, k32, v32 = (part.astype(np.float32) for part in (q, k, v))
    centre = (k32.max(axis=0) + k32.min(axis=0)) * np.float32(0.5)
    extent = (k32.max(axis=0) - k32.min(axis=0)) * np.float32(0.5)
    inverse = _reciprocal(levels, extent)
    key_scale = np.where(inverse > 0, extent / levels, np.float32(0))
    key_codes = np.rint((k32 - centre) * inverse).astype(np.float64)

    scaled = q32 * key_scale
    largest = np.abs(scaled).max(axis=1, keepdims=True)
    query_codes = np.rint(scaled * _reciprocal(levels, largest)).astype(np.float64)
    scores = query_codes @ key_codes.T * (largest / levels).astype(np.float64) * scale + added

    # A running sum, because the order of the additions is part of the bits.
    mean = np.cumsum(v32, axis=0, dtype=np.float32)[-1] / np.float32(len(v32))
    value_scale = np.maximum(v32.max(axis=0) - mean, mean - v32.min(axis=0)) / levels
    value_codes = np.rint((v32 - mean) * _reciprocal(one, value_scale)).astype(np.float64)

    top = np.full((len(q), 1), -np.inf)
    total, mixed = np.zeros((len(q), 1)), np.zeros(q.shape)
    for begin in range(0, len(k), ATTENTION_KEY_BLOCK):
        keys = slice(begin, begin + ATTENTION_KEY_BLOCK)
        before, top = top, np.maximum(top, scores[:, keys].max(axis=1, keepdims=True))
        powers = np.exp(scores[:, keys] - top)
        decay = np.exp(before - top)
        total = total * decay + powers.sum(axis=1, keepdims=True)
        mixed = mixed * decay + np.rint(255 * powers) @ value_codes[keys]
    return mean + value_scale * mixed / (255 * total)


_ATTENTION = {"f32": _attention_f32, "bf16": _attention_bf16, "int8": _attention_int8}


def _reciprocal(levels: np.float32, extent: np.ndarray[Any, np.dtype[np.float32]]) -> Any:
    """``levels / extent`` in f32; 0 where that overflows."""
    with np.errstate(divide="ignore", over="ignore"):
        found = levels / extent
    return np.where(np.isfinite(found), found, np.float32(0))


@_evaluates("add_layer_norm")
def _add_layer_norm(
    context: Context, x: Float64, residual: Float64, gamma: Float64, beta: Float64, *, eps: float
) -> Float64:
    return _layer_norm(context, x + residual, gamma, beta, eps=eps)


# Narrow arithmetic. The f32 steps are those of the formula in the op table, so that the integers are the kernels'.


@_evaluates("quantize")
def _quantize(context: Context, x: Float64, *, zero_point: bool) -> Quantized:
    rows = x.astype(np.float32)
    if zero_point:
        low = np.minimum(rows.min(axis=1), np.float32(0))
        extent = np.maximum(rows.max(axis=1), np.float32(0)) - low
        steps = np.float32(255)
    else:
        low = np.zeros(len(rows), np.float32)
        extent = np.abs(rows).max(axis=1)
        steps = np.float32(127)
    # A row so small that its reciprocal overflows is a row of zeros.
    with np.errstate(divide="ignore", over="ignore"):
        reciprocal = steps / extent
    empty = ~np.isfinite(reciprocal)
    reciprocal[empty] = 0
    scale = np.where(empty, np.float32(0), extent / steps).astype(np.float32)
    zero = np.rint(-low * reciprocal).astype(np.int32) if zero_point else np.full(len(rows), 128, np.int32)
    levels = np.rint(rows * reciprocal[:, None]).astype(np.int32) + zero[:, None]
    return Quantized(np.clip(levels, 0, 255).astype(np.uint8), scale, zero)


@_evaluates("quantize_static")
def _quantize_static(context: Context, x: Float64, *, scale: float, zero_point: int) -> Quantized:
    rows = x.astype(np.float32)
    levels = rows * (np.float32(1) / np.float32(scale))
    # A NaN has no byte; its row has no scale either.
    lost = np.isnan(rows).any(axis=1)
    codes = (
        np.rint(np.clip(np.nan_to_num(levels, nan=0.0), -zero_point, 255 - zero_point)).astype(np.int32) + zero_point
    )
    scales = np.where(lost, np.float32(np.nan), np.float32(scale)).astype(np.float32)
    return Quantized(codes.astype(np.uint8), scales, np.full(len(rows), zero_point, np.int32))


@_evaluates("cast_bf16")
def _cast_bf16(context: Context, x: Float64) -> Float64:
    return _bf16(x)


def _bf16(x: Float64) -> Float64:
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).astype(np.float64)


@_evaluates("cast_f8")
def _cast_f8(context: Context, x: Float64) -> Float64:
    """Decoded, with its scales."""
    rows = x.astype(np.float32)
    largest = np.abs(rows).max(axis=1)
    with np.errstate(divide="ignore", over="ignore"):
        reciprocal = np.float32(448) / largest
    empty = np.isinf(reciprocal)
    reciprocal[empty] = 0
    scale = np.where(empty, np.float32(0), largest / np.float32(448))
    scaled = (rows * reciprocal[:, None]).astype(np.float64)
    # Three bits behind the first one; below 2^-6 as many as there.
    step = np.exp2(np.maximum(np.frexp(scaled)[1] - 1, -6) - 3.0)
    return np.rint(scaled / step) * step * scale[:, None].astype(np.float64)


@_evaluates("linear_f8")
def _linear_f8(
    context: Context, x: Float64, weight: Float64, bias: Float64 | None = None, *, activation: str
) -> Float64:
    return _linear(context, x, _cast_f8(context, weight), bias, activation=activation)


@_evaluates("linear_int8")
def _linear_int8(
    context: Context,
    x: Quantized,
    weight: np.ndarray[Any, np.dtype[np.int8]],
    weight_scale: Float64,
    bias: Float64 | None,
    values: Any = None,
    columns: Any = None,
    starts: Any = None,
    *,
    activation: str,
) -> Float64:
    if values is not None and not np.array_equal(unpack_blocks(values, columns, starts, weight.shape), weight):
        raise GraphError("the two forms of an int8 weight, with its zeros and without them, are not one weight")
    # Products are at most 255 * 127, so float64 sums of them are exact up to 2^38 columns.
    sums = x.centred() @ weight.astype(np.float64).T
    result = sums * (x.scale.astype(np.float64)[:, None] * weight_scale)
    return _activated(result if bias is None else result + bias, activation)


@_evaluates("linear_sparse_int8")
def _linear_sparse_int8(
    context: Context, x: Quantized, values: Any, columns: Any, starts: Any, sums: Any, weight_scale: Float64,
    *rest: Any, activation: str,
) -> Float64:  # fmt: skip
    weight = unpack_blocks(values, columns, starts, (len(weight_scale), x.centred().shape[1]))
    return _linear_int8(context, x, weight, weight_scale, *rest, activation=activation)


EVALUATORS["linear_bf16"] = _linear


def _with_narrow(name: str) -> Callable[..., Any]:
    def evaluate(context: Context, *operands: Any, also: str, **attrs: Any) -> tuple[Float64, Any]:
        wide = EVALUATORS[name](context, *operands, **attrs)
        if also == "bf16":
            return wide, _cast_bf16(context, wide)
        if also == "f8":
            return wide, _cast_f8(context, wide)
        if isinstance(also, dict):
            return wide, _quantize_static(context, wide, **also)
        return wide, _quantize(context, wide, zero_point=also == "q8_zero_point")

    return evaluate


for _name in ("embed_layer_norm", "add_layer_norm", "layer_norm", "rms_norm", "gated_activation"):
    EVALUATORS[_name + "_narrow"] = _with_narrow(_name)
