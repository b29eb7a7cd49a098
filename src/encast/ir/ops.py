"""The table of ops: what each takes, which attributes it has, and the type it makes.

This is the one list of ops. The verifier, the reference backend, the passes and the
lowering all look ops up here; a test checks that none of them knows an op that is not
in the table or lacks one that is.

Row dimensions of packed activations are symbols: ``tokens`` (all tokens of a batch),
``seqs`` (one row a sequence), ``selected`` (rows picked by the ``select`` input) and
``pairs`` (for every sequence its length squared, sequences one after the other).

Value dtypes: ``f32``, ``bf16``, ``i32`` and ``q8``. A ``q8`` value is a matrix of
unsigned bytes with one f32 scale and one i32 zero point a row; it stands for
``scale * (byte - zero)``. Symmetric rows have zero point 128.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from struct import pack, unpack
from typing import Any

import numpy as np

from encast.errors import GraphError
from encast.ir.blocks import BLOCK_OUTPUTS, GROUP_INPUTS, MOST_INPUTS, block_count
from encast.ir.relative import DISTANCE_BLOCK, distance_rows
from encast.ir.types import ValueType

__all__ = [
    "ACTIVATIONS",
    "ATTENTIONS",
    "ATTENTION_KEY_BLOCK",
    "ATTENTION_PRODUCTS",
    "COARSE_ACTIVATIONS",
    "LOCAL_QUERY_BLOCK",
    "NARROW_ATTENTIONS",
    "OPS",
    "POOLING_MODES",
    "Op",
]

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "tanh")
"""Names of elementwise activations: ``gelu`` is the erf form, ``gelu_tanh`` the tanh form."""

COARSE_ACTIVATIONS = {"gelu": "gelu_coarse", "gelu_tanh": "gelu_tanh_coarse"}
"""Forms within 1e-4 of those that they are named after, for linears whose outputs are rounded to q8 or bf16 next."""

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""Pooling modes of sentence-transformers, by the names its config uses."""

ATTENTION_PRODUCTS = ("f32", "bf16", "int8")
"""What the products inside attention are made of."""

ATTENTION_KEY_BLOCK = 1024
"""Keys whose powers are int8 codes of one maximum."""

LOCAL_QUERY_BLOCK = 128
"""Queries of a local attention whose keys are coded together."""

ATTENTIONS = ("attention", "local_attention", "disentangled_attention")
"""Ops that are a whole self-attention."""

NARROW_ATTENTIONS = ("attention", "local_attention")
"""Those of them whose products may be narrow; those of the others are f32."""

_LEAST_SCALE, _MOST_SCALE = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
"""The smallest normal f32 and the largest."""

Types = Sequence[ValueType]
Attrs = Mapping[str, Any]


@dataclass(frozen=True)
class Op:
    """One row of the table.

    ``inputs`` names the operands in order; a trailing ``?`` marks one that may be absent
    (written as an empty name in a node). ``attrs`` maps each attribute to a predicate that
    accepts its value; every attribute is required. ``infer`` returns the types of the outputs.
    """

    name: str
    inputs: tuple[str, ...]
    attrs: Mapping[str, Callable[[Any], bool]]
    infer: Callable[[Sequence[ValueType | None], Attrs], list[ValueType]]
    plain: bool
    doc: str


OPS: dict[str, Op] = {}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_float(value: Any) -> bool:
    return isinstance(value, float)


def _is_theta(value: Any) -> bool:
    return isinstance(value, float) and 0 < value < float("inf")


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_scale(value: Any) -> bool:
    """A number that is a normal f32 above 0, exactly."""
    return (
        isinstance(value, float) and _LEAST_SCALE <= value <= _MOST_SCALE and unpack("f", pack("f", value))[0] == value
    )


def _is_byte(value: Any) -> bool:
    return _is_int(value) and 0 <= value <= 255


def _is_activation(value: Any) -> bool:
    return value in ACTIVATIONS


def _is_linear_activation(value: Any) -> bool:
    return value == "none" or value in ACTIVATIONS or value in COARSE_ACTIVATIONS.values()


def _is_products(value: Any) -> bool:
    return value in ATTENTION_PRODUCTS


def _is_wide(value: Any) -> bool:
    return bool(value == "f32")


def _is_side(value: Any) -> bool:
    return value in ("query", "key")


_MOST_BUCKETS, _MOST_DISTANCE = 1 << 14, 1 << 20
"""Far above those of any model; the borders of buckets are found one by one."""


