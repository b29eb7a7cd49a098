"""Takes the activation that alone reads a projection into the projection: ``activation(linear(x))``."""

from __future__ import annotations

from encast.ir import Graph, Node
from encast.passes.patch import Index, MismatchError, Patch, apply
from encast.passes.report import Miss, Outcome

__all__ = ["fuse_linear_activation"]


def fuse_linear_activation(graph: Graph) -> Outcome:
    outcome = Outcome()
    index = Index(graph)
    patches: list[Patch] = []
    for node in graph.nodes:
        if node.op != "activation":
            continue
        try:
            linear = index.made_by(node.inputs[0], "linear")
            index.need_private(node.inputs[0], node)
            if linear.attrs["activation"] != "none":
                raise MismatchError(f"{linear.name!r} ends in {linear.attrs['activation']} already")
        except MismatchError as mismatch:
            outcome.missed.append(Miss("linear_activation", node.layer, node.name, str(mismatch)))
            continue
        attrs = {"activation": node.attrs["kind"]}
        fused = Node("linear", linear.inputs, node.outputs, attrs, linear.name, linear.layer)
        patches.append(Patch((linear, node), (fused,)))
        outcome.fused.append(("linear_activation", node.layer))
    outcome.changes = apply(graph, patches)
    return outcome
