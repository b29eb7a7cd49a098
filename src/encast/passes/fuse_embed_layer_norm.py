"""The sum of word, position and token-type rows with the layer norm behind it becomes one op.

Whatever order the adds have, the fused op sums word + token type + position: the last bits of the f32 sum may
differ from the plain graph's.
"""

from __future__ import annotations

from typing import Any

from encast.ir import Graph, Node
from encast.passes.patch import Index, MismatchError, Patch, apply
from encast.passes.report import Miss, Outcome

__all__ = ["fuse_embed_layer_norm"]

NO_POSITIONS = {"position_offset": 0, "position_skip_id": -1}


def fuse_embed_layer_norm(graph: Graph) -> Outcome:
    outcome = Outcome()
    index = Index(graph)
    patches: list[Patch] = []
    for node in graph.nodes:
        if node.op != "layer_norm":
            continue
        try:
            inner, tables, attrs = _match(graph, index, node)
        except MismatchError as mismatch:
            outcome.missed.append(Miss("embed_layer_norm", node.layer, node.name, str(mismatch)))
            continue
        types = "token_type_ids" if "token_type" in tables else ""
        inputs = ["token_ids", types, tables["word"], tables.get("position", ""), tables.get("token_type", "")]
        fused = Node(
            "embed_layer_norm", [*inputs, *node.inputs[1:]], node.outputs, attrs | node.attrs, node.name, node.layer
        )
        patches.append(Patch((*inner, node), (fused,)))
        outcome.fused.append(("embed_layer_norm", node.layer))
    outcome.changes = apply(graph, patches)
    return outcome


def _match(graph: Graph, index: Index, norm: Node) -> tuple[list[Node], dict[str, str], dict[str, Any]]:
    """The nodes that make the sum, the table of each kind, and the attributes that positions bring."""
    inner: list[Node] = []
    tables: dict[str, str] = {}
    attrs: dict[str, Any] = dict(NO_POSITIONS)
    pending = [(norm.inputs[0], norm)]
    while pending:
        value, reader = pending.pop()
        node = index.made_by(value, "add", "embedding")
        index.need_private(value, reader)
        if node.op == "add":
            if node.inputs[0] == node.inputs[1]:
                raise MismatchError(f"{node.name!r} adds {node.inputs[0]!r} to itself")
            pending += [(operand, node) for operand in node.inputs]
        else:
            kind = _kind(graph, index, node)
            if kind in tables:
                raise MismatchError(f"two tables of kind {kind} are summed: {tables[kind]!r} and {node.inputs[1]!r}")
            tables[kind] = node.inputs[1]
            if kind == "position":
                source = index.made_by(node.inputs[0], "position_ids")
                attrs = {f"position_{key}": value for key, value in source.attrs.items()}
        inner.append(node)
    if "word" not in tables:
        raise MismatchError("no table is read by token_ids")
    return inner, tables, attrs


def _kind(graph: Graph, index: Index, node: Node) -> str:
    ids, table = node.inputs
    if table not in graph.constants:
        raise MismatchError(f"the table {table!r} of {node.name!r} is not a constant")
    if ids in ("token_ids", "token_type_ids") and ids in graph.inputs:
        return {"token_ids": "word", "token_type_ids": "token_type"}[ids]
    if index.made_by(ids, "position_ids").inputs != ["token_ids"]:
        raise MismatchError(f"the positions {ids!r} are not those of token_ids")
    return "position"
