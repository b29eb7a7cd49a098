"""Steps one by one, on random numbers, against the reference's evaluators."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-gpu")

from encast.backends.gpu.packed import pack
from encast.backends.gpu.steps import STEPS, Context
from encast.backends.gpu.steps.products import Int8Weight, half_product
from encast.backends.reference import EVALUATORS
from encast.backends.reference import Context as ReferenceContext
from encast.batch import Batch
from encast.ir import OPS
from encast.ir.ops import POOLING_MODES
from encast.ir.relative import pack_distances, unpack_distances

CPU = torch.device("cpu")


def batch_of(rng: np.random.Generator, seqs: int = 7, longest: int = 40) -> Batch:
    return Batch.of([rng.integers(0, 6, length).tolist() for length in rng.integers(1, longest + 1, seqs)])


def both(op: str, batch: Batch, *operands: Any, select: Any = None, **attrs: Any) -> tuple[Any, Any]:
    """What the step makes, and what the reference does; f32 arrays go in as they are."""
    context = Context(pack(batch, select, CPU), torch.float32)
    tensors = [torch.from_numpy(one) if isinstance(one, np.ndarray) else one for one in operands]
    wide = [
        one.astype(np.float64) if isinstance(one, np.ndarray) and one.dtype == np.float32 else one for one in operands
    ]
    return STEPS[op](context, *tensors, **attrs), EVALUATORS[op](ReferenceContext(batch.cu_seqlens), *wide, **attrs)


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Any:
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def test_every_op_has_a_step_or_is_known_to_have_none() -> None:
    """Those without are the parts that ``attention`` and ``rotary_qkv`` are fused of, and sparse products, which
    ``adapt`` makes dense."""
    assert set(OPS) - set(STEPS) == {
        "rotary", "attention_scores", "relative_bias", "linear_bias", "relative_scores", "local_mask", "hide_keys",
        "softmax", "attention_context", "linear_sparse_int8",
    }  # fmt: skip
    assert set(STEPS) <= set(OPS)


@pytest.mark.parametrize("columns", [512, 1534, 3])
def test_sums_in_f16_are_within_their_bound(columns: int) -> None:
    """A rounding for each eight columns and one for the bias; and each is made, f32 sums being much nearer."""
    rng = np.random.default_rng(columns)
    x, weight, bias = (torch.from_numpy(normal(rng, *shape)).half() for shape in ((33, columns), (40, columns), (40,)))
    made = half_product(x, weight, bias)
    assert made.dtype == torch.float16
    exact = x.double() @ weight.double().t() + bias.double()
    sizes = x.double().abs() @ weight.double().abs().t() + bias.double().abs()
    off, rounded = made.double() - exact, exact.half().double() - exact
    count = -(-columns // 8) + 1
    assert (off.abs() <= count * 2.0**-11 / (1 - count * 2.0**-11) * sizes).all()
    if columns > 500:
        # A walk of as many roundings as there are sums, each of the size reached so far.
        assert off.square().mean() > 0.2 * count * rounded.square().mean()


def test_sums_in_f16_overflow() -> None:
    x, weight = (torch.tensor([[200.0] * 16], dtype=torch.float16) for _ in range(2))
    weight[0, 8:] = -200
    assert torch.nn.functional.linear(x, weight).item() == 0
    assert half_product(x, weight, None).isinf().all(), "not a number that looks right"


def test_a_card_is_told_to_sum_in_f16_for_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = torch.backends.cuda.matmul
    seen = []

    def linear(*_: Any) -> None:
        seen.append(settings.allow_fp16_accumulation)
        raise RuntimeError("the card is gone")

    monkeypatch.setattr("torch.nn.functional.linear", linear)
    for before in (False, True):
        monkeypatch.setattr(settings, "allow_fp16_accumulation", before)
        with pytest.raises(RuntimeError, match="the card is gone"):
            half_product(SimpleNamespace(is_cuda=True), torch.zeros(1), None)  # type: ignore[arg-type]
        assert settings.allow_fp16_accumulation == before
    assert seen == [True, True]


def test_an_interrupt_leaves_no_sums_in_f16_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch sets it in a Python function, at whose end Ctrl-C may be raised."""

    class Settings:
        allow_fp16_accumulation = False

        def __setattr__(self, name: str, value: bool) -> None:
            object.__setattr__(self, name, value)
            if value:
                raise KeyboardInterrupt

    settings = Settings()
    monkeypatch.setattr("torch.backends.cuda.matmul", settings)
    with pytest.raises(KeyboardInterrupt):
        half_product(SimpleNamespace(is_cuda=True), torch.zeros(1), None)  # type: ignore[arg-type]
    assert not settings.allow_fp16_accumulation


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("zero_point", [False, True])
def test_integers_and_scales_are_the_references(zero_point: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = normal(rng, 40, 33) * 10.0 ** rng.integers(-3, 4, (40, 1)).astype(np.float32)
    x[3], x[4], x[5], x[6] = 0, 1e-42, np.abs(x[5]), -np.abs(x[6])
    x[7] = np.round(x[7] * 2) / 2  # ties
    made, wanted = both("quantize", batch_of(rng), x, zero_point=zero_point)
    np.testing.assert_array_equal(made.codes.numpy().astype(np.int32) + 128, wanted.bytes)
    np.testing.assert_array_equal(made.scale.numpy(), wanted.scale)
    np.testing.assert_array_equal(128 - made.shift.numpy(), wanted.zero)


@pytest.mark.parametrize("seed", range(4))
def test_f8_codes_and_scales_are_the_references(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = normal(rng, 40, 33) * 10.0 ** rng.integers(-3, 4, (40, 1)).astype(np.float32)
    x[3], x[4], x[5] = 0, 1e-42, np.abs(x[5])
    x[6, :3] = 448, 17, 19  # ties
    x[7] *= np.exp2(rng.integers(-18, 1, 33)).astype(np.float32)  # below the smallest normal number
    made, wanted = both("cast_f8", batch_of(rng), x)
    np.testing.assert_array_equal(made.codes.double().numpy() * made.scale.double().numpy()[:, None], wanted)


def test_a_row_with_a_nan_has_no_scale() -> None:
    x = np.ones((3, 8), np.float32)
    x[1, 2] = np.nan
    for op, attrs in (("quantize", {"zero_point": True}), ("quantize_static", {"scale": 0.5, "zero_point": 3})):
        made = STEPS[op](Context(None, torch.float32), torch.from_numpy(x), **attrs)  # type: ignore[arg-type]
        assert torch.isnan(made.scale).tolist() == [False, True, False]


@pytest.mark.parametrize("zero", [0, 128, 255])
def test_static_integers_saturate_as_the_references(zero: int) -> None:
    rng = np.random.default_rng(zero)
    made, wanted = both(
        "quantize_static", batch_of(rng), normal(rng, 20, 30, scale=9), scale=float(np.float32(0.037)), zero_point=zero
    )
    np.testing.assert_array_equal(made.codes.numpy().astype(np.int32) + 128, wanted.bytes)
    np.testing.assert_array_equal(made.scale.numpy(), wanted.scale)
    np.testing.assert_array_equal(128 - made.shift.numpy(), wanted.zero)


@pytest.mark.parametrize(("rows", "n", "k"), [(1, 1, 1), (5, 16, 48), (17, 33, 70), (40, 7, 1025)])
def test_int8_products_are_exact(rows: int, n: int, k: int) -> None:
    rng = np.random.default_rng(n)
    batch = batch_of(rng)
    # The extremes too: what int8 instructions with 16-bit sums would lose.
    x, weight = normal(rng, rows, k), rng.choice(np.array([-127, 127, 5], np.int8), (n, k))
    scale, bias = np.ones(n, np.float32), normal(rng, n)
    quantized, of_reference = both("quantize", batch, x, zero_point=True)
    context = Context(pack(batch, None, CPU), torch.float32)
    made = STEPS["linear_int8"](
        context, quantized, Int8Weight(torch.from_numpy(weight)), torch.from_numpy(scale), torch.from_numpy(bias),
        activation="none",
    )  # fmt: skip
    wanted = EVALUATORS["linear_int8"](None, of_reference, weight, scale, bias, activation="none")
    np.testing.assert_allclose(made.numpy(), wanted, rtol=3e-7, atol=3e-7 * np.abs(bias).max())


@pytest.mark.parametrize("skip_id", [-1, 2])
def test_position_ids(skip_id: int) -> None:
    rng = np.random.default_rng(1)
    batch = batch_of(rng)
    made, wanted = both("position_ids", batch, batch.token_ids, offset=3, skip_id=skip_id)
    np.testing.assert_array_equal(made.numpy(), wanted)


@pytest.mark.parametrize("most", [1, 3, 100])
def test_seen_tokens(most: int) -> None:
    batch = Batch.of([[1, 2, 2, 2], [2], [2, 2, 2], [2, 2, 1], [1, 2, 1, 2], [3] * 5, [1, 2, 2]])
    made, wanted = both("seen_tokens", batch, batch.token_ids, token=2, most=most)
    np.testing.assert_array_equal(made.numpy(), wanted)


@pytest.mark.parametrize("seed", range(3))
def test_pooling(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch = batch_of(rng)
    made, wanted = both("pooling", batch, normal(rng, batch.tokens, 9), modes=list(POOLING_MODES))
    np.testing.assert_allclose(made.numpy(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [1, 3, 9])
def test_windows(width: int) -> None:
    rng = np.random.default_rng(width)
    batch = batch_of(rng, longest=6)
    made, wanted = both("window_rows", batch, normal(rng, batch.tokens, 4), width=width)
    np.testing.assert_array_equal(made.numpy(), wanted)


@pytest.mark.parametrize("products", ["f32", "bf16"])
@pytest.mark.parametrize("seed", range(3))
def test_attention(seed: int, products: str) -> None:
    rng = np.random.default_rng(seed)
    batch = batch_of(rng)
    heads, size = int(rng.integers(1, 5)), int(rng.integers(1, 20))
    qkv = normal(rng, batch.tokens, 3 * heads * size)
    lengths = np.diff(batch.cu_seqlens)
    seen = rng.integers(1, lengths + 1).astype(np.int32)
    # Wider than any text needs.
    bias = normal(rng, heads, 2 * 45 - 1)
    attrs: dict[str, Any] = {"heads": heads, "scale": 0.3, "products": products}
    near = np.maximum(lengths - 4, 1).astype(np.int32)
    for op, operands, more in (
        ("attention", (None, None), {}),
        ("attention", (bias, None), {}),
        ("attention", (bias, seen), {}),
        ("local_attention", (None,), {"reach": 4}),
        ("local_attention", (near,), {"reach": 4}),
    ):
        made, wanted = both(op, batch, qkv, *operands, **attrs, **more)
        # A power on the edge between two bf16 may be rounded to the other.
        np.testing.assert_allclose(made.numpy(), wanted, atol=2e-6 if products == "f32" else 2e-3)
        assert np.abs(made.numpy() - wanted).mean() < 1e-5


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tables", ["key", "query", "both"])
def test_disentangled_attention(tables: str, shared: bool) -> None:
    rng = np.random.default_rng(len(tables))
    batch = batch_of(rng, longest=30)
    heads, size = 3, 5
    qkv = normal(rng, batch.tokens, 3 * heads * size)
    owners = 1 if shared else heads
    packed = [
        pack_distances(normal(rng, 2 * 33 - 1, owners * size), owners) if tables in (name, "both") else None
        for name in ("key", "query")
    ]
    unpacked = [None if table is None else torch.from_numpy(unpack_distances(table, owners, size)) for table in packed]
    attrs: dict[str, Any] = {"heads": heads, "scale": 0.2, "products": "f32", "shared": shared}
    context = Context(pack(batch, None, CPU), torch.float32)
    made = STEPS["disentangled_attention"](context, torch.from_numpy(qkv), *unpacked, **attrs)
    wanted = EVALUATORS["disentangled_attention"](
        ReferenceContext(batch.cu_seqlens), qkv.astype(np.float64), *packed, **attrs
    )
    np.testing.assert_allclose(made.numpy(), wanted, atol=3e-6)