def _is_distance(value: Any) -> bool:
    return _is_int(value) and 0 <= value <= _MOST_DISTANCE


def _is_odd(value: Any) -> bool:
    return _is_count(value) and value % 2 == 1


def _is_modes(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and all(mode in POOLING_MODES for mode in value)
        and len(set(value)) == len(value)
    )


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise GraphError(message)


def _matrix(value: ValueType | None, name: str, dtype: str = "f32") -> ValueType:
    _need(value is not None, f"{name} is absent")
    assert value is not None
    _need(
        value.dtype == dtype and len(value.shape) == 2,
        f"{name} is {value}; a matrix of {dtype} is needed",
    )
    return value


def _columns(value: ValueType, name: str) -> int:
    columns = value.shape[1]
    _need(isinstance(columns, int), f"{name} is {value}; its columns must be a number")
    return int(columns)


def _vector(value: ValueType | None, name: str, size: Any, dtype: str = "f32") -> None:
    _need(
        value is not None and value.dtype == dtype and value.shape == (size,),
        f"{name} is {value}; {dtype}[{size}] is needed",
    )


def _rows_of_ids(value: ValueType | None, name: str) -> None:
    _need(
        value is not None and value.dtype == "i32" and value.shape == ("tokens",),
        f"{name} is {value}; i32[tokens] is needed",
    )


def _counts(value: ValueType | None) -> None:
    _need(value == ValueType("i32", ("seqs",)), f"seen is {value}; i32[seqs] is needed")


def _op(
    name: str,
    inputs: str,
    attrs: Mapping[str, Callable[[Any], bool]] | None = None,
    *,
    plain: bool = True,
) -> Callable[[Callable[[Any, Any], list[ValueType]]], Callable[[Any, Any], list[ValueType]]]:
    def register(infer: Callable[[Any, Any], list[ValueType]]) -> Callable[[Any, Any], list[ValueType]]:
        OPS[name] = Op(name, tuple(inputs.split()), dict(attrs or {}), infer, plain, infer.__doc__ or "")
        return infer

    return register


# Plain ops: what architectures are written in.


@_op("position_ids", "token_ids", {"offset": _is_int, "skip_id": _is_int})
def _position_ids(types: Any, attrs: Any) -> list[ValueType]:
    """Position of every token in its own sequence, plus ``offset``.

    With ``skip_id`` >= 0 (RoBERTa), tokens equal to it do not count and get position
    ``offset - 1``; others get ``offset`` + the number of counted tokens before them.
    """
    _rows_of_ids(types[0], "token_ids")
    return [ValueType("i32", ("tokens",))]


@_op("embedding", "ids table")
def _embedding(types: Any, attrs: Any) -> list[ValueType]:
    """Rows of ``table: f32[rows, dim]`` picked by ``ids: i32[tokens]``."""
    _rows_of_ids(types[0], "ids")
    table = _matrix(types[1], "table")
    return [ValueType("f32", ("tokens", table.shape[1]))]


@_op("add", "a b")
def _add(types: Any, attrs: Any) -> list[ValueType]:
    """Elementwise sum of two values of one shape."""
    a, b = _matrix(types[0], "a"), _matrix(types[1], "b")
    _need(a == b, f"a is {a} and b is {b}; they must be alike")
    return [a]


@_op("scale", "x", {"factor": _is_float})
def _scale(types: Any, attrs: Any) -> list[ValueType]:
    """``x * factor``."""
    return [_matrix(types[0], "x")]


@_op("linear", "x weight bias?", {"activation": _is_linear_activation})
def _linear(types: Any, attrs: Any) -> list[ValueType]:
    """``activation(x @ weight.T + bias)`` with ``weight: f32[out, in]``; plain graphs have activation "none"."""
    x, weight = _matrix(types[0], "x"), _matrix(types[1], "weight")
    _need(x.shape[1] == weight.shape[1], f"x is {x}, weight is {weight}; the inner sizes differ")
    if types[2] is not None:
        _vector(types[2], "bias", weight.shape[0])
    return [ValueType("f32", (x.shape[0], weight.shape[0]))]


@_op("layer_norm", "x gamma beta", {"eps": _is_float})
def _layer_norm(types: Any, attrs: Any) -> list[ValueType]:
    """``(x - mean) / sqrt(variance + eps) * gamma + beta`` over the columns of a row."""
    x = _matrix(types[0], "x")
    _vector(types[1], "gamma", x.shape[1])
    _vector(types[2], "beta", x.shape[1])
    return [x]


