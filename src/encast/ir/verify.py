"""The verifier: the rules that a graph keeps before and after every pass."""

from __future__ import annotations

from encast.errors import GraphError
from encast.ir.graph import Graph

__all__ = ["verify"]


def verify(graph: Graph) -> None:
    """Raises ``GraphError`` on the first broken rule, naming the node.

    Rules: every operand is defined before it is read; types are what the op table infers; names are
    unique; every constant's array has its type's shape (artifacts, which hold packed weights, use empty
    arrays); there is at least one output and all outputs exist.
    """
    defined = set(graph.inputs) | set(graph.constants)
    if len(defined) != len(graph.inputs) + len(graph.constants):
        raise GraphError("an input and a constant have the same name")
    for name, constant in graph.constants.items():
        if constant.array.size and constant.array.shape != constant.type.shape:
            raise GraphError(f"constant {name!r} is {constant.type}, its array has shape {constant.array.shape}")
    for node in graph.nodes:
        for operand in node.inputs:
            if operand and operand not in defined:
                raise GraphError(f"node {node.name!r} reads {operand!r} before it is made")
        types = graph.infer(node)
        for output, type in zip(node.outputs, types, strict=True):
            if output in defined:
                raise GraphError(f"node {node.name!r} makes {output!r} a second time")
            if graph.values.get(output) != type:
                raise GraphError(f"{output!r} is recorded as {graph.values.get(output)}, the op table says {type}")
            defined.add(output)
    if set(graph.values) != {output for node in graph.nodes for output in node.outputs}:
        raise GraphError("the table of values and the nodes' outputs differ")
    if not graph.outputs:
        raise GraphError("the graph has no output")
    for public, value in graph.outputs.items():
        if value not in defined:
            raise GraphError(f"output {public!r} names {value!r}, which nothing makes")
