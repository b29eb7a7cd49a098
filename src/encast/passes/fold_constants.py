"""Folds an embedding of a one-row table, which adds the same row to every token, into a neighbour table.

RoBERTa's token types are the case: ``type_vocab_size`` is 1, so every token gets row 0. The row goes into the
position table, or into the word table when there are no positions. One f32 rounding of ``table + row`` takes the
place of one in the sum; nothing else changes.
"""

from __future__ import annotations

import numpy as np

from encast.ir import Graph, Node
from encast.passes.patch import Index, MismatchError, Patch, apply, fresh_name
from encast.passes.report import Outcome

__all__ = ["fold_constants"]


def fold_constants(graph: Graph) -> Outcome:
    outcome = Outcome()
    for node in [node for node in graph.nodes if node.op == "embedding"]:
        if _is_one_row(graph, node):
            try:
                outcome.changes += _fold(graph, Index(graph), node)
            except MismatchError:
                continue
    return outcome


def _is_one_row(graph: Graph, node: Node) -> bool:
    return node.inputs[1] in graph.constants and graph.constants[node.inputs[1]].type.shape[0] == 1


def _fold(graph: Graph, index: Index, node: Node) -> int:
    """Takes ``node`` and the add that reads it out of the sum; its row goes into another embedding's table."""
    row = node.outputs[0]
    users = index.users(row)
    if len(users) != 1 or users[0].op != "add" or users[0].inputs.count(row) != 1:
        raise MismatchError(f"{row!r} is not read by one add alone")
    index.need_private(row, users[0])
    total = users[0]
    rest = total.inputs[1 - total.inputs.index(row)]
    # The terms that meet the row in this sum, through adds that nobody else reads, above and below it.
    top = total
    while not index.is_output(top.outputs[0]):
        above = index.users(top.outputs[0])
        if len(above) != 1 or above[0].op != "add" or above[0].inputs.count(top.outputs[0]) != 1:
            break
        top = above[0]
    terms = [term for term in _terms(graph, index, top) if term is not node]
    if not terms:
        raise MismatchError(f"no other table is added to {row!r}")
    into = min(terms, key=lambda term: graph.constants[term.inputs[1]].array.shape[0])
    positional = [term for term in terms if _is_positional(index, term)]
    into = positional[0] if positional else into
    renamed = total.outputs[0]
    if index.is_output(renamed):
        raise MismatchError(f"{renamed!r} is an output of the graph")

    table = into.inputs[1]
    name = fresh_name(graph, f"{table}+{node.inputs[1]}")
    constants = graph.constants
    graph.add_constant(name, (constants[table].array + constants[node.inputs[1]].array).astype(np.float32))
    moved = Node(into.op, [into.inputs[0], name], into.outputs, dict(into.attrs), into.name, into.layer)
    for user in index.users(renamed):
        user.inputs = [rest if operand == renamed else operand for operand in user.inputs]
    apply(graph, [Patch((into,), (moved,)), Patch((node,), ()), Patch((total,), ())])
    return 1


def _terms(graph: Graph, index: Index, total: Node) -> list[Node]:
    """The embeddings of constant tables that a tree of adds sums up, each used there alone."""
    terms: list[Node] = []
    for operand in total.inputs:
        producer = index.producer(operand)
        if producer is None or index.is_output(operand) or len(index.users(operand)) != 1:
            continue
        if producer.op == "add":
            terms += _terms(graph, index, producer)
        elif producer.op == "embedding" and producer.inputs[1] in graph.constants:
            terms.append(producer)
    return terms


def _is_positional(index: Index, term: Node) -> bool:
    producer = index.producer(term.inputs[0])
    return producer is not None and producer.op == "position_ids"
