"""A row op writes the narrow copy of its rows that the next product reads, while they are in registers.

    y = layer_norm(x); y8 = quantize(y)   →   y, y8 = layer_norm_narrow(x)

and the same for ``rms_norm``, ``add_layer_norm``, ``embed_layer_norm`` and ``gated_activation``, and for bf16. The f32
output stays: the residual reads it.
"""

from __future__ import annotations

from typing import Any

from encast.ir import Graph, Node
from encast.passes.patch import Index, Patch, apply
from encast.passes.report import Outcome

__all__ = ["fuse_narrow"]

NARROWING = ("quantize", "quantize_static", "cast_bf16")
NORMS = ("layer_norm", "rms_norm", "add_layer_norm", "embed_layer_norm")


def fuse_narrow(graph: Graph) -> Outcome:
    index = Index(graph)
    patches: list[Patch] = []
    for node in graph.nodes:
        if node.op not in (*NORMS, "gated_activation"):
            continue
        users = [user for user in index.users(node.outputs[0]) if user.op in NARROWING]
        if not users:
            continue
        # An op has one narrow output: of two (linears kept in different dtypes), the first is fused.
        narrow = users[0]
        attrs = {**node.attrs, "also": _also(narrow)}
        outputs = [node.outputs[0], narrow.outputs[0]]
        fused = Node(f"{node.op}_narrow", node.inputs, outputs, attrs, node.name, node.layer)
        # Where the op stood: others may read its f32 output before the narrow copy was made.
        patches.append(Patch((node, narrow), (fused,), anchor=node))
    return Outcome(changes=apply(graph, patches))


def _also(narrow: Node) -> str | dict[str, Any]:
    if narrow.op == "cast_bf16":
        return "bf16"
    if narrow.op == "quantize_static":
        return dict(narrow.attrs)
    return "q8_zero_point" if narrow.attrs["zero_point"] else "q8"
