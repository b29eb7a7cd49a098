"""Triton's kernels: compiled for a card that need not be there, and run by the interpreter beside the reference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-gpu")
pytest.importorskip("triton", reason="Triton is not installed: make test-gpu")

from bounds import allowed_difference, largest_excess
from models import DEVICE, FAST_ELEMENTARY, HERE, compiled_graph, rms, tensor
from test_steps import normal

from encast.backends.gpu.adapt import adapt
from encast.backends.gpu.kernels import INTERPRETED, STEPS, product, steps_for
from encast.backends.gpu.kernels.product import Scales, can_multiply, multiply
from encast.backends.gpu.packed import TILE, pack
from encast.backends.gpu.runnable import GpuRunnable
from encast.backends.gpu.steps import STEPS as PLAIN
from encast.backends.gpu.steps import Context
from encast.backends.gpu.steps.attention import with_margins
from encast.backends.gpu.steps.narrow import f8_rows
from encast.backends.gpu.steps.products import Int8Weight
from encast.backends.gpu.steps.rows import activated
from encast.backends.reference import EVALUATORS, Reference
from encast.backends.reference import Context as ReferenceContext
from encast.batch import Batch
from encast.errors import InputError
from encast.ir import Graph
from encast.ir.ops import ACTIVATIONS
from encast.ir.types import ValueType

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
UNITS = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}

pytestmark = pytest.mark.skipif(not INTERPRETED and DEVICE == "torch-cpu", reason="TRITON_INTERPRET is 0")


def batch_of(lengths: Any) -> Batch:
    return Batch.of([[0] * int(length) for length in lengths])


SHAPES: list[tuple[tuple[int, ...], int, int]] = [
    ((1,), 1, 1),
    ((1, 1, 1), 2, 7),
    ((TILE, TILE - 1, TILE + 1), 1, 16),
    ((3, 130, 1, 64, 17), 2, 20),
    ((200,), 3, 64),
    ((9, 70), 1, 130),
]
"""Lengths of the sequences, heads, columns of a head."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("lengths", "heads", "size"), SHAPES)
def test_attention(lengths: tuple[int, ...], heads: int, size: int, dtype: str) -> None:
    rng = np.random.default_rng(size)
    batch = batch_of(lengths)
    qkv = normal(rng, batch.tokens, 3 * heads * size)
    bias = normal(rng, heads, 2 * max(lengths) + 5)
    of_lengths = np.array(lengths)
    some = rng.integers(1, of_lengths + 1).astype(np.int32)
    near = np.maximum(of_lengths - 5, 1).astype(np.int32)
    stored = tensor(qkv).to(DTYPES[dtype])
    context = Context(pack(batch, None, HERE), DTYPES[dtype])
    attrs: dict[str, Any] = {"heads": heads, "scale": 1.5 / size, "products": "f32"}
    for op, operands, more in (
        ("attention", (None, None), {}),
        ("attention", (bias, None), {}),
        ("attention", (bias, some), {}),
        ("local_attention", (None,), {"reach": 5}),
        ("local_attention", (near,), {"reach": 5}),
        ("local_attention", (None,), {"reach": 90}),
    ):
        tensors = [None if one is None else tensor(one) for one in operands]
        if op == "attention" and tensors[0] is not None:
            tensors[0] = with_margins(tensors[0])
        made = STEPS[op](context, stored, *tensors, **attrs, **more)
        assert made.dtype == DTYPES[dtype]
        wide = (None if one is None else one.astype(np.float64) if one.dtype == np.float32 else one for one in operands)
        exact = EVALUATORS[op](
            ReferenceContext(batch.cu_seqlens), stored.double().cpu().numpy(), *wide, **attrs, **more
        )
        # Each power and the answer are rounded to the dtype, sums are f32.
        largest = np.abs(stored.float().cpu().numpy()[:, 2 * heads * size :]).max()
        assert np.abs(made.double().cpu().numpy() - exact).max() <= (3 * UNITS[dtype] + 64 * UNITS["f32"]) * largest


