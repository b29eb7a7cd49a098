"""The reference's ops: the table is covered, narrow arithmetic follows its formulas, fused ops equal plain ones."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
from graphs import META

from encast.backends import Runnable
from encast.backends.reference import EVALUATORS, Context, Quantized, Reference
from encast.batch import Batch
from encast.errors import GraphError, InputError
from encast.ir import OPS, Graph, Node
from encast.ir.ops import ATTENTION_KEY_BLOCK
from encast.ir.relative import relative_buckets
from encast.ir.types import ValueType

Array = np.ndarray[Any, Any]
CONTEXT = Context(np.array([0, 1, 4, 9], np.int32))
TOKENS = 9


def values(*shape: int, seed: int = 0) -> Array:
    return np.random.RandomState(seed).standard_normal(shape)


def evaluate(op: str, *operands: Any, **attrs: Any) -> Any:
    return EVALUATORS[op](CONTEXT, *operands, **attrs)


def test_every_op_of_the_table_has_an_evaluator_and_no_other() -> None:
    assert set(EVALUATORS) == set(OPS)


# Plain ops against a second way to write them


def test_gelu_is_the_erf_form_and_gelu_tanh_the_other() -> None:
    x = np.array([[-3.0, -0.5, 0.0, 0.7, 6.0]])
    erf = [[v * 0.5 * math.erfc(-v / math.sqrt(2)) for v in x[0]]]
    np.testing.assert_allclose(evaluate("activation", x, kind="gelu"), erf, rtol=1e-12, atol=1e-15)
    tanh = [[v / (1 + math.exp(-2 * math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) for v in x[0]]]
    np.testing.assert_allclose(evaluate("activation", x, kind="gelu_tanh"), tanh, rtol=1e-12)


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu", "silu", "tanh"])
def test_activations_stay_finite_far_out(kind: str) -> None:
    x = np.array([[-1e4, -800.0, 800.0, 1e4]])
    far = evaluate("activation", x, kind=kind)
    limits = [-1.0, -1.0, 1.0, 1.0] if kind == "tanh" else [0.0, 0.0, 800.0, 1e4]
    np.testing.assert_allclose(far[0], limits, atol=1e-12)


def test_attention_stays_inside_sequences_and_heads() -> None:
    q, k, v = (values(TOKENS, 6, seed=seed) for seed in range(3))
    scores = evaluate("attention_scores", q, k, heads=2)
    assert scores.shape == (2, 1 + 9 + 25)
    got = evaluate("attention_context", evaluate("softmax", scores), v)
    wanted = np.empty_like(v)
    for begin, end in ((0, 1), (1, 4), (4, 9)):
        for columns in (slice(0, 3), slice(3, 6)):
            for row in range(begin, end):
                weights = np.exp([q[row, columns] @ k[other, columns] for other in range(begin, end)])
                wanted[row, columns] = weights @ v[begin:end, columns] / weights.sum()
    np.testing.assert_allclose(got, wanted, rtol=1e-12)


def test_softmax_takes_huge_scores() -> None:
    assert np.isfinite(evaluate("softmax", values(2, 35) * 1e6)).all()


def test_positions_restart_and_skip() -> None:
    ids = np.array([7, 7, 1, 7, 1, 1, 7, 7, 7], np.int32)
    assert evaluate("position_ids", ids, offset=0, skip_id=-1).tolist() == [0, 0, 1, 2, 0, 1, 2, 3, 4]
    assert evaluate("position_ids", ids, offset=2, skip_id=1).tolist() == [2, 2, 1, 3, 1, 1, 2, 3, 4]


def test_relative_buckets_begin_where_the_rule_says() -> None:
    """Rational arithmetic, so that a logarithm's rounding (16 and 64 lie on a boundary) has no say."""
    for buckets, reach in ((32, 128), (64, 256), (16, 50)):
        half, exact = buckets // 2, buckets // 4
        for distance in range(300):
            bucket = distance
            if distance >= exact:
                steps = [j for j in range(half - exact) if _begins(j, exact, half, reach) <= distance ** (half - exact)]
                bucket = exact + max(steps)
            assert relative_buckets(np.array([-distance]), buckets, reach)[0] == bucket
            assert relative_buckets(np.array([distance]), buckets, reach)[0] == bucket + (half if distance else 0)


def _begins(step: int, exact: int, half: int, reach: int) -> Fraction:
    """The beginning of bucket ``exact + step``, to the power of ``half - exact``."""
    return Fraction(reach, exact) ** step * exact ** (half - exact)


