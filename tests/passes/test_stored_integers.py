"""Weights that were stored as integers keep them through joined projections and in narrow products."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from graphs import encoder

from encast.errors import GraphError
from encast.ir import Graph, Integers
from encast.passes import count_fixed, optimise, stored_ranges
from encast.quant import QuantSpec
from encast.quant.rounding import quantize_rows


def integers(rows: int, columns: int, dtype: type = np.int8, seed: int = 0) -> Integers:
    """Integers within 100 of their zero points."""
    random = np.random.RandomState(seed)
    middle = 0 if dtype is np.int8 else 128
    values = (random.randint(-100, 101, (rows, columns)) + middle).astype(dtype)
    return Integers(values, random.uniform(0.01, 0.02, rows).astype(np.float32), np.full(rows, middle, np.int32))


def stored(graph: Graph, dtypes: dict[str, type] | None = None) -> Graph:
    """The graph with integers for the weight of every linear, and the numbers that they stand for."""
    for place, node in enumerate(graph.nodes):
        if node.op == "linear":
            constant = graph.constants[node.inputs[1]]
            dtype = next((kind for part, kind in (dtypes or {}).items() if part in node.name), np.int8)
            held = integers(*constant.array.shape, dtype, seed=place)
            wide = held.scale[:, None] * (held.values.astype(np.float32) - held.zero[:, None].astype(np.float32))
            graph.constants[node.inputs[1]] = replace(constant, array=wide.astype(np.float32), integers=held)
    return graph


def test_narrow_products_hold_them() -> None:
    graph = stored(encoder(layers=2))
    narrow, report = optimise(graph, QuantSpec(), strict=True)
    assert len(report.kept) == 8
    assert all(rows == of for rows, of in report.kept.values())
    qkv = [node for node in graph.nodes if node.op == "linear"][:3]
    parts = [graph.constants[node.inputs[1]].integers for node in qkv]
    joined = next(node for node in narrow.nodes if node.op == "linear_int8")
    weight, scale = (narrow.constants[name].array for name in joined.inputs[1:3])
    assert (weight == np.concatenate([part.values for part in parts if part])).all()
    width = len(scale) // 3
    assert (scale[width:] == np.concatenate([part.scale for part in parts[1:] if part])).all()
    assert (weight[:width] != quantize_rows(graph.constants[qkv[0].inputs[1]].array)[0]).any()


def test_projections_of_two_dtypes_are_rounded_anew() -> None:
    _, report = optimise(stored(encoder(layers=1), {"key": np.uint8}), QuantSpec())
    assert [rows == of for rows, of in report.kept.values()] == [False, True, True, True]
    assert min(rows for rows, _ in report.kept.values()) == 0


def test_rows_beyond_s8_are_rounded_anew() -> None:
    values = np.array([[0, 255], [3, 250], [120, 130], [0, 127]], np.uint8)
    scale = np.array([0.5, 0.5, 1e-40, 0.5], np.float32)
    held = Integers(values, scale, np.array([128, 130, 128, 127], np.int32))
    narrow, fits = held.narrow()
    assert fits.tolist() == [True, True, False, True]  # a scale below the smallest normal one counts as not held
    assert narrow.tolist() == [[-128, 127], [-127, 120], [0, 0], [-127, 0]]
    beyond = Integers(values, np.ones(4, np.float32), np.full(4, 129, np.int32))
    assert beyond.narrow()[1].tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": np.zeros((2, 3), np.int16)}, "s8 or u8"),
        ({"values": np.zeros(3, np.int8)}, "s8 or u8"),
        ({"scale": np.ones(3, np.float32)}, "the scale of integers"),
        ({"scale": np.ones(2, np.float64)}, "the scale of integers"),
        ({"zero": np.zeros(2, np.int8)}, "the zero of integers"),
    ],
)
def test_shapes_and_dtypes_are_checked(changes: dict[str, np.ndarray], message: str) -> None:
    fields = {"values": np.zeros((2, 3), np.int8), "scale": np.ones(2, np.float32), "zero": np.zeros(2, np.int32)}
    with pytest.raises(GraphError, match=message):
        Integers(**{**fields, **changes})


def test_ranges_are_taken_whole_or_not_at_all() -> None:
    graph = encoder(layers=1)
    spec = QuantSpec()
    read = dict.fromkeys(node.inputs[0] for node in graph.nodes if node.op == "linear")
    graph.fixed = dict.fromkeys(read, (0.5, 3))
    assert count_fixed(graph, spec) == (4, 4)
    found = stored_ranges(graph, spec)
    assert found is not None
    narrow, _ = optimise(graph, found[0], calibration=found[1])
    attrs = [node.attrs.get("also", node.attrs) for node in narrow.nodes]
    assert [(one["scale"], one["zero_point"]) for one in attrs if "zero_point" in one] == [(0.5, 3)] * 4
    assert stored_ranges(graph, QuantSpec("bf16")) is None
    assert stored_ranges(graph, replace(spec, zero_point="never")) is None
    assert stored_ranges(graph, replace(spec, move_outliers=0.5)) is None
    del graph.fixed[next(iter(read))]
    assert count_fixed(graph, spec) == (3, 4)
    assert stored_ranges(graph, spec) is None