@pytest.mark.parametrize("products", ["f32", "bf16"])
def test_what_attention_makes_of_a_text_has_the_same_bits_in_every_batch(products: str) -> None:
    rng = np.random.default_rng(3)
    lengths = (5, 130, 1, 64)
    batch = batch_of(lengths)
    qkv = tensor(normal(rng, batch.tokens, 3 * 2 * 8))
    bias = with_margins(tensor(normal(rng, 2, 301)))
    attrs: dict[str, Any] = {"heads": 2, "scale": 0.4, "products": products}
    for op, operands, more in (("attention", (bias,), {}), ("local_attention", (), {"reach": 7})):
        whole = STEPS[op](Context(pack(batch, None, HERE), torch.float32), qkv, *operands, **attrs, **more)
        padded = pack(batch, None, HERE, tokens=batch.tokens + 5, seqs=9)
        longer = torch.cat([qkv, torch.full((5, qkv.shape[1]), torch.nan, device=HERE)])
        assert torch.equal(STEPS[op](Context(padded, torch.float32), longer, *operands, **attrs, **more)[:-5], whole)
        for begin, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
            alone = Context(pack(batch_of([end - begin]), None, HERE), torch.float32)
            assert torch.equal(STEPS[op](alone, qkv[begin:end], *operands, **attrs, **more), whole[begin:end])


ALSO: list[Any] = [None, "bf16", "f8", "q8", "q8_zero_point", {"scale": 0.03125, "zero_point": 117}]


