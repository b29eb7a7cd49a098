"""Every architecture, head and dtype on the GPU's steps, against transformers' committed outputs and the reference."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-gpu")

import bounds
from bounds import allowed_difference, largest_excess
from cases import CASES, open_case
from edges import largest_unexplained
from models import DEVICE, FAST_ELEMENTARY, compiled_graph, open_gpu, rms

from encast.backends.gpu.adapt import adapt
from encast.backends.gpu.device import DTYPES
from encast.backends.gpu.runnable import GpuRunnable
from encast.backends.reference import Reference
from encast.crossover import DENSE_ROWS, DenseRows
from encast.passes import optimise
from encast.quant import QuantSpec


@pytest.mark.parametrize("name", CASES)
def test_f32_is_within_the_derived_bound(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    opened, graph = compiled_graph(name, "f32", tmp_path_factory)
    got = GpuRunnable(graph, DEVICE).run(opened.output, opened.batch, opened.select)
    exact, allowed = allowed_difference(
        opened.graph, opened.output, opened.batch, opened.select, elementary=FAST_ELEMENTARY
    )
    assert largest_excess(got, exact, allowed) <= 1.0
    assert largest_excess(opened.kept(got), opened.golden("f64"), opened.kept(allowed)) <= 1.0


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_narrow_dtypes_follow_the_reference(name: str, dtype: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The reference evaluates the graph that this backend computes, with exact integer sums and exact rounding.

    As for the CPU (tests/engine/test_exactness.py) a rounding on an edge may fall otherwise. And what this backend
    computes is hardly further from f32 than what was compiled, where there are numbers enough to tell.
    """
    opened, graph = compiled_graph(name, dtype, tmp_path_factory)
    got = GpuRunnable(graph, DEVICE).run(opened.output, opened.batch, opened.select)
    same, compiled, wide = (
        Reference(one).evaluate(opened.output, opened.batch, opened.select)
        for one in (adapt(graph)[0], graph, opened.graph)
    )
    of_dtype = rms(same - wide)
    assert rms(got - same) <= 0.7 * of_dtype + 1e-6 * rms(wide)
    if got.size >= 1000:
        assert of_dtype <= 1.3 * rms(compiled - wide) + 1e-6 * rms(wide)


@pytest.mark.parametrize(
    "name", ["bert-classify", "electra-odd-fill_mask", "modernbert-features", "deberta-v2-features"]
)
def test_bf16_rounds_as_the_reference(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """To f32 precision, whichever way roundings on an edge fell."""
    opened, graph = compiled_graph(name, "bf16", tmp_path_factory)
    adapted, _ = adapt(graph)
    answers = {opened.output: GpuRunnable(graph, DEVICE).run(opened.output, opened.batch, opened.select)}
    assert largest_unexplained(adapted, answers, opened.batch, opened.select, elementary=FAST_ELEMENTARY) <= 1


@pytest.mark.parametrize(("dtype", "unit"), [("f16", 2.0**-11), ("f16-acc16", 2.0**-11), ("bf16", 2.0**-8)])
@pytest.mark.parametrize(
    "name",
    [
        "bert-features",
        "bert-fill_mask",
        "mpnet-embed-every-mode",
        "modernbert-tag",
        "nomic_bert-features",
        "deberta-v2-conv",
        "eurobert-classify",
    ],
)
def test_values_of_16_bits_are_within_the_bound_of_their_unit(
    name: str, dtype: str, unit: float, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The derived bound, as if every operation rounded to 16 bits; sums, norms and softmax do better, in f32."""
    opened, graph = compiled_graph(name, "f32", tmp_path_factory)
    got = GpuRunnable(graph, DEVICE, dtype=dtype).run(opened.output, opened.batch, opened.select)
    assert got.dtype == np.float32
    monkeypatch.setattr(bounds, "UNIT", unit)
    exact, allowed = allowed_difference(
        opened.graph, opened.output, opened.batch, opened.select, elementary=FAST_ELEMENTARY
    )
    assert largest_excess(got, exact, allowed) <= 1.0
    # And it is that dtype: one in f32 would be a hundred times nearer.
    assert rms(got - exact) > 0.01 * unit * rms(exact)


@pytest.mark.parametrize("compiled", ["bf16", "int8"])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_narrow_artifacts_with_values_of_16_bits(
    compiled: str, dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    opened, graph = compiled_graph("bert-features", compiled, tmp_path_factory)
    got = open_gpu("bert-features", compiled, tmp_path_factory, dtype=dtype).run(opened.output, opened.batch)
    same, wide = (Reference(one).evaluate(opened.output, opened.batch) for one in (adapt(graph)[0], opened.graph))
    # No more than the dtype that it was compiled to costs, and what rounding every value to bf16 does.
    assert rms(got - wide) <= 1.5 * rms(same - wide) + 2.0**-7 * rms(wide)


def test_of_two_forms_of_a_weight_the_dense_one_is_multiplied(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DENSE_ROWS, "avx512vnni", (DenseRows(2.0, 24, 24),))  # the weights have no zeros
    opened = open_case("bert-features", tmp_path_factory)
    both, dense = (
        optimise(opened.graph, QuantSpec("int8"), sparse=sparse, isa="avx512vnni")[0] for sparse in ("auto", "never")
    )
    assert len(both.constants) > len(dense.constants)
    adapted, report = adapt(both)
    assert any("products in both forms are dense" in line for line in report)
    assert str(adapted) == str(adapt(dense)[0])


@pytest.mark.parametrize("compiled", ["f32", "bf16"])
@pytest.mark.parametrize(
    "name",
    ["bert-features", "bert-fill_mask", "mpnet-embed-every-mode", "modernbert-tag", "deberta-v2-conv", "bert-odd"],
)
def test_products_of_f8_follow_the_reference(
    name: str, compiled: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With values stored in f32. In f16, as they are, codes on an edge fall otherwise, and as far from f32."""
    opened, graph = compiled_graph(name, compiled, tmp_path_factory)
    same, wide = (
        Reference(one).evaluate(opened.output, opened.batch, opened.select)
        for one in (adapt(graph, f8=True)[0], opened.graph)
    )
    assert 1e-3 * rms(wide) < rms(same - wide)
    # Cards sum products of f8 in fewer bits than f32 has, so that codes on an edge fall otherwise there too.
    closely = (same, 0.1) if DEVICE == "torch-cpu" else (wide, 1.3)
    for stored, (far, most) in ((torch.float32, closely), (torch.float16, (wide, 1.3))):
        monkeypatch.setitem(DTYPES, "f8", stored)
        gpu = GpuRunnable(graph, DEVICE, dtype="f8")
        assert any("products are of f8" in line for line in gpu.report())
        got = gpu.run(opened.output, opened.batch, opened.select)
        assert rms(got - far) <= most * rms(same - wide)