@pytest.mark.parametrize(("buckets", "reach"), [(0, 128), (31, 128), (2, 128), (32, 8)])
def test_relative_buckets_refuse_what_is_no_rule(buckets: int, reach: int) -> None:
    with pytest.raises(GraphError, match="two-sided"):
        relative_buckets(np.arange(3), buckets, reach)


def test_pooling_modes() -> None:
    x = values(TOKENS, 2)
    last = x[4:9]
    wanted = {
        "cls": last[0],
        "max": last.max(0),
        "mean": last.sum(0) / 5,
        "mean_sqrt_len_tokens": last.sum(0) / math.sqrt(5),
        "weightedmean": (last[0] + 2 * last[1] + 3 * last[2] + 4 * last[3] + 5 * last[4]) / 15,
        "lasttoken": last[-1],
    }
    got = evaluate("pooling", x, modes=list(wanted))
    assert got.shape == (3, 12)
    np.testing.assert_allclose(got[2], np.concatenate(list(wanted.values())), rtol=1e-12)


def test_normalize_of_zero_is_zero() -> None:
    assert evaluate("normalize", np.zeros((2, 3))).tolist() == [[0.0] * 3] * 2
    np.testing.assert_allclose(evaluate("normalize", np.array([[3.0, 4.0]])), [[0.6, 0.8]])


# Fused ops against the plain ones that they stand for


@pytest.mark.parametrize("skip_id", [-1, 3])
def test_embed_layer_norm_is_the_sum_then_the_norm(skip_id: int) -> None:
    ids = np.array([3, 0, 1, 2, 3, 3, 1, 0, 2], np.int32)
    types = (ids > 1).astype(np.int32)
    word, position, kind = values(4, 6), values(12, 6, seed=1), values(2, 6, seed=2)
    gamma, beta = values(6, seed=3), values(6, seed=4)
    positions = evaluate("position_ids", ids, offset=4, skip_id=skip_id)
    wanted = evaluate("layer_norm", word[ids] + kind[types] + position[positions], gamma, beta, eps=1e-5)
    got = evaluate(
        "embed_layer_norm",
        *(ids, types, word, position, kind, gamma, beta),
        eps=1e-5,
        position_offset=4,
        position_skip_id=skip_id,
    )
    np.testing.assert_allclose(got, wanted, rtol=1e-12)


def test_attention_with_a_bias_by_distance_is_the_plain_chain() -> None:
    q, k, v = (values(TOKENS, 6, seed=seed) for seed in range(3))
    table = values(32, 2, seed=3)
    scores = evaluate("attention_scores", q, k, heads=2) * 0.25
    scores = evaluate("relative_bias", scores, table, max_distance=128)
    wanted = evaluate("attention_context", evaluate("softmax", scores), v)
    longest = 7
    distances = np.arange(1 - longest, longest)
    bias = table[relative_buckets(distances, 32, 128)].T
    got = evaluate("attention", np.hstack([q, k, v]), bias, heads=2, scale=0.25, products="f32")
    np.testing.assert_allclose(got, wanted, rtol=1e-12)


@pytest.mark.parametrize(("products", "worst"), [("bf16", 2.0**-7), ("int8", 3 / 127)])
def test_narrow_attention_stays_near_the_wide_one(products: str, worst: float) -> None:
    qkv = values(TOKENS, 3 * 48, seed=4)
    wide = evaluate("attention", qkv, None, heads=2, scale=0.2, products="f32")
    got = evaluate("attention", qkv, None, heads=2, scale=0.2, products=products)
    assert 1e-6 < np.abs(got - wide).max() < worst * np.abs(qkv).max()


def test_int8_attention_sees_neither_shifted_keys_nor_the_scales_of_columns() -> None:
    """Codes are of a column of keys, centred: what softmax and the product cancel costs no level."""
    q, k, v = (values(TOKENS, 8, seed=seed) for seed in range(3))
    attend = partial(evaluate, "attention", heads=2, scale=0.25, products="int8")
    plain = attend(np.hstack([q, k, v]), None)
    stretch = 2.0 ** np.arange(8)
    np.testing.assert_array_equal(attend(np.hstack([q / stretch, k * stretch, v]), None), plain)
    # Shifts that f32 holds exactly beside the values.
    k = np.rint(k * 64) / 64
    plain = attend(np.hstack([q, k, v]), None)
    np.testing.assert_array_equal(attend(np.hstack([q, k + 1024.0, v]), None), plain)


