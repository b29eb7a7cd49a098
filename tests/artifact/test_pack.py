"""Stored layouts, element by element against the formula in ARCHITECTURE.md."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import encoder, masked_lm
from hypothesis import given
from hypothesis import strategies as st

from encast import _core
from encast.artifact.pack import NUMPY_DTYPES, pack, packed_shape, stored_specs, unpack
from encast.artifact.pack import StoredSpec as Spec
from encast.errors import GraphError
from encast.ir import Graph
from encast.ir.types import ValueType
from encast.passes import optimise
from encast.quant import QuantSpec

GROUPS = {"panels_f32": ("f32", 1), "panels_bf16": ("bf16", 2), "panels_int8": ("s8", 4)}


def numbers(dtype: str, *shape: int) -> np.ndarray:
    size = int(np.prod(shape))
    if dtype == "f32":
        return np.arange(1, size + 1, dtype=np.float32).reshape(shape)
    low = np.arange(1, size + 1) % 251
    return (low - 125 if dtype == "s8" else low).astype(NUMPY_DTYPES[dtype]).reshape(shape)


def spec_of(form: str, type: ValueType) -> Spec:
    return Spec("w", type.dtype, packed_shape(type, form), "w", form)


@given(form=st.sampled_from(sorted(GROUPS)), n=st.integers(1, 200), k=st.integers(1, 40))
def test_panels_hold_every_element_where_the_formula_says(form: str, n: int, k: int) -> None:
    dtype, group = GROUPS[form]
    type = ValueType(dtype, (n, k))
    array = numbers(dtype, n, k)
    spec = spec_of(form, type)
    packed = pack(spec, array)
    assert packed.shape == spec.shape
    assert packed.flags.c_contiguous
    assert packed.nbytes == spec.nbytes == _core.weight_bytes(dtype, "panels", n, k)
    panels = packed.reshape(-1, -(-k // group), 64, group)
    row, column = np.meshgrid(np.arange(n), np.arange(k), indexing="ij")
    assert (panels[row // 64, column // group, row % 64, column % group] == array).all()
    # What is left is padding, and zero.
    assert np.count_nonzero(panels) == np.count_nonzero(array)
    assert (unpack(spec, packed, type) == array).all()


@given(st.integers(1, 300))
def test_vectors_are_padded_to_whole_panels(n: int) -> None:
    type = ValueType("f32", (n,))
    spec = spec_of("vector", type)
    packed = pack(spec, numbers("f32", n))
    assert packed.shape == (-(-n // 64) * 64,)
    assert packed.nbytes == _core.weight_bytes("f32", "padded", 1, n)
    assert (packed[:n] == numbers("f32", n)).all()
    assert not packed[n:].any()
    assert (unpack(spec, packed, type) == numbers("f32", n)).all()


@given(n=st.integers(1, 130), k=st.integers(1, 40))
def test_column_sums_are_exact(n: int, k: int) -> None:
    array = np.full((n, k), -127, np.int8)
    packed = pack(Spec("w.colsum", "i32", (-(-n // 64) * 64,), "w", "colsum"), array)
    assert packed.dtype == np.int32
    assert packed[:n].tolist() == [-127 * k] * n
    assert not packed[n:].any()


def test_non_contiguous_arrays_pack_alike() -> None:
    array = numbers("f32", 70, 10)
    spec = spec_of("panels_f32", ValueType("f32", (70, 10)))
    assert (pack(spec, np.asfortranarray(array)) == pack(spec, array)).all()
    dense = spec_of("dense", ValueType("f32", (70, 10)))
    assert pack(dense, np.asfortranarray(array)).flags.c_contiguous


def test_every_constant_of_a_graph_has_its_form() -> None:
    graph, _ = optimise(masked_lm(), QuantSpec())
    specs = {spec.name: spec for spec in stored_specs(graph)}
    weights = [name for name in graph.constants if graph.type_of(name).dtype == "s8"]
    assert len(weights) == 5
    for name in weights:
        assert specs[name].form == "panels_int8"
        assert specs[f"{name}.colsum"].shape == (-(-int(graph.type_of(name).shape[0]) // 64) * 64,)
        assert specs[f"{name}.scale"].form == "vector"
    assert specs["embeddings.word.weight"].form == "dense"
    assert specs["embeddings.LayerNorm.weight"].form == "dense"
    assert specs["cls.decoder.bias"].form == "vector"


def test_a_constant_read_in_two_forms_cannot_be_stored() -> None:
    graph = masked_lm()
    with pytest.raises(GraphError, match=r"embeddings.word.weight.*'cls.decoder'"):
        list(stored_specs(graph))


def test_an_unread_constant_cannot_be_stored() -> None:
    graph = encoder()
    graph.add_constant("stray", np.zeros(3, np.float32))
    with pytest.raises(GraphError, match="'stray' is read by no node"):
        list(stored_specs(graph))


def test_a_wrong_array_is_refused() -> None:
    with pytest.raises(GraphError, match="is float64"):
        pack(spec_of("dense", ValueType("f32", (2,))), np.zeros(2))


def test_symbols_cannot_be_stored() -> None:
    with pytest.raises(GraphError, match="depend on the batch"):
        packed_shape(ValueType("f32", ("tokens", 3)), "dense")


def test_specs_follow_the_graphs_order() -> None:
    graph: Graph = optimise(encoder(), QuantSpec("f32"))[0]
    assert [spec.name for spec in stored_specs(graph)] == list(graph.constants)
