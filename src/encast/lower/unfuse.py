"""Takes fusions apart before lowering, so that what each is worth can be measured (``encast profile --ablate``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from encast.ir.graph import Graph, Node
from encast.ir.ops import ATTENTIONS

__all__ = ["ABLATIONS", "unfuse"]

ABLATIONS = {
    "qkv_fusion": "queries, keys and values are three products of the same rows, and as without head_tasks",
    "epilogue_fusion": "products write f32; activation and rounding to bf16 are steps of their own",
    "norm_fusion": "residual sum, layer norm and narrowing are steps of their own",
    "narrow_attention": "the products inside attention are f32",
    "fast_math": "exp, erf and tanh come from the C library",
    "head_tasks": "queries, keys and values of all tokens are made before attention begins",
    "row_blocks": "every step runs over all rows of a chunk before the next one, also as without head_tasks",
}
"""Optimisations that a ``Target`` may do ``without``, and what runs instead."""


def unfuse(graph: Graph, without: frozenset[str]) -> Graph:
    """A graph of the same answers without the fusions named; others of ``ABLATIONS`` are not the graph's.

    Constants are shared with the given graph, which stays as it is.
    """
    made = Graph()
    made.inputs, made.constants, made.meta = dict(graph.inputs), graph.constants, graph.meta
    if "fast_math" in without:
        made.meta = replace(made.meta, math="exact")
    for node in graph.nodes:
        for part in _parts(node, without):
            made.append(part)
    made.outputs = dict(graph.outputs)
    return made


def _parts(node: Node, without: frozenset[str]) -> Iterator[Node]:
    if node.op in ATTENTIONS and "narrow_attention" in without:
        yield Node(node.op, node.inputs, node.outputs, {**node.attrs, "products": "f32"}, node.name, node.layer)
    elif node.op.startswith("linear") and node.attrs["activation"] != "none" and "epilogue_fusion" in without:
        (out,) = node.outputs
        wide = f"{out}.before_activation"
        # As a step of its own it has one form.
        kind = str(node.attrs["activation"]).removesuffix("_coarse")
        yield Node(node.op, node.inputs, [wide], {**node.attrs, "activation": "none"}, node.name, node.layer)
        yield Node("activation", [wide], [out], {"kind": kind}, f"{node.name}.activation", node.layer)
    elif "_norm" in node.op and "norm_fusion" in without:
        yield from _norm_parts(node)
    else:
        yield node


def _norm_parts(node: Node) -> Iterator[Node]:
    op = node.op.removesuffix("_narrow")
    attrs = {key: value for key, value in node.attrs.items() if key != "also"}
    inputs, out = node.inputs, node.outputs[0]
    if op == "add_layer_norm":
        x, residual, *rest = inputs
        total = f"{out}.sum"
        yield Node("add", [x, residual], [total], {}, f"{node.name}.add", node.layer)
        op, inputs = "layer_norm", [total, *rest]
    yield Node(op, inputs, [out], attrs, node.name, node.layer)
    if len(node.outputs) == 2:
        also = node.attrs["also"]
        op, attrs = ("quantize", {"zero_point": also == "q8_zero_point"})
        if also == "bf16":
            op, attrs = "cast_bf16", {}
        elif isinstance(also, dict):
            op, attrs = "quantize_static", also
        yield Node(op, [out], [node.outputs[1]], attrs, f"{node.name}.narrow", node.layer)