def test_int8_attention_of_equal_keys_is_the_mean_to_half_a_step() -> None:
    v = values(TOKENS, 6, seed=6)
    got = evaluate("attention", np.hstack([np.ones((TOKENS, 12)), v]), None, heads=2, scale=1.0, products="int8")
    for rows, _, _ in CONTEXT.sequences():
        mean = v[rows].mean(axis=0)
        step = np.abs(v[rows] - mean).max(axis=0) / 127
        assert (np.abs(got[rows] - mean) <= step / 2 + 1e-6).all()


def test_int8_attention_in_blocks_of_keys() -> None:
    """Beyond a block the powers have codes against a largest score that still grows; little changes."""
    many = ATTENTION_KEY_BLOCK + 400
    qkv = values(many, 3 * 4, seed=5)
    context = Context(np.array([0, many], np.int32))
    attend = partial(EVALUATORS["attention"], context, qkv, None, heads=1, scale=0.5)
    wide = attend(products="f32")
    assert 1e-6 < np.abs(attend(products="int8") - wide).max() < 0.02


def test_add_layer_norm_and_its_narrow_forms() -> None:
    x, residual, gamma, beta = values(4, 6), values(4, 6, seed=1), values(6, seed=2), values(6, seed=3)
    wanted = evaluate("layer_norm", x + residual, gamma, beta, eps=1e-12)
    np.testing.assert_array_equal(evaluate("add_layer_norm", x, residual, gamma, beta, eps=1e-12), wanted)
    for also, narrow in (
        ("bf16", evaluate("cast_bf16", wanted)),
        ("q8", evaluate("quantize", wanted, zero_point=False)),
        ("q8_zero_point", evaluate("quantize", wanted, zero_point=True)),
        ({"scale": 0.5, "zero_point": 3}, evaluate("quantize_static", wanted, scale=0.5, zero_point=3)),
    ):
        wide, second = evaluate("add_layer_norm_narrow", x, residual, gamma, beta, eps=1e-12, also=also)
        np.testing.assert_array_equal(wide, wanted)
        if also == "bf16":
            np.testing.assert_array_equal(second, narrow)
        else:
            assert_same_bytes(second, narrow)


def assert_same_bytes(a: Quantized, b: Quantized) -> None:
    np.testing.assert_array_equal(a.bytes, b.bytes)
    np.testing.assert_array_equal(a.scale, b.scale)
    np.testing.assert_array_equal(a.zero, b.zero)


# Narrow arithmetic, number by number in f32


def f32(x: float) -> float:
    return float(struct.unpack("f", struct.pack("f", x))[0])


def quantized_by_hand(row: list[float], zero_point: bool) -> tuple[list[int], float, int]:
    """The op table's formula with Python numbers; ``round`` rounds ties to even."""
    row = [f32(x) for x in row]
    low = min(*row, 0.0) if zero_point else 0.0
    extent = f32(max(*row, 0.0) - low) if zero_point else max(abs(x) for x in row)
    steps = 255.0 if zero_point else 127.0
    if extent == 0.0:
        return [0 if zero_point else 128] * len(row), 0.0, 0 if zero_point else 128
    reciprocal = f32(steps / extent)
    zero = round(f32(-low * reciprocal)) if zero_point else 128
    levels = [min(max(round(f32(x * reciprocal)) + zero, 0), 255) for x in row]
    return levels, f32(extent / steps), zero


@pytest.mark.parametrize("zero_point", [False, True])
def test_quantize_follows_the_formula_bit_for_bit(zero_point: bool) -> None:
    x = values(200, 17) * np.exp(values(200, 1, seed=1) * 4)
    x[0] = 0.0
    x[1] = np.abs(x[1])
    x[2] = -np.abs(x[2])
    x[3] = np.arange(17) - 8.5  # ties
    x[4, 5] = 1e4  # an outlier
    got = evaluate("quantize", x, zero_point=zero_point)
    for row in range(len(x)):
        levels, scale, zero = quantized_by_hand(x[row].tolist(), zero_point)
        assert (got.bytes[row].tolist(), float(got.scale[row]), int(got.zero[row])) == (levels, scale, zero)


@pytest.mark.parametrize("zero_point", [False, True])
def test_quantize_treats_a_row_whose_reciprocal_overflows_as_zeros(zero_point: bool) -> None:
    got = evaluate("quantize", np.array([[1e-40, -1e-41, 0.0]]), zero_point=zero_point)
    assert got.scale.tolist() == [0.0]
    assert not got.centred().any()