@_op("rms_norm", "x gamma", {"eps": _is_float})
def _rms_norm(types: Any, attrs: Any) -> list[ValueType]:
    """``x / sqrt(mean(x * x) + eps) * gamma`` over the columns of a row (Zhang and Sennrich 2019)."""
    x = _matrix(types[0], "x")
    _vector(types[1], "gamma", x.shape[1])
    return [x]


@_op("activation", "x", {"kind": _is_activation})
def _activation(types: Any, attrs: Any) -> list[ValueType]:
    """Elementwise activation, see ``ACTIVATIONS``."""
    return [_matrix(types[0], "x")]


@_op("gated_activation", "x", {"kind": _is_activation})
def _gated_activation(types: Any, attrs: Any) -> list[ValueType]:
    """``activation(a) * b``: ``a`` is the first half of the columns of ``x``, ``b`` the second (Shazeer 2020)."""
    x = _matrix(types[0], "x")
    _need(_columns(x, "x") % 2 == 0, f"x is {x}; its columns must have halves")
    return [ValueType("f32", (x.shape[0], _columns(x, "x") // 2))]


@_op("rotary", "x", {"heads": _is_count, "theta": _is_theta, "rate": _is_theta})
def _rotary(types: Any, attrs: Any) -> list[ValueType]:
    """Rotary positions (Su et al. 2021): every pair of columns turned by an angle that grows with the position.

    In a head of ``d`` columns the pairs are columns ``i`` and ``d/2 + i``, the angle of pair ``i`` at position ``p``
    of a sequence is ``t = p * rate * theta ** (-2 * i / d)``: ``(a, b)`` becomes
    ``(a cos t - b sin t, b cos t + a sin t)``.
    """
    x = _matrix(types[0], "x")
    _need(x.shape[0] == "tokens", f"x is {x}; rows must be tokens")
    _need(_columns(x, "x") % (2 * attrs["heads"]) == 0, f"x is {x}: not {attrs['heads']} heads of an even size")
    return [x]


@_op("attention_scores", "q k", {"heads": _is_count})
def _attention_scores(types: Any, attrs: Any) -> list[ValueType]:
    """For every head and sequence ``q @ k.T``; head ``h`` owns columns ``h*d`` to ``(h+1)*d``."""
    q, k = _matrix(types[0], "q"), _matrix(types[1], "k")
    _need(q == k, f"q is {q} and k is {k}; they must be alike")
    _need(q.shape[0] == "tokens", f"q is {q}; rows must be tokens")
    _need(_columns(q, "q") % attrs["heads"] == 0, f"q is {q}: {attrs['heads']} heads do not divide its columns")
    return [ValueType("f32", (attrs["heads"], "pairs"))]


@_op("relative_bias", "scores table", {"max_distance": _is_distance})
def _relative_bias(types: Any, attrs: Any) -> list[ValueType]:
    """Adds ``table[bucket(key - query), head]`` to every score, ``table: f32[buckets, heads]``.

    The bucket function is T5's two-sided one (also MPNet's): half of the buckets for each sign,
    half of those exact, the rest logarithmic up to ``max_distance``.
    """
    scores, table = _matrix(types[0], "scores"), _matrix(types[1], "table")
    _need(scores.shape[0] == table.shape[1], f"scores are {scores}, table is {table}; the heads differ")
    _need(
        isinstance(table.shape[0], int) and table.shape[0] <= _MOST_BUCKETS,
        f"table is {table}; at most {_MOST_BUCKETS} buckets are needed",
    )
    return [scores]


@_op("linear_bias", "scores slopes")
def _linear_bias(types: Any, attrs: Any) -> list[ValueType]:
    """Takes ``slopes[head] * |key - query|`` from every score, ``slopes: f32[heads]`` (ALiBi, Press et al. 2022)."""
    scores = _matrix(types[0], "scores")
    _need(scores.shape[1] == "pairs", f"scores are {scores}; columns must be pairs")
    _vector(types[1], "slopes", scores.shape[0])
    return [scores]


@_op("relative_scores", "scores x table", {"of": _is_side, "max_distance": _is_distance})
def _relative_scores(types: Any, attrs: Any) -> list[ValueType]:
    """Adds to every score the product of a row of ``x`` with the row of ``table`` for their distance.

    The row of ``x`` is the query's with ``of`` "query" (content to position), the key's with "key" (position to
    content); the heads own the same columns in both. ``table: f32[2 * span, columns of x]``: ``distance_rows`` of
    ``ir/relative.py`` gives the row of query - key (He et al. 2021, "DeBERTa: Decoding-enhanced BERT with Disentangled
    Attention"). A table that is as wide as one head is that of all heads (Shaw et al. 2018, "Self-Attention with
    Relative Position Representations"). ``max_distance``: that of logarithmic buckets, 0: every distance has a row up
    to ``span``.
    """
    scores, x, table = _matrix(types[0], "scores"), _matrix(types[1], "x"), _matrix(types[2], "table")
    _need(scores.shape[1] == "pairs", f"scores are {scores}; columns must be pairs")
    _need(x.shape[0] == "tokens", f"x is {x}; rows must be tokens")
    heads = int(scores.shape[0])
    _need(_columns(x, "x") % heads == 0, f"x is {x}: {heads} heads do not divide its columns")
    rows, widths = table.shape[0], (_columns(x, "x"), _columns(x, "x") // heads)
    _need(
        table.shape[1] in widths and isinstance(rows, int) and rows % 2 == 0 and rows <= _MOST_BUCKETS,
        f"table is {table}, x is {x}: an even number of rows up to {_MOST_BUCKETS}, as wide as x or as one of its "
        f"{heads} heads, is needed",
    )
    assert isinstance(rows, int)
    # Raises where the numbers admit no rule.
    distance_rows(np.zeros(1, np.int64), rows // 2, attrs["max_distance"])
    return [scores]


@_op("local_mask", "scores", {"reach": _is_count})
def _local_mask(types: Any, attrs: Any) -> list[ValueType]:
    """Minus infinity for every score whose key is more than ``reach`` positions from its query; the others stay."""
    scores = _matrix(types[0], "scores")
    _need(scores.shape[1] == "pairs", f"scores are {scores}; columns must be pairs")
    return [scores]


@_op("seen_tokens", "token_ids", {"token": _is_int, "most": _is_count})
def _seen_tokens(types: Any, attrs: Any) -> list[ValueType]:
    """How many first tokens of every sequence other tokens see: all but those equal to ``token`` at its end.

    Of those no more than ``most`` are hidden, and the first token of a sequence never is.
    """
    _rows_of_ids(types[0], "token_ids")
    _need(attrs["token"] >= 0, f"token is {attrs['token']}; an id is needed")
    return [ValueType("i32", ("seqs",))]


@_op("hide_keys", "scores seen")
def _hide_keys(types: Any, attrs: Any) -> list[ValueType]:
    """Minus infinity for every score whose key is none of its sequence's ``seen: i32[seqs]`` first ones."""
    scores = _matrix(types[0], "scores")
    _need(scores.shape[1] == "pairs", f"scores are {scores}; columns must be pairs")
    _counts(types[1])
    return [scores]


@_op("softmax", "scores")
def _softmax(types: Any, attrs: Any) -> list[ValueType]:
    """Softmax over the keys of every query."""
    scores = _matrix(types[0], "scores")
    _need(scores.shape[1] == "pairs", f"scores are {scores}; columns must be pairs")
    return [scores]


@_op("attention_context", "probs v")
def _attention_context(types: Any, attrs: Any) -> list[ValueType]:
    """For every head and sequence ``probs @ v``, heads side by side again."""
    probs, v = _matrix(types[0], "probs"), _matrix(types[1], "v")
    _need(probs.shape[1] == "pairs" and v.shape[0] == "tokens", f"probs are {probs}, v is {v}")
    _need(_columns(v, "v") % int(probs.shape[0]) == 0, f"v is {v}: {probs.shape[0]} heads do not divide its columns")
    return [v]


@_op("window_rows", "x", {"width": _is_odd})
def _window_rows(types: Any, attrs: Any) -> list[ValueType]:
    """For every token the rows of the ``width`` tokens around it, side by side in their order.

    Token ``t`` gets rows ``t - width // 2`` to ``t + width // 2``; where its sequence has none stand zeros. A
    convolution over the tokens is a linear of these rows.
    """
    x = _matrix(types[0], "x")
    _need(x.shape[0] == "tokens", f"x is {x}; rows must be tokens")
    return [ValueType("f32", ("tokens", _columns(x, "x") * attrs["width"]))]


@_op("first_token", "x")
def _first_token(types: Any, attrs: Any) -> list[ValueType]:
    """The first row of every sequence."""
    x = _matrix(types[0], "x")
    _need(x.shape[0] == "tokens", f"x is {x}; rows must be tokens")
    return [ValueType("f32", ("seqs", x.shape[1]))]


@_op("select_rows", "x select")
def _select_rows(types: Any, attrs: Any) -> list[ValueType]:
    """The rows of ``x`` whose indices in the batch stand in ``select: i32[selected]``."""
    x = _matrix(types[0], "x")
    _need(x.shape[0] == "tokens", f"x is {x}; rows must be tokens")
    _need(types[1] == ValueType("i32", ("selected",)), f"select is {types[1]}; i32[selected] is needed")
    return [ValueType("f32", ("selected", x.shape[1]))]


@_op("pooling", "x", {"modes": _is_modes})
def _pooling(types: Any, attrs: Any) -> list[ValueType]:
    """One row a sequence: the results of ``modes`` side by side, see ``POOLING_MODES``."""
    x = _matrix(types[0], "x")
    _need(x.shape[0] == "tokens", f"x is {x}; rows must be tokens")
    return [ValueType("f32", ("seqs", x.shape[1] * len(attrs["modes"])))]


@_op("normalize", "x")
def _normalize(types: Any, attrs: Any) -> list[ValueType]:
    """``x / max(|x|, 1e-12)`` a row, Euclidean norm."""
    return [_matrix(types[0], "x")]


@_op("concat", "a b c?")
def _concat(types: Any, attrs: Any) -> list[ValueType]:
    """The columns of all operands side by side."""
    operands = [_matrix(type, name) for type, name in zip(types, "abc", strict=True) if type is not None]
    for operand, name in zip(operands[1:], "bc", strict=False):
        _need(operand.shape[0] == operands[0].shape[0], f"{name} is {operand}; a is {operands[0]}, with other rows")
    return [ValueType("f32", (operands[0].shape[0], sum(map(_columns, operands, "abc"))))]


# Fused ops and wider or narrower arithmetic: what passes make.


@_op(
    "embed_layer_norm",
    "token_ids token_type_ids? word position? token_type? gamma beta",
    {"eps": _is_float, "position_offset": _is_int, "position_skip_id": _is_int},
    plain=False,
)
def _embed_layer_norm(types: Any, attrs: Any) -> list[ValueType]:
    """Sum of word, position and token-type rows, then layer norm. The sum runs word + type + position.

    A ``token_type`` table without ``token_type_ids`` never occurs: row 0 is folded into ``position``
    or ``word`` instead.
    """
    _rows_of_ids(types[0], "token_ids")
    word = _matrix(types[2], "word")
    for index, name in ((3, "position"), (4, "token_type")):
        if types[index] is not None:
            table = _matrix(types[index], name)
            _need(table.shape[1] == word.shape[1], f"{name} is {table}, word is {word}; the sizes differ")
    _need((types[1] is None) == (types[4] is None), "token_type_ids and token_type come together")
    if types[1] is not None:
        _rows_of_ids(types[1], "token_type_ids")
    _vector(types[5], "gamma", word.shape[1])
    _vector(types[6], "beta", word.shape[1])
    return [ValueType("f32", ("tokens", word.shape[1]))]


@_op("attention", "qkv bias? seen?", {"heads": _is_count, "scale": _is_float, "products": _is_products}, plain=False)
def _attention(types: Any, attrs: Any) -> list[ValueType]:
    """Self-attention inside every sequence.

    ``qkv: f32[tokens, 3*hidden]`` holds all heads' q, then k, then v. ``bias: f32[heads, 2*n-1]``, when
    present, is added to the scaled scores at column ``key - query + n - 1``. ``scale`` > 0 multiplies the
    scores (1.0 once it is folded into the projection). ``seen: i32[seqs]``, when present: only so many first tokens of
    a sequence are keys, and have values; the others are queries alone.

    ``products`` says what the two products are made of; powers ``p = exp(score - largest)`` are f32 in between.
    ``bf16``: q, k, v and p rounded to bf16, the sum of p taken after rounding.
    ``int8``: codes, of a head of a sequence, with f32 steps and roundings to nearest, ties to even. A column of k:
    ``ck = (high + low) / 2``, ``sk = (high - low) / 2 / 127``, ``k8 = round((k - ck) / sk)``; adding to all keys
    changes no softmax, so ck is dropped. A row of q, with ``t = q * sk``: ``sq = max|t| / 127``,
    ``q8 = round(t / sq)``; scores are ``scale * sq * (q8 @ k8.T)``. A column of v: ``cv`` is its mean,
    ``sv = max|v - cv| / 127``, ``v8 = round((v - cv) / sv)``. Powers: ``p8 = round(255 * p)``, and the answer
    is ``cv + sv * (p8 @ v8) / (255 * sum(p))``: what rounding takes from a power counts with the mean. A column
    or a row without extent has scale 0 and codes 0; divisions by a scale are products with the f32 reciprocals
    ``127 / extent`` and ``1 / sv``. Keys come in blocks of ``ATTENTION_KEY_BLOCK``, whose p8 is
    taken against the largest score up to the end of the block and decays with it afterwards.
    """
    qkv = _matrix(types[0], "qkv")
    _need(qkv.shape[0] == "tokens", f"qkv is {qkv}; rows must be tokens")
    _need(_columns(qkv, "qkv") % (3 * attrs["heads"]) == 0, f"qkv is {qkv}: not 3 x {attrs['heads']} heads")
    if types[1] is not None:
        bias = _matrix(types[1], "bias")
        _need(
            bias.shape[0] == attrs["heads"] and _columns(bias, "bias") % 2 == 1,
            f"bias is {bias}; f32[heads, 2n-1] is needed",
        )
    if types[2] is not None:
        _counts(types[2])
    return [ValueType("f32", ("tokens", _columns(qkv, "qkv") // 3))]


@_op(
    "local_attention",
    "qkv seen?",
    {"heads": _is_count, "scale": _is_float, "products": _is_products, "reach": _is_count},
    plain=False,
)
def _local_attention(types: Any, attrs: Any) -> list[ValueType]:
    """As ``attention`` without a bias, of the keys that are at most ``reach`` positions from the query.

    The codes of ``int8`` are those of ``LOCAL_QUERY_BLOCK`` queries together (the first ones of a sequence, the next
    ones, ...): each block has its own, of the keys and values that any of its queries reaches. With ``seen`` no more
    tokens than ``reach`` may be hidden, so that every query has a key.
    """
    return _attention([types[0], None, types[1]], attrs)


@_op(
    "disentangled_attention",
    "qkv key_table? query_table?",
    {"heads": _is_count, "scale": _is_float, "products": _is_wide, "shared": _is_bool},
    plain=False,
)
def _disentangled_attention(types: Any, attrs: Any) -> list[ValueType]:
    """As ``attention`` without a bias, of scores that know of distances: those of ``relative_scores``.

    The score of query ``i`` and key ``j`` is ``scale * (q_i . k_j + q_i . K[j - i] + k_j . Q[i - j])``: ``key_table``
    holds the vectors ``K`` of every head and distance, ``query_table`` the vectors ``Q``, each as ``pack_distances``
    of ``ir/relative.py`` lays them, for distances up to that of the longest text. With ``shared`` they are the vectors
    of all heads, and lie as those of one. One of the tables may be absent. All products are f32.
    """
    made = _attention([types[0], None, None], attrs)
    _need(types[1] is not None or types[2] is not None, "key_table and query_table are both absent")
    size, heads = _columns(types[0], "qkv") // 3 // attrs["heads"], 1 if attrs["shared"] else attrs["heads"]
    for place, name in ((1, "key_table"), (2, "query_table")):
        if types[place] is not None:
            table = _matrix(types[place], name)
            rows = table.shape[0]
            _need(
                table.shape[1] == DISTANCE_BLOCK
                and isinstance(rows, int)
                and rows % (heads * size) == 0
                and rows // (heads * size) % 2 == 1,
                f"{name} is {table}, qkv is {types[0]}: an odd number of blocks of {heads} heads is needed",
            )
    _need(types[1] is None or types[2] is None or types[1] == types[2], "the two tables are of unlike sizes")
    return made


@_op("rotary_qkv", "qkv table", {"heads": _is_count}, plain=False)
def _rotary_qkv(types: Any, attrs: Any) -> list[ValueType]:
    """``rotary`` of the queries and of the keys in ``qkv: f32[tokens, 3*hidden]``; the values stay.

    ``table: f32[positions, head_dim]``: a row a position, the cosines of its angles, then their sines.
    """
    qkv, table = _matrix(types[0], "qkv"), _matrix(types[1], "table")
    _need(qkv.shape[0] == "tokens", f"qkv is {qkv}; rows must be tokens")
    _need(
        _columns(qkv, "qkv") == 3 * attrs["heads"] * _columns(table, "table") and _columns(table, "table") % 2 == 0,
        f"qkv is {qkv}, table is {table}: not 3 x {attrs['heads']} heads of an even size",
    )
    return [qkv]


@_op("add_layer_norm", "x residual gamma beta", {"eps": _is_float}, plain=False)
def _add_layer_norm(types: Any, attrs: Any) -> list[ValueType]:
    """``layer_norm(x + residual)``."""
    _add(types[:2], attrs)
    return _layer_norm([types[0], *types[2:]], attrs)


@_op("quantize", "x", {"zero_point": _is_bool}, plain=False)
def _quantize(types: Any, attrs: Any) -> list[ValueType]:
    """f32 to q8, a scale (and, if ``zero_point``, a zero point) a row, from the row's own extremes.

    Symmetric: ``scale = max|x| / 127``, ``byte = round(x / scale) + 128``. With a zero point:
    ``lo = min(x, 0)``, ``hi = max(x, 0)``, ``scale = (hi - lo) / 255``, ``zero = round(-lo / scale)``,
    ``byte = clamp(round(x / scale) + zero, 0, 255)``. Rounding is to nearest, ties to even. Both divisions
    are done as a product with the f32 reciprocal ``127 / max`` or ``255 / (hi - lo)``; a row of zeros, or one
    so small that its reciprocal overflows, has scale 0.
    """
    x = _matrix(types[0], "x")
    return [ValueType("q8", x.shape)]


@_op("quantize_static", "x", {"scale": _is_scale, "zero_point": _is_byte}, plain=False)
def _quantize_static(types: Any, attrs: Any) -> list[ValueType]:
    """f32 to q8 with one scale, a normal f32 above 0, and one zero point for all rows.

    ``byte = round(clamp(x * (1 / scale), -zero, 255 - zero)) + zero``, the reciprocal and the product in f32, rounding
    to nearest, ties to even: what lies outside of the range saturates.
    """
    x = _matrix(types[0], "x")
    return [ValueType("q8", x.shape)]


@_op("cast_bf16", "x", plain=False)
def _cast_bf16(types: Any, attrs: Any) -> list[ValueType]:
    """f32 to bf16, to nearest, ties to even."""
    return [ValueType("bf16", _matrix(types[0], "x").shape)]


@_op("cast_f8", "x", plain=False)
def _cast_f8(types: Any, attrs: Any) -> list[ValueType]:
    """f32 to f8, the 8-bit floating point with 4 bits of exponent of Micikevicius et al. 2022, "FP8 Formats for Deep
    Learning" (E4M3: no infinities, largest 448), and a scale a row.

    ``scale = max|x| / 448``, ``code = f8(x * (448 / max|x|))`` in f32, to nearest, ties to even; a row of zeros, or one
    so small that its reciprocal overflows, has scale 0.
    """
    return [ValueType("f8", _matrix(types[0], "x").shape)]


@_op(
    "linear_int8", "x weight weight_scale bias? values? columns? starts?", {"activation": _is_linear_activation},
    plain=False,
)  # fmt: skip
def _linear_int8(types: Any, attrs: Any) -> list[ValueType]:
    """``activation(x @ (weight * weight_scale[:, None]).T + bias)``: q8 by s8 (-127 to 127), exact int32 sums.

    ``values``, ``columns``, ``starts``: the same weight without its zeros, as of ``linear_sparse_int8``; all or none.
    A backend may multiply by either.
    """
    x, weight = _matrix(types[0], "x", "q8"), _matrix(types[1], "weight", "s8")
    _need(x.shape[1] == weight.shape[1], f"x is {x}, weight is {weight}; the inner sizes differ")
    _vector(types[2], "weight_scale", weight.shape[0])
    if types[3] is not None:
        _vector(types[3], "bias", weight.shape[0])
    if any(type is not None for type in types[4:]):
        _blocks(types[4:], x, weight.shape[0])
    return [ValueType("f32", (x.shape[0], weight.shape[0]))]


def _blocks(types: Any, x: ValueType, outputs: Any) -> None:
    """Checks values, columns and starts of a weight whose zeros are left out."""
    values, columns = _matrix(types[0], "values", "s8"), _matrix(types[1], "columns", "u16")
    _need(_columns(x, "x") <= MOST_INPUTS, f"x is {x}; a sparse weight has at most {MOST_INPUTS} inputs")
    groups = values.shape[0]
    _need(
        values.shape[1] == BLOCK_OUTPUTS * GROUP_INPUTS and columns.shape == (groups, GROUP_INPUTS),
        f"values is {values}, columns is {columns}; groups of {BLOCK_OUTPUTS} x {GROUP_INPUTS} are needed",
    )
    _vector(types[2], "starts", block_count(int(outputs)) + 1, "i32")


@_op(
    "linear_sparse_int8", "x values columns starts sums weight_scale bias?", {"activation": _is_linear_activation},
    plain=False,
)  # fmt: skip
def _linear_sparse_int8(types: Any, attrs: Any) -> list[ValueType]:
    """``linear_int8`` with a weight s8[n, k] whose zeros are left out (``ir/blocks.py``); ``sums``: its rows' sums."""
    x, scale = _matrix(types[0], "x", "q8"), types[5]
    _need(scale is not None and len(scale.shape) == 1, f"weight_scale is {scale}; a vector is needed")
    outputs = scale.shape[0]
    _vector(scale, "weight_scale", outputs)
    _blocks(types[1:4], x, outputs)
    _vector(types[4], "sums", outputs, "i32")
    if types[6] is not None:
        _vector(types[6], "bias", outputs)
    return [ValueType("f32", (x.shape[0], outputs))]


@_op("linear_bf16", "x weight bias?", {"activation": _is_linear_activation}, plain=False)
def _linear_bf16(types: Any, attrs: Any) -> list[ValueType]:
    """``activation(x @ weight.T + bias)``: bf16 operands, f32 sums and output."""
    x, weight = _matrix(types[0], "x", "bf16"), _matrix(types[1], "weight", "bf16")
    _need(x.shape[1] == weight.shape[1], f"x is {x}, weight is {weight}; the inner sizes differ")
    if types[2] is not None:
        _vector(types[2], "bias", weight.shape[0])
    return [ValueType("f32", (x.shape[0], weight.shape[0]))]


@_op("linear_f8", "x weight bias?", {"activation": _is_linear_activation}, plain=False)
def _linear_f8(types: Any, attrs: Any) -> list[ValueType]:
    """``activation(x @ f8(weight).T + bias)``: ``weight``, f32 or bf16, is rounded as ``cast_f8`` rounds; f32 sums, of
    which cards keep fewer bits (an H100 13)."""
    x = _matrix(types[0], "x", "f8")
    weight = _matrix(types[1], "weight", "bf16" if types[1] is not None and types[1].dtype == "bf16" else "f32")
    _need(x.shape[1] == weight.shape[1], f"x is {x}, weight is {weight}; the inner sizes differ")
    if types[2] is not None:
        _vector(types[2], "bias", weight.shape[0])
    return [ValueType("f32", (x.shape[0], weight.shape[0]))]


def _with_quantized(infer: Callable[[Any, Any], list[ValueType]]) -> Callable[[Any, Any], list[ValueType]]:
    def inferred(types: Any, attrs: Any) -> list[ValueType]:
        (out,) = infer(types, attrs)
        return [out, ValueType(attrs["also"] if attrs["also"] in ("bf16", "f8") else "q8", out.shape)]

    inferred.__doc__ = (
        "As the op it is named after, with a second output of the same rows, see ``also``: q8 (symmetric), "
        "q8_zero_point (q8 with a zero point), bf16 or f8, each as ``quantize``, ``cast_bf16`` and ``cast_f8`` make "
        "it, or the attributes of ``quantize_static``."
    )
    return inferred


def _is_also(value: Any) -> bool:
    if isinstance(value, dict):
        checks = OPS["quantize_static"].attrs
        return set(value) == set(checks) and all(check(value[name]) for name, check in checks.items())
    return value in ("q8", "q8_zero_point", "bf16", "f8")


for _name, _infer in (
    ("embed_layer_norm", _embed_layer_norm),
    ("add_layer_norm", _add_layer_norm),
    ("layer_norm", _layer_norm),
    ("rms_norm", _rms_norm),
    ("gated_activation", _gated_activation),
):
    _op(
        _name + "_narrow",
        " ".join(OPS[_name].inputs),
        {**OPS[_name].attrs, "also": _is_also},
        plain=False,
    )(_with_quantized(_infer))
