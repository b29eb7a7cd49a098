"""Gives a constant that is read in two stored forms a name for each.

A masked-LM decoder multiplies by the word table that the embedding reads row by row. The product wants panels,
the embedding wants rows (``artifact/pack.py``), so the product gets a constant of its own over the same array.
"""

from __future__ import annotations

from encast.ir import Graph
from encast.ir.storage import stored_form
from encast.passes.patch import fresh_name
from encast.passes.report import Outcome

__all__ = ["separate_weights"]


def separate_weights(graph: Graph) -> Outcome:
    outcome = Outcome()
    names: dict[tuple[str, str], str] = {}
    first: dict[str, str] = {}
    for node in graph.nodes:
        for place, operand in enumerate(node.inputs):
            if operand not in graph.constants:
                continue
            form = stored_form(node.op, place)
            if first.setdefault(operand, form) == form:
                continue
            if (operand, form) not in names:
                name = fresh_name(graph, f"{operand}.{form}")
                graph.constants[name] = graph.constants[operand]
                names[operand, form] = name
                outcome.changes += 1
            node.inputs[place] = names[operand, form]
    return outcome