@pytest.mark.parametrize("zero_point", [False, True])
def test_quantize_error_is_half_a_step(zero_point: bool) -> None:
    x = values(50, 33)
    got = evaluate("quantize", x, zero_point=zero_point)
    error = np.abs(got.centred() * got.scale[:, None] - x)
    # With a zero point, that point's own rounding can push an extreme out of the 256 steps by half a step more.
    assert (error <= (1.0 if zero_point else 0.5) * got.scale[:, None] * (1 + 1e-4)).all()
    assert got.bytes.min() >= (0 if zero_point else 1)


@pytest.mark.parametrize("zero", [0, 97, 128, 255])
def test_quantize_static_follows_the_formula_bit_for_bit(zero: int) -> None:
    scale = f32(0.0137)
    x = values(50, 17) * np.exp(values(50, 1, seed=1) * 3)
    x[0] = (np.arange(17) - 8.5) * 1.0  # far outside
    x[1, :4] = [1e30, -1e30, np.inf, -np.inf]
    got = evaluate("quantize_static", x, scale=scale, zero_point=zero)
    reciprocal = f32(1.0 / scale)
    for row, found in zip(x.astype(np.float32).tolist(), got.bytes.tolist(), strict=True):
        levels = [min(max(f32(value) * reciprocal, -1e9), 1e9) for value in row]
        assert found == [min(max(round(f32(level)) + zero, 0), 255) for level in levels]
    assert set(got.scale.tolist()) == {scale}
    assert set(got.zero.tolist()) == {zero}


def test_quantize_static_keeps_a_nan_in_the_scale_of_its_row() -> None:
    got = evaluate("quantize_static", np.array([[1.0, np.nan], [1.0, 2.0]]), scale=0.5, zero_point=3)
    assert np.isnan(got.scale[0])
    assert got.scale[1] == 0.5


@pytest.mark.parametrize(
    "attrs",
    [
        {"scale": 0.0, "zero_point": 0},
        {"scale": -1.0, "zero_point": 0},
        {"scale": 1e-40, "zero_point": 0},
        {"scale": float("inf"), "zero_point": 0},
        {"scale": float("nan"), "zero_point": 0},
        {"scale": 0.1, "zero_point": 0},  # no f32
        {"scale": 1, "zero_point": 0},
        {"scale": 0.5, "zero_point": 256},
        {"scale": 0.5, "zero_point": -1},
        {"scale": 0.5, "zero_point": True},
    ],
)
def test_ranges_that_no_kernel_takes_are_no_attributes(attrs: dict[str, Any]) -> None:
    accepted = OPS["quantize_static"].attrs
    assert not all(accepts(attrs[name]) for name, accepts in accepted.items())
    assert not OPS["layer_norm_narrow"].attrs["also"](attrs)
    assert all(accepts({"scale": 0.5, "zero_point": 255}[name]) for name, accepts in accepted.items())
    assert OPS["layer_norm_narrow"].attrs["also"]({"scale": 0.5, "zero_point": 255})
    assert not OPS["layer_norm_narrow"].attrs["also"]({"scale": 0.5})


