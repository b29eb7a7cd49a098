"""Attention as one op over packed sequences, fed by one projection of queries, keys and values.

    q, k, v = linear(x) each                            qkv = linear(x)
    context = attention_context(                  →     context = attention(qkv, bias)
        softmax(relative_bias(scale(attention_scores(q, k)), table)), v)

The scale may also stand between q and the scores (DistilBERT), or be absent; so may the relative bias, whose
bucket table becomes one row a head over all distances that ``max_len`` allows, or the linear one (ALiBi), whose slopes
do. The projections must be joined in the same step: attention reads one value.

Queries and keys may be turned by their positions, and scores hidden beyond a reach (ModernBERT):

    attention_scores(rotary(q), rotary(k))              qkv = rotary_qkv(linear(x), table)
    softmax(local_mask(scores))                   →     context = local_attention(qkv)

where the table holds the cosines and sines of all positions up to ``max_len``: computed in float64, rounded once.

Scores may also gain products with vectors of distances (DeBERTa, BERT's ``relative_key``), before they are scaled or
after (ALBERT):

    scale(relative_scores(relative_scores(            →     context = disentangled_attention(qkv, keys, queries)
        attention_scores(q, k), q, table), k, table))

where the two tables, constants by now, are laid out for all distances that ``max_len`` allows, of each head or once for
all. What was added to scaled scores is divided by the scale, which the fused op applies to the whole sum.

What hides keys at the end of a sequence stands right before the softmax, and becomes an operand of the first two ops:

    softmax(hide_keys(scores, seen))              →     context = attention(qkv, bias, seen)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from encast.ir import Graph, Node
from encast.ir.relative import distance_rows, pack_distances, relative_buckets
from encast.passes.patch import Index, MismatchError, Patch, apply, fresh_name
from encast.passes.projections import ProjectionJoiner, need_joinable
from encast.passes.report import Miss, Outcome

__all__ = ["fuse_attention"]

_BIASES = ("relative_bias", "linear_bias")


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
    reach: int | None
    angles: tuple[float, float] | None
    """Base and rate of op ``rotary``."""
    relative: dict[str, Node]
    """The ``relative_scores`` of each side."""
    divisor: float
    """What their tables are divided by, because the scale comes before them: the factor, else 1."""
    seen: str
    """How many keys every sequence has, "" for all."""


def fuse_attention(graph: Graph, exact: bool) -> Outcome:
    """``exact``: fold only scales that are powers of two into the projection (see ``projections``)."""
    outcome = Outcome()
    index = Index(graph)
    joiner = ProjectionJoiner(graph, exact)
    tables: dict[tuple[str, int], str] = {}
    made_angles: dict[tuple[float, float, int], str] = {}
    vectors: dict[tuple[Any, ...], str] = {}
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
        made = [joined]
        if match.angles is not None:
            size = _width(graph, q) // match.heads
            made.append(_turned(graph, joined, match, _angle_table(graph, *match.angles, size, made_angles)))
        attrs: dict[str, Any] = {"heads": match.heads, "scale": factor, "products": "f32"}
        inputs = [made[-1].outputs[0]]
        op = "attention"
        if match.relative:
            op = "disentangled_attention"
            shared = match.heads > 1 and _table_width(graph, *match.relative.values()) != _width(graph, q)
            attrs["shared"] = shared
            inputs += _distance_vectors(graph, match, match.factor / factor, 1 if shared else match.heads, vectors)
        elif match.reach is not None:
            op = "local_attention"
            attrs["reach"] = match.reach
        else:
            inputs.append("" if match.bias is None else _distance_table(graph, match.bias, tables))
        if match.seen:
            inputs.append(match.seen)
        fused = Node(op, inputs, context.outputs, attrs, context.name, context.layer)
        patches.append(Patch((q, k, v, *match.inner, context), (*made, fused)))
        outcome.fused += [("qkv", context.layer), ("attention", context.layer)]
    outcome.changes = apply(graph, patches)
    return outcome


def _match(graph: Graph, index: Index, context: Node) -> Match:
    probs, v = context.inputs
    index.need_private(probs, context)
    softmax = index.made_by(probs, "softmax")
    inner = [softmax]
    factor, bias, reach, seen = 1.0, None, None, ""
    kinds = ("attention_scores", "relative_scores", "scale")
    node, reader = index.made_by(softmax.inputs[0], *kinds, *_BIASES, "local_mask", "hide_keys"), softmax
    if node.op == "hide_keys":
        index.need_private(node.outputs[0], reader)
        seen = node.inputs[1]
        inner.append(node)
        node, reader = index.made_by(node.inputs[0], *kinds, *_BIASES, "local_mask"), node
    if node.op == "local_mask":
        index.need_private(node.outputs[0], reader)
        reach = int(node.attrs["reach"])
        inner.append(node)
        node, reader = index.made_by(node.inputs[0], *kinds), node
    if node.op in _BIASES:
        index.need_private(node.outputs[0], reader)
        if node.inputs[1] not in graph.constants:
            raise MismatchError(f"{node.inputs[1]!r} is not a constant")
        bias = node
        inner.append(node)
        node, reader = index.made_by(node.inputs[0], *kinds), node
    relative, node, reader = _take_distances(graph, index, node, reader, *kinds)
    divisor = 1.0
    if node.op == "scale":
        index.need_private(node.outputs[0], reader)
        factor = node.attrs["factor"]
        inner.append(node)
        node, reader = index.made_by(node.inputs[0], "attention_scores", "relative_scores"), node
        if relative:
            divisor = factor
        else:
            relative, node, reader = _take_distances(graph, index, node, reader, "attention_scores", "relative_scores")
    if node.op != "attention_scores":
        raise MismatchError(f"{node.name!r} is scaled, and what is added to it later is not")
    if relative:
        _table_width(graph, *relative.values())
    inner += relative.values()
    index.need_private(node.outputs[0], reader)
    scores = node
    inner.append(scores)
    q, k = scores.inputs
    if len({q, k, v}) != 3:
        raise MismatchError("two of query, key and value are the same value")
    if graph.type_of(v) != graph.type_of(q):
        raise MismatchError(f"queries are {graph.type_of(q)}, values are {graph.type_of(v)}")
    index.need_private(v, context)
    for side, value in (("query", q), ("key", k)):
        readers = [scores]
        if side in relative:
            readers.append(relative[side])
            if relative[side].inputs[1] != value:
                raise MismatchError(f"{relative[side].name!r} reads {relative[side].inputs[1]!r}, not {value!r}")
        index.need_private(value, *readers)
    angles = None
    turned = [index.producer(value) for value in (q, k)]
    if any(node is not None and node.op == "rotary" for node in turned):
        turned_q, turned_k = (index.made_by(value, "rotary") for value in (q, k))
        if turned_q.attrs != turned_k.attrs or turned_q.attrs["heads"] != scores.attrs["heads"]:
            raise MismatchError(f"{turned_q.name!r} and {turned_k.name!r} do not turn the heads of the scores alike")
        angles = (float(turned_q.attrs["theta"]), float(turned_q.attrs["rate"]))
        inner += [turned_q, turned_k]
        q, k = turned_q.inputs[0], turned_k.inputs[0]
        index.need_private(q, turned_q)
        index.need_private(k, turned_k)
    scaled = index.producer(q)
    if scaled is not None and scaled.op == "scale":
        factor *= scaled.attrs["factor"]
        inner.append(scaled)
        q = scaled.inputs[0]
        index.need_private(q, scaled)
    if relative and (bias is not None or reach is not None or seen or q != scores.inputs[0]):
        raise MismatchError(
            "products with vectors of distances come with a bias, a reach, hidden keys or other queries"
        )
    if not factor > 0:
        raise MismatchError(f"the scores are scaled by {factor}")
    return Match(tuple(inner), q, k, v, scores.attrs["heads"], factor, bias, reach, angles, relative, divisor, seen)


def _take_distances(
    graph: Graph, index: Index, node: Node, reader: Node, *kinds: str
) -> tuple[dict[str, Node], Node, Node]:
    """The ``relative_scores`` from ``node`` down by their side; the node of ``kinds`` below them, and its reader."""
    taken: dict[str, Node] = {}
    while node.op == "relative_scores":
        index.need_private(node.outputs[0], reader)
        if node.attrs["of"] in taken or node.inputs[2] not in graph.constants:
            raise MismatchError(f"{node.name!r} is a second one of its side, or {node.inputs[2]!r} is not a constant")
        taken[node.attrs["of"]] = node
        node, reader = index.made_by(node.inputs[0], *kinds), node
    return taken, node, reader


def _table_width(graph: Graph, *relative: Node) -> int:
    """Columns of the tables of ``relative_scores``."""
    widths = {graph.constants[node.inputs[2]].array.shape[1] for node in relative}
    if len(widths) != 1:
        raise MismatchError(f"the tables of {[node.name for node in relative]} are of unlike widths")
    return int(widths.pop())


def _distance_table(graph: Graph, bias: Node, made: dict[tuple[str, int], str]) -> str:
    """``f32[heads, 2 * max_len - 1]``: the bias of every distance key - query, by its bucket's row or its slope."""
    table, furthest = bias.inputs[1], bias.attrs.get("max_distance", 0)
    if (table, furthest) not in made:
        rows = graph.constants[table].array
        max_len = graph.meta.max_len
        distances = np.arange(1 - max_len, max_len)
        if bias.op == "linear_bias":
            dense = (-rows[:, None].astype(np.float64) * np.abs(distances)).astype(np.float32)
        else:
            dense = np.ascontiguousarray(rows[relative_buckets(distances, rows.shape[0], furthest)].T)
        made[table, furthest] = graph.add_constant(fresh_name(graph, f"{table}.distances"), dense)
    return made[table, furthest]