def assert_copies_equal(made: Any, same: Any) -> None:
    for one, other in zip(*(vars(copy).values() for copy in (made, same)), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(*(half.float() if half.dtype == torch.float8_e4m3fn else half for half in (one, other)))


def plain_copy(context: Any, x: Any, also: Any) -> Any:
    """As PyTorch makes it."""
    if isinstance(also, dict):
        return PLAIN["quantize_static"](context, x, **also)
    if also == "f8":
        return PLAIN["cast_f8"](context, x)
    return PLAIN["quantize"](context, x, zero_point=also == "q8_zero_point")


@pytest.mark.parametrize("also", ALSO, ids=str)
@pytest.mark.parametrize("op", ["layer_norm", "add_layer_norm", "rms_norm"])
@pytest.mark.parametrize("columns", [1, 16, 33, 768])
def test_norms(op: str, also: Any, columns: int) -> None:
    rng = np.random.default_rng(columns)
    batch = batch_of([4, 3])
    x, gamma, beta = normal(rng, 7, columns, scale=3), normal(rng, columns), normal(rng, columns)
    x[2] = 0
    arrays = {
        "layer_norm": (x, gamma, beta),
        "add_layer_norm": (x, normal(rng, 7, columns), gamma, beta),
        "rms_norm": (x, gamma),
    }[op]
    context = Context(pack(batch, None, HERE), torch.float32)
    name, attrs = (op, {}) if also is None else (f"{op}_narrow", {"also": also})
    made = STEPS[name](context, *map(tensor, arrays), eps=1e-6, **attrs)
    wide = made if also is None else made[0]
    exact = EVALUATORS[op](None, *(one.astype(np.float64) for one in arrays), eps=1e-6)
    np.testing.assert_allclose(wide.cpu().numpy(), exact, rtol=3e-5, atol=1e-5 * max(1, np.abs(exact).max()))
    if also is None:
        return
    # The narrow copy is that of the very numbers that are stored.
    if also == "bf16":
        assert torch.equal(made[1], PLAIN["cast_bf16"](context, wide))
    else:
        assert_copies_equal(made[1], plain_copy(context, wide, also))


@pytest.mark.parametrize("also", ALSO[2:], ids=str)
@pytest.mark.parametrize("columns", [1, 48, 1030, 5000])
@pytest.mark.parametrize("stored", ["f32", "f16"])
def test_narrow_copies(stored: str, columns: int, also: Any) -> None:
    rng = np.random.default_rng(columns)
    x = normal(rng, 9, columns) * 10.0 ** rng.integers(-3, 3, (9, 1)).astype(np.float32)
    x[0], x[1], x[2], x[3] = 0, 1e-42, np.abs(x[2]), -np.abs(x[3])
    x[4] = np.round(x[4] * 2) / 2  # ties
    of_dtype = tensor(x).to(DTYPES[stored])
    context = Context(pack(batch_of([9]), None, HERE), DTYPES[stored])
    name, attrs = "quantize", {"zero_point": also == "q8_zero_point"}
    if also == "f8":
        name, attrs = "cast_f8", {}
    elif isinstance(also, dict):
        name, attrs = "quantize_static", also
    assert_copies_equal(STEPS[name](context, of_dtype, **attrs), plain_copy(context, of_dtype, also))


@pytest.mark.parametrize("also", ALSO, ids=str)
@pytest.mark.parametrize("skip", [-1, 1])
@pytest.mark.parametrize(("types", "position"), [(True, True), (False, True), (True, False), (False, False)])
def test_embeddings(types: bool, position: bool, skip: int, also: Any) -> None:
    rng = np.random.default_rng(skip + 2)
    batch = Batch.of([rng.integers(0, 9, length).tolist() for length in (5, 1, 40)])
    packed = pack(batch, None, HERE)
    packed.token_type_ids.copy_(tensor(rng.integers(0, 2, batch.tokens).astype(np.int32)))
    tables = [tensor(normal(rng, rows, 20)) for rows in (9, 60, 2)]
    operands = [
        packed.token_ids,
        packed.token_type_ids if types else None,
        tables[0],
        tables[1] if position else None,
        tables[2] if types else None,
        *(tensor(normal(rng, 20)) for _ in range(2)),
    ]
    attrs: dict[str, Any] = {"eps": 1e-6, "position_offset": 2, "position_skip_id": skip}
    name = "embed_layer_norm" if also is None else "embed_layer_norm_narrow"
    more = {} if also is None else {"also": also}
    context = Context(packed, torch.float32)
    made, same = (table[name](context, *operands, **attrs, **more) for table in (STEPS, PLAIN))
    torch.testing.assert_close(*((made, same) if also is None else (made[0], same[0])), rtol=1e-5, atol=1e-5)
    if also not in (None, "bf16"):
        assert_copies_equal(made[1], plain_copy(context, made[0], also))


@pytest.mark.parametrize("also", ALSO[2:], ids=str)
def test_a_row_with_a_nan_has_no_scale(also: Any) -> None:
    x = torch.ones(3, 8, device=HERE)
    x[1, 2] = torch.nan
    context = Context(pack(batch_of([3]), None, HERE), torch.float32)
    made = STEPS["layer_norm_narrow"](context, x, x[0], x[0], eps=1e-6, also=also)[1]
    assert torch.isnan(made.scale).tolist() == [False, True, False]


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("activation", ["none", *ACTIVATIONS])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 8, 16), (70, 136, 80), (200, 520, 144), (1500, 272, 32)])
def test_products_with_what_follows(rows: int, n: int, k: int, activation: str, stored: str) -> None:
    """Of every kind of operands beside float64, in large tiles and in small ones."""
    rng = np.random.default_rng(n)
    x, weight, bias = normal(rng, rows, k), normal(rng, n, k, scale=k**-0.5), tensor(normal(rng, n))
    context = Context(pack(batch_of([1]), None, HERE), DTYPES[stored])
    quantized = PLAIN["quantize"](context, tensor(x), zero_point=True)
    integers = tensor(rng.integers(-127, 128, (n, k)).astype(np.int8))
    sums = integers.sum(dim=1, dtype=torch.int32)
    scale = tensor(np.abs(normal(rng, n)) * 0.001)
    f8, of_weight = f8_rows(tensor(x)), f8_rows(tensor(weight))
    bytes_by_scale = quantized.codes.double() + quantized.shift[:, None]
    products = (
        (tensor(x).half(), tensor(weight).half(), None, tensor(x).half().double() @ tensor(weight).half().double().t()),
        (
            tensor(x).bfloat16(), tensor(weight).bfloat16(), None,
            tensor(x).bfloat16().double() @ tensor(weight).bfloat16().double().t(),
        ),
        (
            f8.codes, of_weight.codes, Scales(f8.scale, of_weight.scale),
            (f8.codes.double() * f8.scale[:, None]) @ (of_weight.codes.double() * of_weight.scale[:, None]).t(),
        ),
        (
            quantized.codes, integers, Scales(quantized.scale, scale, quantized.shift, sums),
            (bytes_by_scale * quantized.scale[:, None]) @ (integers.double() * scale[:, None]).t(),
        ),
    )  # fmt: skip
    for operand, of_operand, scales, exact in products:
        assert can_multiply(operand, of_operand)
        for added in (bias, None):
            made = multiply(operand, of_operand, added, activation, DTYPES[stored], scales)
            wanted = activated(exact if added is None else exact + added, activation)
            assert made.dtype == DTYPES[stored]
            # Cards sum products of f8 in fewer bits: 2^-13 of what they add was seen on one.
            units = UNITS[stored] + (2.0**-10 if operand.itemsize == 1 and scales.shifts is None else 2.0**-20)
            assert (made.double() - wanted).abs().max() <= 2 * units * max(1.0, exact.abs().max().item())


