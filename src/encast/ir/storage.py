"""The form in which an op wants a constant to be stored; the layouts themselves stand in ``artifact/pack.py``."""

from __future__ import annotations

from encast.errors import GraphError
from encast.ir.graph import Graph

__all__ = ["STORED_FORMS", "stored_form", "stored_forms"]

STORED_FORMS: dict[str, str | None] = {
    "dense": None,
    "vector": "f32",
    "sums": "i32",
    "panels_f32": "f32",
    "panels_bf16": "bf16",
    "panels_int8": "s8",
}
"""Form → the dtype that it is for, None: any.

``panels_*``: the weight of a product; ``vector`` and ``sums``: padded to whole panels; ``dense``: row by row, unpadded.
"""

_LINEARS = {"linear": "panels_f32", "linear_bf16": "panels_bf16", "linear_int8": "panels_int8"}


def stored_form(op: str, place: int) -> str:
    """The form of the constant that is operand number ``place`` of an op."""
    if op == "linear_sparse_int8":
        return ("dense", "dense", "dense", "dense", "sums", "vector", "vector")[place]
    if op not in _LINEARS:
        return "dense"
    if place > 3:  # the blocks of linear_int8
        return "dense"
    return _LINEARS[op] if place == 1 else "vector"


def stored_forms(graph: Graph) -> dict[str, str]:
    """The form of every constant; raises ``GraphError`` for one that is read in two forms."""
    forms: dict[str, str] = {}
    for node in graph.nodes:
        for place, operand in enumerate(node.inputs):
            if operand in graph.constants:
                form = stored_form(node.op, place)
                if forms.setdefault(operand, form) != form:
                    raise GraphError(
                        f"constant {operand!r} is read as {forms[operand]} and, by {node.name!r}, as {form}"
                    )
    for name in graph.constants:
        if name not in forms:
            raise GraphError(f"constant {name!r} is read by no node")
    return forms
