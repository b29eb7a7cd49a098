"""A residual sum that only a layer norm reads becomes part of it: ``layer_norm(x + residual)``."""

from __future__ import annotations

from encast.ir import Graph, Node
from encast.passes.patch import Index, MismatchError, Patch, apply
from encast.passes.report import Miss, Outcome

__all__ = ["fuse_add_layer_norm"]


def fuse_add_layer_norm(graph: Graph) -> Outcome:
    outcome = Outcome()
    index = Index(graph)
    patches: list[Patch] = []
    for node in graph.nodes:
        if node.op != "layer_norm":
            continue
        try:
            total = index.made_by(node.inputs[0], "add")
            index.need_private(node.inputs[0], node)
        except MismatchError as mismatch:
            outcome.missed.append(Miss("add_layer_norm", node.layer, node.name, str(mismatch)))
            continue
        inputs = [*total.inputs, *node.inputs[1:]]
        fused = Node("add_layer_norm", inputs, node.outputs, dict(node.attrs), node.name, node.layer)
        patches.append(Patch((total, node), (fused,)))
        outcome.fused.append(("add_layer_norm", node.layer))
    outcome.changes = apply(graph, patches)
    return outcome
