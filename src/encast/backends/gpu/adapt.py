"""What a GPU computes otherwise than the graph says, as a graph of the same table: the reference evaluates it too.

- A product with blocks of zeros left out becomes the dense product. Its sums are the same integers.
- A coarse form of gelu becomes the true one, which costs a GPU nothing. They differ by at most 1e-4.
- Where f8 is asked for, products that ``quant`` would narrow to bf16 are of f8, with a scale a row.
- int8 products inside attention become bf16 products. Their codes want the extremes of all keys of a head first, which
  a kernel that reads each key once does not have; bf16 is nearer to f32 than they are.
"""

from __future__ import annotations

from collections import Counter

from encast.errors import InputError
from encast.ir.blocks import blocks_beside, unpack_blocks
from encast.ir.graph import Constant, Graph, Node
from encast.ir.ops import COARSE_ACTIVATIONS
from encast.passes.fuse_narrow import fuse_narrow
from encast.passes.set_precision import set_precision
from encast.quant import QuantSpec

__all__ = ["adapt"]

_TRUE_FORMS = {coarse: true for true, coarse in COARSE_ACTIVATIONS.items()}


def adapt(graph: Graph, *, f8: bool = False) -> tuple[Graph, list[str]]:
    """The graph that is computed, and a line for each kind of change. ``graph``, with its arrays, stays as it is.

    Raises ``GraphError`` for a sparse weight that is none, ``InputError`` where f8 is asked of one of integers.
    """
    made = graph.copy()
    changes: Counter[str] = Counter()
    if f8:
        _ready_for_f8(made)
    made.nodes = [_node(made, node, changes, f8) for node in made.nodes]
    made.values = {}
    for node in made.nodes:
        made.values.update(zip(node.outputs, made.infer(node), strict=True))
    made.drop_unused()
    return made, [f"{count} x {change}" for change, count in changes.items()]


def _ready_for_f8(graph: Graph) -> None:
    """Makes it one with products of bf16."""
    if any(node.op in ("linear_int8", "linear_sparse_int8") for node in graph.nodes):
        raise InputError("dtype is 'f8', and the artifact has weights of int8; compile the checkpoint to f32 or bf16")
    if graph.meta.dtype == "f32":
        wide = {node.name: graph.constants[node.inputs[1]] for node in graph.nodes if node.op == "linear"}
        set_precision(graph, QuantSpec("bf16"))
        fuse_narrow(graph)
        for node in graph.nodes:
            if node.op == "linear_bf16":  # its weight is rounded once
                graph.constants[node.inputs[1]] = wide[node.name]


_F8_OPS = {"cast_bf16": "cast_f8", "linear_bf16": "linear_f8"}


def _node(graph: Graph, node: Node, changes: Counter[str], f8: bool) -> Node:
    attrs = dict(node.attrs)
    if attrs.get("products") == "int8":
        attrs["products"] = "bf16"
        changes["int8 products inside attention are bf16"] += 1
    if (true := _TRUE_FORMS.get(str(attrs.get("activation")))) is not None:
        attrs["activation"] = true
        changes[f"the coarse form of {true} is the true one"] += 1
    op, inputs = node.op, node.inputs
    if f8:
        op = _F8_OPS.get(op, op)
        changes.update(["products are of f8"] if op == "linear_f8" else [])
        if attrs.get("also") == "bf16":
            attrs["also"] = "f8"
    if op == "linear_int8" and (blocks := blocks_beside(inputs)):
        changes["products in both forms are dense"] += 1
        inputs = inputs[: -len(blocks)]
    if op == "linear_sparse_int8":
        changes["sparse products are dense"] += 1
        op, inputs = "linear_int8", _dense_operands(graph, node)
    return Node(op, list(inputs), list(node.outputs), attrs, node.name, node.layer)


def _dense_operands(graph: Graph, node: Node) -> list[str]:
    x, values, columns, starts, _, scale, *bias = node.inputs
    name = f"{values}.dense"
    if name not in graph.constants:
        inputs = graph.type_of(x).shape[1]
        assert isinstance(inputs, int)
        shape = len(graph.constants[scale].array), inputs
        stored = [graph.constants[part].array for part in (values, columns, starts)]
        graph.constants[name] = Constant.of(unpack_blocks(stored[0], stored[1], stored[2], shape))
    return [x, name, scale, *bias]