def _distance_vectors(
    graph: Graph, match: Match, folded: float, heads: int, made: dict[tuple[Any, ...], str]
) -> list[str]:
    """The tables of op ``disentangled_attention``, of so many ``heads``. ``folded``: the factor that the queries have
    taken in; what is multiplied by keys takes it in too. Layers that share a table share what is made of it."""
    longest, names = graph.meta.max_len, ["", ""]
    # From the keys' first to the last one for keys (key - query), the same for queries (query - key).
    ascending = np.arange(1 - longest, longest)
    for place, (side, distances) in enumerate((("query", -ascending), ("key", ascending))):
        if side not in match.relative:
            continue
        node = match.relative[side]
        table, factor = node.inputs[2], (folded if side == "key" else 1.0) / match.divisor
        furthest = node.attrs["max_distance"]
        key = table, side, furthest, factor, heads
        if key not in made:
            rows = graph.constants[table].array
            vectors = rows[distance_rows(distances, len(rows) // 2, furthest)]
            if factor != 1.0:
                vectors = (vectors * np.float64(factor)).astype(np.float32)
            name = fresh_name(graph, f"{table}.distances")
            made[key] = graph.add_constant(name, pack_distances(vectors, heads))
        names[place] = made[key]
    return names


def _width(graph: Graph, linear: Node) -> int:
    columns = graph.type_of(linear.outputs[0]).shape[1]
    assert isinstance(columns, int)
    return columns


def _turned(graph: Graph, joined: Node, match: Match, table: str) -> Node:
    name = fresh_name(graph, f"{joined.name}.rotary")
    return Node("rotary_qkv", [joined.outputs[0], table], [name], {"heads": match.heads}, name, joined.layer)


def _angle_table(graph: Graph, theta: float, rate: float, size: int, made: dict[tuple[float, float, int], str]) -> str:
    """``f32[max_len, size]``: of every position the cosines and the sines of the angles of op ``rotary``."""
    if (theta, rate, size) not in made:
        angles = np.arange(graph.meta.max_len)[:, None] * rate * theta ** (-np.arange(0, size, 2) / size)
        table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
        made[theta, rate, size] = graph.add_constant(fresh_name(graph, f"rotary.{theta:g}"), table)
    return made[theta, rate, size]
