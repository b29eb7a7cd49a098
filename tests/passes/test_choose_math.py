"""Where gelu may be coarse: only where every reader rounds what comes out."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import META

from encast.ir import Graph
from encast.ir.types import ValueType
from encast.passes.choose_math import choose_math


def one_linear(activation: str, *readers: str) -> Graph:
    """``y = activation(linear(x))`` and a reader of ``y`` for each op named."""
    graph = Graph()
    graph.meta = META
    x = graph.add_input("x", ValueType("f32", ("tokens", 8)))
    weight = graph.add_constant("weight", np.zeros((8, 8), np.float32))
    y = graph.add("linear", x, weight, name="y", activation=activation)
    attrs = {"quantize": {"zero_point": True}, "cast_bf16": {}, "scale": {"factor": 2.0}}
    for number, op in enumerate(readers):
        graph.outputs[f"out{number}"] = graph.add(op, y, name=f"reader.{number}", **attrs[op])
    return graph


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("readers", [("quantize",), ("cast_bf16",), ("quantize", "cast_bf16")])
def test_gelu_that_is_only_narrowed_is_coarse(activation: str, readers: tuple[str, ...]) -> None:
    graph = one_linear(activation, *readers)
    assert choose_math(graph, exact=False).changes == 2
    assert graph.nodes[0].attrs["activation"] == f"{activation}_coarse"
    assert graph.meta.math == "fast"


@pytest.mark.parametrize(
    ("activation", "readers", "exact", "is_output"),
    [
        ("gelu", ("quantize",), True, False),
        ("gelu", ("quantize",), False, True),
        ("gelu", ("quantize", "scale"), False, False),
        ("gelu", ("scale",), False, False),
        ("gelu", (), False, False),
        ("tanh", ("quantize",), False, False),
        ("none", ("quantize",), False, False),
    ],
    ids=["exact math", "an output", "also read wide", "read wide", "not read", "another function", "none"],
)
def test_all_else_stays_as_it_is(activation: str, readers: tuple[str, ...], exact: bool, is_output: bool) -> None:
    graph = one_linear(activation, *readers)
    if is_output:
        graph.outputs["wide"] = "y"
    assert choose_math(graph, exact=exact).changes == 1
    assert graph.nodes[0].attrs["activation"] == activation
    assert graph.meta.math == ("exact" if exact else "fast")
