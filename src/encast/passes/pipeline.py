"""The passes in order, the verifier around each, and the count of fusions against the config's promise."""

from __future__ import annotations

from collections.abc import Callable

from encast.errors import InputError, StrictError
from encast.ir import Graph, verify
from encast.passes.choose_math import choose_math
from encast.passes.choose_sparse import choose_sparse
from encast.passes.drop_unused import drop_unused
from encast.passes.fold_constants import fold_constants
from encast.passes.fold_tables import fold_tables
from encast.passes.fuse_add_layer_norm import fuse_add_layer_norm
from encast.passes.fuse_attention import fuse_attention
from encast.passes.fuse_embed_layer_norm import fuse_embed_layer_norm
from encast.passes.fuse_linear_activation import fuse_linear_activation
from encast.passes.fuse_narrow import fuse_narrow
from encast.passes.move_outliers import move_outliers
from encast.passes.report import FusionReport, Outcome, PassRecord, count_fusions
from encast.passes.separate_weights import separate_weights
from encast.passes.set_precision import set_precision
from encast.quant.calibration import Calibration
from encast.quant.spec import QuantSpec

__all__ = ["optimise"]


def optimise(
    graph: Graph,
    spec: QuantSpec,
    *,
    calibration: Calibration | None = None,
    strict: bool = False,
    exact: bool = False,
    sparse: str = "never",
    isa: str = "",
) -> tuple[Graph, FusionReport]:
    """A plain graph in, a fused one with the wanted precision out; the given graph stays as it is.

    ``calibration``: of this graph, with what ``spec`` needs of one. ``isa``: the ISA level for which a ``sparse`` of
    "auto" decides. Raises ``StrictError`` when ``strict`` and a fusion that the config promises was not made, or a
    product of a layer is to be sparse and has no blocks of zeros, ``InputError`` when ``spec`` names what the graph
    lacks or ``calibration`` is not what it needs, ``GraphError`` when a pass broke the graph (a defect).
    """
    _check_calibration(spec, calibration)
    graph = graph.copy()
    verify(graph)
    passes: tuple[tuple[str, Callable[[Graph], Outcome]], ...] = (
        ("drop_unused", drop_unused),
        ("fold_constants", fold_constants),
        ("fold_tables", fold_tables),
        ("fuse_attention", lambda graph: fuse_attention(graph, exact)),
        ("fuse_linear_activation", fuse_linear_activation),
        # Before fuse_add_layer_norm, which would take the last add of the embedding sum.
        ("fuse_embed_layer_norm", fuse_embed_layer_norm),
        ("fuse_add_layer_norm", fuse_add_layer_norm),
        ("drop_unused", drop_unused),
        ("move_outliers", lambda graph: move_outliers(graph, spec, calibration.largest if calibration else {})),
        ("set_precision", lambda graph: set_precision(graph, spec, calibration)),
        ("choose_sparse", lambda graph: choose_sparse(graph, sparse, isa)),
        ("fuse_narrow", fuse_narrow),
        ("choose_math", lambda graph: choose_math(graph, exact)),
        ("drop_unused", drop_unused),
        ("separate_weights", separate_weights),
    )
    outcomes: list[Outcome] = []
    records: list[PassRecord] = []
    for name, run in passes:
        outcome = run(graph)
        verify(graph)
        outcomes.append(outcome)
        records.append(PassRecord(name, outcome.changes, len(graph.nodes)))
    counts, misses = count_fusions(graph.meta.expected, graph.meta.layers, outcomes)
    linears = {
        node.name: {"linear": "f32"}.get(node.op, node.op.removeprefix("linear_"))
        for node in graph.nodes
        if node.op in ("linear", "linear_bf16", "linear_int8", "linear_sparse_int8")
    }
    zeros = {name: found for outcome in outcomes for name, found in outcome.zeros.items()}
    kept = {name: rows for outcome in outcomes for name, rows in outcome.kept.items()}
    report = FusionReport(counts, misses, tuple(records), linears, zeros, kept)
    if strict and misses:
        raise StrictError(f"{report.describe_misses()}\ncompile without strict to accept the slower graph")
    return graph, report


def _check_calibration(spec: QuantSpec, calibration: Calibration | None) -> None:
    if calibration is None:
        if spec.needs_calibration:
            what = "static activations" if spec.activations == "static" else "move_outliers"
            raise InputError(
                f"{what} need a calibration: give what encast.calibrate(checkpoint, texts, quant=...) returns"
            )
        return
    if not isinstance(calibration, Calibration):
        raise InputError(
            f"calibration is of type {type(calibration).__name__}; what encast.calibrate(checkpoint, texts, quant=...) "
            "returns is needed, or None"
        )
    if not spec.needs_calibration:
        raise InputError(
            f"a calibration was given, and {spec.dtype} with {spec.activations} activations needs none; ask for "
            "QuantSpec(activations='static') or move_outliers, or leave it out"
        )
    if calibration.move_outliers != spec.move_outliers:
        raise InputError(
            f"the calibration was made with move_outliers {calibration.move_outliers}, {spec.move_outliers} is asked "
            "for; give both alike"
        )