def test_cast_bf16_rounds_to_nearest_ties_to_even() -> None:
    step = 2.0**-7
    pairs = {
        1.0: 1.0,
        1.0 + step / 2: 1.0,
        1.0 + 1.5 * step: 1.0 + 2 * step,
        1.0 + step * 0.51: 1.0 + step,
        -1.0 - step / 2: -1.0,
        3.0e38: f32(3.0e38) - (f32(3.0e38) % 2.0**120) + 2.0**120 * (f32(3.0e38) % 2.0**120 > 2.0**119),
        0.0: 0.0,
    }
    assert evaluate("cast_bf16", np.array([list(pairs)]))[0].tolist() == list(pairs.values())
    bits = evaluate("cast_bf16", values(3, 5)).astype(np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()


@pytest.mark.parametrize("zero_point", [False, True])
def test_linear_int8_sums_are_exact(zero_point: bool) -> None:
    x = evaluate("quantize", values(5, 300), zero_point=zero_point)
    weight = np.random.RandomState(1).randint(-127, 128, (7, 300)).astype(np.int8)
    scale, bias = np.abs(values(7, seed=2)), values(7, seed=3)
    sums = [
        [sum((int(a) - int(zero)) * int(b) for a, b in zip(row, column, strict=True)) for column in weight]
        for row, zero in zip(x.bytes, x.zero, strict=True)
    ]
    got = evaluate("linear_int8", x, weight, np.ones(7), None, activation="none")
    np.testing.assert_array_equal(got, np.array(sums) * x.scale[:, None].astype(np.float64))
    got = evaluate("linear_int8", x, weight, scale, bias, activation="relu")
    np.testing.assert_allclose(got, np.maximum(np.array(sums) * (x.scale[:, None] * scale) + bias, 0), rtol=1e-12)


# Graphs


def small_graph() -> Graph:
    graph = Graph()
    graph.add_input("token_ids", ValueType("i32", ("tokens",)))
    graph.add_input("select", ValueType("i32", ("selected",)))
    table = graph.add_constant("table", values(10, 4).astype(np.float32))
    x = graph.add("embedding", "token_ids", table, name="x")
    weight = graph.add_constant("weight", (np.arange(12, dtype=np.uint16) + 0x3F80).reshape(3, 4), "bf16")
    narrow = graph.add("cast_bf16", x, name="narrow")
    y = graph.add("linear_bf16", narrow, weight, name="y", activation="none")
    (wide, _) = graph.append(
        Node(
            "layer_norm_narrow",
            [
                x,
                graph.add_constant("gamma", np.ones(4, np.float32)),
                graph.add_constant("beta", np.ones(4, np.float32)),
            ],
            ["wide", "bytes"],
            {"eps": 1e-5, "also": "q8"},
        )
    )
    graph.outputs = {
        "last_hidden_state": wide,
        "embedding": graph.add("first_token", y, name="first"),
        "logits": graph.add("select_rows", x, "select", name="picked"),
    }
    graph.meta = replace(META, vocab=10, type_vocab=0, max_len=5)
    return graph


BATCH = Batch.of([[1, 2, 3], [4]])


def test_answers_have_the_shape_of_the_type() -> None:
    run: Runnable = Reference(small_graph())
    assert isinstance(run, Runnable)
    for output, select, shape in (
        ("last_hidden_state", None, (4, 4)),
        ("embedding", None, (2, 3)),
        ("logits", np.array([3, 0, 3], np.int32), (3, 4)),
    ):
        got = run.run(output, BATCH, select)
        assert got.dtype == np.float32
        assert got.shape == shape
    assert run.run("embedding", Batch.of([])).shape == (0, 3)


def test_bf16_weights_are_read_from_their_bits() -> None:
    got = Reference(small_graph()).evaluate("embedding", BATCH)
    x = EVALUATORS["cast_bf16"](None, values(10, 4).astype(np.float32).astype(np.float64))[[1, 4]]
    # 0x3F80 is one, and a step of the last bit there is 2^-7.
    np.testing.assert_array_equal(got, x @ (1 + np.arange(12).reshape(3, 4) / 128).T)


def test_a_graph_without_arrays_is_refused() -> None:
    graph = small_graph()
    with pytest.raises(GraphError, match="from a checkpoint"):
        Reference(Graph.from_json(graph.to_json(), {}))


TYPES = np.array([0, 0, 1, 0], np.int32)
SELECT = np.array([0], np.int32)
BAD = {
    "no output 'pooled'": ("pooled", BATCH, None),
    "token 1 of sequence 0\\) is 10; the model takes 0 to 9": ("embedding", Batch.of([[1, 10], [2]]), None),
    "is -1; the model takes": ("embedding", Batch.of([[-1]]), None),
    "sequence 1 has 6 tokens; the model takes at most 5": ("embedding", Batch.of([[1], [1] * 6]), None),
    "token_type_ids.*is 1; the model takes 0 to 0": (
        "embedding",
        Batch(BATCH.token_ids, BATCH.cu_seqlens, TYPES),
        None,
    ),
    "one token type for every token": ("embedding", Batch(BATCH.token_ids, BATCH.cu_seqlens, TYPES[:3]), None),
    "give select": ("logits", BATCH, None),
    "does not read it": ("embedding", BATCH, SELECT),
    "has tokens 0 to 3": ("logits", BATCH, np.array([0, 4], np.int32)),
    "select is int64": ("logits", BATCH, np.array([0])),
    "rise from 0": ("embedding", Batch(BATCH.token_ids, np.array([0, 3], np.int32)), None),
    "does not rise at sequence 1": ("embedding", Batch(BATCH.token_ids, np.array([0, 4, 4], np.int32)), None),
    "cu_seqlens is int64": ("embedding", Batch(BATCH.token_ids, np.array([0, 4])), None),
    "token_ids is float32": ("embedding", Batch(BATCH.token_ids.astype(np.float32), BATCH.cu_seqlens), None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("message", BAD)
def test_requests_that_cannot_be_served(message: str) -> None:
    with pytest.raises(InputError, match=message):
        Reference(small_graph()).run(*BAD[message])
