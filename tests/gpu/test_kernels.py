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
from models import FAST_ELEMENTARY, compiled_graph, rms
from test_steps import normal

from encast.backends.gpu.adapt import adapt
from encast.backends.gpu.kernels import INTERPRETED, STEPS, steps_for
from encast.backends.gpu.packed import TILE, pack
from encast.backends.gpu.runnable import GpuRunnable
from encast.backends.gpu.steps import STEPS as PLAIN
from encast.backends.gpu.steps import Context
from encast.backends.gpu.steps.products import Int8Weight
from encast.backends.reference import EVALUATORS, Reference
from encast.backends.reference import Context as ReferenceContext
from encast.batch import Batch
from encast.errors import InputError
from encast.ir import Graph
from encast.ir.ops import ACTIVATIONS
from encast.ir.types import ValueType

CPU = torch.device("cpu")
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
UNITS = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is 0")


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
    stored = torch.from_numpy(qkv).to(DTYPES[dtype])
    context = Context(pack(batch, None, CPU), DTYPES[dtype])
    attrs: dict[str, Any] = {"heads": heads, "scale": 1.5 / size, "products": "f32"}
    for op, operands, more in (
        ("attention", (None, None), {}),
        ("attention", (bias, None), {}),
        ("attention", (bias, some), {}),
        ("local_attention", (None,), {"reach": 5}),
        ("local_attention", (near,), {"reach": 5}),
        ("local_attention", (None,), {"reach": 90}),
    ):
        tensors = (None if one is None else torch.from_numpy(one) for one in operands)
        made = STEPS[op](context, stored, *tensors, **attrs, **more)
        assert made.dtype == DTYPES[dtype]
        wide = (None if one is None else one.astype(np.float64) if one.dtype == np.float32 else one for one in operands)
        exact = EVALUATORS[op](ReferenceContext(batch.cu_seqlens), stored.double().numpy(), *wide, **attrs, **more)
        # Each power and the answer are rounded to the dtype, sums are f32.
        largest = np.abs(stored.float().numpy()[:, 2 * heads * size :]).max()
        assert np.abs(made.double().numpy() - exact).max() <= (3 * UNITS[dtype] + 64 * UNITS["f32"]) * largest


@pytest.mark.parametrize("products", ["f32", "bf16"])
def test_what_attention_makes_of_a_text_has_the_same_bits_in_every_batch(products: str) -> None:
    rng = np.random.default_rng(3)
    lengths = (5, 130, 1, 64)
    batch = batch_of(lengths)
    qkv = torch.from_numpy(normal(rng, batch.tokens, 3 * 2 * 8))
    bias = torch.from_numpy(normal(rng, 2, 301))
    attrs: dict[str, Any] = {"heads": 2, "scale": 0.4, "products": products}
    for op, operands, more in (("attention", (bias,), {}), ("local_attention", (), {"reach": 7})):
        whole = STEPS[op](Context(pack(batch, None, CPU), torch.float32), qkv, *operands, **attrs, **more)
        padded = pack(batch, None, CPU, tokens=batch.tokens + 5, seqs=9)
        longer = torch.cat([qkv, torch.full((5, qkv.shape[1]), torch.nan)])
        assert torch.equal(STEPS[op](Context(padded, torch.float32), longer, *operands, **attrs, **more)[:-5], whole)
        for begin, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
            alone = Context(pack(batch_of([end - begin]), None, CPU), torch.float32)
            assert torch.equal(STEPS[op](alone, qkv[begin:end], *operands, **attrs, **more), whole[begin:end])


ALSO: list[Any] = [None, "bf16", "q8", "q8_zero_point", {"scale": 0.03125, "zero_point": 117}]


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
    context = Context(pack(batch, None, CPU), torch.float32)
    name, attrs = (op, {}) if also is None else (f"{op}_narrow", {"also": also})
    made = STEPS[name](context, *map(torch.from_numpy, arrays), eps=1e-6, **attrs)
    wide = made if also is None else made[0]
    exact = EVALUATORS[op](None, *(one.astype(np.float64) for one in arrays), eps=1e-6)
    np.testing.assert_allclose(wide.numpy(), exact, rtol=3e-5, atol=1e-5 * max(1, np.abs(exact).max()))
    if also is None:
        return
    # The narrow copy is that of the very numbers that are stored.
    same = PLAIN["cast_bf16"](context, wide) if also == "bf16" else None
    if isinstance(also, dict):
        same = PLAIN["quantize_static"](context, wide, **also)
    elif also != "bf16":
        same = PLAIN["quantize"](context, wide, zero_point=also == "q8_zero_point")
    if also == "bf16":
        assert torch.equal(made[1], same)
    else:
        assert torch.equal(made[1].codes, same.codes)
        assert torch.equal(made[1].scale, same.scale)
        assert torch.equal(made[1].shift, same.shift)


@pytest.mark.parametrize("also", ALSO[2:], ids=str)
def test_a_row_with_a_nan_has_no_scale(also: Any) -> None:
    x = torch.ones(3, 8)
    x[1, 2] = torch.nan
    context = Context(pack(batch_of([3]), None, CPU), torch.float32)
    made = STEPS["layer_norm_narrow"](context, x, torch.ones(8), torch.ones(8), eps=1e-6, also=also)[1]
    assert torch.isnan(made.scale).tolist() == [False, True, False]


@pytest.mark.parametrize("activation", ["none", *ACTIVATIONS])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 1, 1), (5, 33, 70), (17, 130, 48)])
def test_epilogues(rows: int, n: int, k: int, activation: str) -> None:
    rng = np.random.default_rng(n)
    context = Context(pack(batch_of([rows]), None, CPU), torch.float32)
    x = torch.from_numpy(normal(rng, rows, k))
    weight = torch.from_numpy(rng.integers(-127, 128, (n, k)).astype(np.int8))
    scale, bias = torch.from_numpy(np.abs(normal(rng, n)) * 0.01), torch.from_numpy(normal(rng, n))
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
    gpu = GpuRunnable(graph, "torch-cpu", kernels="triton")
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
    got = GpuRunnable(graph, "torch-cpu", kernels="triton").run(opened.output, opened.batch, opened.select)
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
    assert {line.split()[1] for line in made.stdout.splitlines()} == {"_attend", "_norm", "_epilogue"}


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
