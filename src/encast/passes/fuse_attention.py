"""Attention as one op over packed sequences, fed by one projection of queries, keys and values.

    q, k, v = linear(x) each                            qkv = linear(x)
    context = attention_context(                  →     context = attention(qkv, bias)
        softmax(relative_bias(scale(attention_scores(q, k)), table)), v)

The scale may also stand between q and the scores (DistilBERT), or be absent; so may the relative bias, whose
bucket table becomes one row a head over all distances that ``max_len`` allows. The projections must be joined
in the same step: attention reads one value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from encast.ir import Graph, Node
from encast.ir.relative import relative_buckets
from encast.passes.patch import Index, MismatchError, Patch, apply, fresh_name
from encast.passes.projections import ProjectionJoiner, need_joinable
from encast.passes.report import Miss, Outcome

__all__ = ["fuse_attention"]


@dataclass(frozen=True)
class Match:
    """One attention: its nodes between the projections and the context, and what they say."""

    inner: tuple[Node, ...]
    q: str
    k: str
    v: str
    heads: int
    factor: float
    bias: Node | None


def fuse_attention(graph: Graph, exact: bool) -> Outcome:
    """``exact``: fold only scales that are powers of two into the projection (see ``projections``)."""
    outcome = Outcome()
    index = Index(graph)
    joiner = ProjectionJoiner(graph, exact)
    tables: dict[tuple[str, int], str] = {}
    patches: list[Patch] = []
    for context in [node for node in graph.nodes if node.op == "attention_context"]:
        try:
            match = _match(graph, index, context)
        except MismatchError as mismatch:
            outcome.missed.append(Miss("attention", context.layer, context.name, str(mismatch)))
            outcome.missed.append(Miss("qkv", context.layer, context.name, "the attention around it was not fused"))
            continue
        try:
            q, k, v = (index.made_by(value, "linear") for value in (match.q, match.k, match.v))
            need_joinable(graph, index, q, k, v)
        except MismatchError as mismatch:
            outcome.missed.append(Miss("qkv", context.layer, context.name, str(mismatch)))
            outcome.missed.append(Miss("attention", context.layer, context.name, "its projections cannot be joined"))
            continue
        joined, factor = joiner.join(q, k, v, match.factor)
        bias = "" if match.bias is None else _distance_table(graph, match.bias, tables)
        fused = Node(
            "attention",
            [joined.outputs[0], bias],
            context.outputs,
            {"heads": match.heads, "scale": factor, "products": "f32"},
            context.name,
            context.layer,
        )
        patches.append(Patch((q, k, v, *match.inner, context), (joined, fused)))
        outcome.fused += [("qkv", context.layer), ("attention", context.layer)]
    outcome.changes = apply(graph, patches)
    return outcome


def _match(graph: Graph, index: Index, context: Node) -> Match:
    probs, v = context.inputs
    index.need_private(probs, context)
    softmax = index.made_by(probs, "softmax")
    inner = [softmax]
    factor, bias = 1.0, None
    node, reader = index.made_by(softmax.inputs[0], "attention_scores", "scale", "relative_bias"), softmax
    if node.op == "relative_bias":
        index.need_private(node.outputs[0], reader)
        if node.inputs[1] not in graph.constants:
            raise MismatchError(f"{node.inputs[1]!r} is not a constant")
        bias = node
        inner.append(node)
        node, reader = index.made_by(node.inputs[0], "attention_scores", "scale"), node
    if node.op == "scale":
        index.need_private(node.outputs[0], reader)
        factor = node.attrs["factor"]
        inner.append(node)
        node, reader = index.made_by(node.inputs[0], "attention_scores"), node
    index.need_private(node.outputs[0], reader)
    scores = node
    inner.append(scores)
    q, k = scores.inputs
    if len({q, k, v}) != 3:
        raise MismatchError("two of query, key and value are the same value")
    if graph.type_of(v) != graph.type_of(q):
        raise MismatchError(f"queries are {graph.type_of(q)}, values are {graph.type_of(v)}")
    index.need_private(v, context)
    index.need_private(k, scores)
    index.need_private(q, scores)
    scaled = index.producer(q)
    if scaled is not None and scaled.op == "scale":
        factor *= scaled.attrs["factor"]
        inner.append(scaled)
        q = scaled.inputs[0]
        index.need_private(q, scaled)
    if not factor > 0:
        raise MismatchError(f"the scores are scaled by {factor}")
    return Match(tuple(inner), q, k, v, scores.attrs["heads"], factor, bias)


def _distance_table(graph: Graph, bias: Node, made: dict[tuple[str, int], str]) -> str:
    """``f32[heads, 2 * max_len - 1]``: the bias of every distance key - query, from its bucket's row."""
    table, furthest = bias.inputs[1], bias.attrs["max_distance"]
    if (table, furthest) not in made:
        rows = graph.constants[table].array
        max_len = graph.meta.max_len
        distances = np.arange(1 - max_len, max_len)
        dense = np.ascontiguousarray(rows[relative_buckets(distances, rows.shape[0], furthest)].T)
        made[table, furthest] = graph.add_constant(fresh_name(graph, f"{table}.distances"), dense)
    return made[table, furthest]
