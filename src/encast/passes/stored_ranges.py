"""Fixed ranges of a checkpoint that is quantised already, as a calibration."""

from __future__ import annotations

from dataclasses import replace

from encast.ir import Graph
from encast.passes.set_precision import dtype_of
from encast.quant.calibration import Calibration
from encast.quant.spec import QuantSpec

__all__ = ["count_fixed", "stored_ranges"]


def count_fixed(graph: Graph, spec: QuantSpec) -> tuple[int, int]:
    """Of how many values that int8 products of a plain graph read the checkpoint fixes the range, and of how many."""
    read = {node.inputs[0] for node in graph.nodes if node.op == "linear" and dtype_of(graph, node, spec) == "int8"}
    return len(read & set(graph.fixed)), len(read)


def stored_ranges(graph: Graph, spec: QuantSpec) -> tuple[QuantSpec, Calibration] | None:
    """``spec`` with static activations and the calibration that says what the checkpoint fixes.

    None unless that are the ranges of all values that int8 products read, and ``spec`` lets them be what they are.
    """
    fixed, wanted = count_fixed(graph, spec)
    if spec.dtype != "int8" or not 0 < wanted == fixed or spec.zero_point != "always" or spec.move_outliers is not None:
        return None
    return replace(spec, activations="static", ranges="minmax"), Calibration.of_fixed(graph.fixed)
