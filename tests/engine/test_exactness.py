"""The native engine against transformers' committed outputs: every architecture and head, every dtype."""

from __future__ import annotations

import numpy as np
import pytest
from bounds import allowed_difference, largest_excess
from cases import CASES, open_case
from compiled import cosine, open_cpu

from encast.backends.reference import Reference
from encast.passes import optimise
from encast.quant import QuantSpec

# The polynomials' own error: core/simd/README.md states it, in units of 2^-24.
FAST_ELEMENTARY = 16 * 2.0**-24


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("name", CASES)
def test_f32_is_within_the_derived_bound(name: str, exact: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    opened = open_case(name, tmp_path_factory)
    cpu = open_cpu(name, "f32", tmp_path_factory, exact=exact, threads=2)
    got = opened.kept(cpu.run(opened.output, opened.batch, opened.select))
    elementary = {} if exact else {"elementary": FAST_ELEMENTARY}
    _, allowed = allowed_difference(opened.graph, opened.output, opened.batch, opened.select, **elementary)
    golden = opened.golden("f64")
    assert largest_excess(got, golden, opened.kept(allowed)) <= 1.0
    if golden.shape[1] > 1:
        assert cosine(got, golden).min() >= 0.999999


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_narrow_dtypes_follow_the_reference(name: str, dtype: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The reference evaluates the very graph that was compiled, with exact integer sums and exact rounding.

    Where an f32 intermediate stands on the edge between two integers (or two bf16), the engine may round it to
    the other, and attention carries that to the whole sequence. So the engine may add an error of its own that is
    smaller than that of the dtype; without such a row it agrees to f32 precision.
    """
    opened = open_case(name, tmp_path_factory)
    graph, _ = optimise(opened.graph, QuantSpec(dtype))
    cpu = open_cpu(name, dtype, tmp_path_factory, threads=2)
    got = cpu.run(opened.output, opened.batch, opened.select).astype(np.float64)
    same = Reference(graph).values([graph.outputs[opened.output]], opened.batch, opened.select)[
        graph.outputs[opened.output]
    ]
    wide = Reference(opened.graph).values([opened.graph.outputs[opened.output]], opened.batch, opened.select)[
        opened.graph.outputs[opened.output]
    ]
    of_engine = np.sqrt(((got - same) ** 2).mean())
    of_dtype = np.sqrt(((same - wide) ** 2).mean())
    assert of_engine <= 0.7 * of_dtype + 1e-6 * np.sqrt((wide**2).mean())