@pytest.mark.parametrize("tile", range(len(product._TILES)))
@pytest.mark.parametrize("stored", ["f16", "f32"])
@pytest.mark.parametrize("operands", ["f16", "f8", "int8"])
def test_products_in_every_tile_by_few_programs(
    operands: str, stored: str, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each goes through several tiles, in two groups of rows; the last ones of both directions are cut off."""
    if stored == "f32" and product._TILES[tile][1] == 256:
        pytest.skip("a tile of f32 is too large")
    monkeypatch.setattr(product, "_TILES", (product._TILES[tile],))
    monkeypatch.setattr(product, "_multiprocessors", lambda device: 3)
    rng = np.random.default_rng(tile)
    rows, n, k = 9 * product._TILES[0][0] + 5, 2 * product._TILES[0][1] + 7, 400
    x, weight, bias = (tensor(normal(rng, *shape, scale=0.3)) for shape in ((rows, k), (n, k), (n,)))
    scales = None
    if operands == "f16":
        left, right = x.half(), weight.half()
        exact = left.double() @ right.double().t()
    elif operands == "f8":
        f8, of_weight = f8_rows(x), f8_rows(weight)
        left, right, scales = f8.codes, of_weight.codes, Scales(f8.scale, of_weight.scale)
        exact = (left.double() * f8.scale[:, None]) @ (right.double() * of_weight.scale[:, None]).t()
    else:
        left, right = ((10 * one).round().clamp(-127, 127).to(torch.int8) for one in (x, weight))
        shifts = tensor(rng.integers(-100, 100, rows).astype(np.int32))
        scales = Scales(x[:, 0].abs() / 100, weight[:, 0].abs(), shifts, right.sum(dim=1, dtype=torch.int32))
        exact = (left.double() + shifts[:, None]) @ right.double().t() * scales.rows[:, None] * scales.columns
    made = multiply(left, right, bias, "none", DTYPES[stored], scales)
    assert made.shape == (rows, n)
    units = UNITS[stored] + (2.0**-10 if operands == "f8" else 2.0**-18)
    wanted = exact + bias
    assert (made.double() - wanted).abs().max() <= 2 * units * wanted.abs().max()


def test_products_that_the_copy_engine_does_not_take() -> None:
    """Rows that do not begin at multiples of 16 bytes."""
    for k, takes in ((8, True), (12, False)):
        x, weight = torch.zeros(2, k, device=HERE).half(), torch.zeros(3, k, device=HERE).half()
        assert can_multiply(x, weight) == takes
    assert not can_multiply(torch.zeros(16, 2, device=HERE).half().t(), torch.zeros(8, 16, device=HERE).half())
    assert not can_multiply(torch.zeros(17, device=HERE).half()[1:][None], torch.zeros(8, 16, device=HERE).half())


@pytest.mark.parametrize("activation", ["none", *ACTIVATIONS])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 1, 1), (5, 33, 70), (17, 130, 48)])
def test_epilogues(rows: int, n: int, k: int, activation: str) -> None:
    rng = np.random.default_rng(n)
    context = Context(pack(batch_of([rows]), None, HERE), torch.float32)
    x = tensor(normal(rng, rows, k))
    weight = tensor(rng.integers(-127, 128, (n, k)).astype(np.int8))
    scale, bias = tensor(np.abs(normal(rng, n)) * 0.01), tensor(normal(rng, n))
    quantized = PLAIN["quantize"](context, x, zero_point=True)
    narrow, of_weight = x.bfloat16(), (weight.float() * 0.01).bfloat16()
    for op, operands in (
        ("linear_int8", (quantized, Int8Weight(weight), scale, bias)),
        ("linear_int8", (quantized, Int8Weight(weight), scale, None)),
        ("linear_bf16", (narrow, of_weight, bias)),
        ("linear_bf16", (narrow, of_weight, None)),
    ):
        made, same = (table[op](context, *operands, activation=activation) for table in (STEPS, PLAIN))
        torch.testing.assert_close(made, same, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    "name",
    [
        "mpnet-embed-every-mode",
        "modernbert-features",
        "jina_bert-features",
        "eurobert-odd",
        "deberta-v2-embed",
        "bert-odd",
    ],
)
def test_models_in_f32(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    opened, graph = compiled_graph(name, "f32", tmp_path_factory)
    gpu = GpuRunnable(graph, DEVICE, kernels="triton")
    assert any(line.startswith("by Triton: ") for line in gpu.report())
    got = gpu.run(opened.output, opened.batch, opened.select)
    exact, allowed = allowed_difference(
        opened.graph, opened.output, opened.batch, opened.select, elementary=FAST_ELEMENTARY
    )
    assert largest_excess(got, exact, allowed) <= 1


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@pytest.mark.parametrize("name", ["bert-embed", "modernbert-features"])
def test_models_in_narrow_dtypes(name: str, dtype: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    opened, graph = compiled_graph(name, dtype, tmp_path_factory)
    got = GpuRunnable(graph, DEVICE, kernels="triton").run(opened.output, opened.batch, opened.select)
    same, wide = (Reference(one).evaluate(opened.output, opened.batch) for one in (adapt(graph)[0], opened.graph))
    assert rms(got - same) <= 0.7 * rms(same - wide)


def test_kernels_compile_for_a_card(tmp_path: Path) -> None:
    """To machine code, with the shared memory and the registers that a multiprocessor has: the interpreter accepts what
    the compiler does not."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    made = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), "80", "90"],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert made.returncode == 0, made.stderr
    assert {line.split()[1] for line in made.stdout.splitlines()} == {
        "_attend",
        "_norm",
        "_embed",
        "_narrow",
        "_epilogue",
        "_product",
    }


def test_rows_and_heads_that_no_program_holds_are_left_to_pytorch() -> None:
    """Of a graph with a head of 256 columns, and of one with a small one."""
    for heads, same in ((1, True), (4, False)):
        graph = Graph()
        graph.add_input("token_ids", ValueType("i32", ("tokens",)))
        for name, shape in (("table", (5, 768)), ("gamma", (256,)), ("beta", (256,))):
            graph.add_constant(name, np.ones(shape, np.float32))
        graph.add("embedding", "token_ids", "table", name="qkv")
        graph.add("attention", "qkv", name="context", heads=heads, scale=1.0, products="f32")
        graph.add("layer_norm", "context", "gamma", "beta", name="norm", eps=1e-5)
        steps = steps_for(graph)
        assert (steps["attention"] is PLAIN["attention"]) == same
        assert steps["layer_norm"] is STEPS["layer_norm"]


def test_the_cpu_needs_the_interpreter(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, graph = compiled_graph("bert-embed", "f32", tmp_path_factory)
    monkeypatch.setattr("encast.backends.gpu.kernels.INTERPRETED", False)
    with pytest.raises(InputError, match="on the CPU they need TRITON_INTERPRET=1"):
        GpuRunnable(graph, "torch-cpu", kernels="triton")


def test_sums_in_f16_are_none_of_the_kernels_own() -> None:
    """It sums in f32, which would be another dtype than was asked for."""
    rng = np.random.default_rng(5)
    x, weight, bias = (tensor(normal(rng, *shape)).half() for shape in ((40, 256), (64, 256), (64,)))
    batch = pack(Batch.of([[1] * 40]), None, HERE)
    ours, plain = (
        table["linear"](Context(batch, torch.float16, half_sums=True), x, weight, bias, activation="gelu")
        for table in (STEPS, PLAIN)
    )
    assert torch.equal(ours, plain)
    assert not torch.equal(ours, STEPS["linear"](Context(batch, torch.float16), x, weight, bias, activation="gelu"))
