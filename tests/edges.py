"""Whether a bf16 engine computes a compiled graph: to f32 precision, whichever way roundings on an edge fell.

Rounding to bf16 takes away the f32 error of a value, unless the value stands on the edge between two bf16: there one
unit in the last place of f32 decides, and the reference's float64 and the engine's f32 may go different ways. One such
rounding moves everything after it, other roundings included, by as much as the dtype itself costs. So no bound on the
difference tells an engine that rounds wrongly from one that was unlucky.

What tells them apart is that only few roundings stand on an edge: those whose distance from it is within
``confidence`` standard deviations of the value's f32 error, by the model of ``bounds.py``. With some of them turned to
the other side the reference must agree with the engine as closely as f32 does. Which ones is searched for, the edge
that brings the answers closest first. A sequence is settled by itself: nothing that is rounded in it reaches another.
The search can only fail an engine that is right: in long graphs several early edges of one sequence hide one another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from bounds import UNIT, Rules, Value, exactly, largest_excess, per_head, product, turned

from encast.backends.reference import EVALUATORS, Context, Reference
from encast.backends.reference.coarse import BUMPS
from encast.batch import Batch
from encast.ir import Graph
from encast.ir.relative import distance_origin, unpack_distances

__all__ = ["largest_unexplained"]

Array = np.ndarray[Any, Any]
Edge = tuple[int, int]
"""Which rounding of an evaluation, and which element of it (of equal ones the first)."""

_WORTHWHILE = 0.99
"""An edge that fell otherwise moves its sequence; what leaves this much of the distance is a small change elsewhere."""


def largest_unexplained(
    graph: Graph,
    answers: Mapping[str, Array],
    batch: Batch,
    select: Array | None = None,
    *,
    elementary: float,
    confidence: float = 8.0,
) -> float:
    """The largest difference from ``answers`` in units of what f32 may differ, roundings on an edge settled; 1 passes.

    ``graph``: compiled to bf16, with its arrays. ``answers``: the engine's, by output, to ``batch`` and ``select``.
    Edges are settled for ``last_hidden_state`` first, whose many numbers tell edges apart that three logits do not;
    for the other outputs only those edges are left that come after its own.
    """
    largest = 0.0
    order = sorted(answers, key=lambda output: output != "last_hidden_state")
    for number, (begin, end) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
        types = None if batch.token_type_ids is None else batch.token_type_ids[begin:end]
        alone = Batch(batch.token_ids[begin:end], np.array([0, end - begin], np.int32), types)
        chosen = np.zeros(0, bool) if select is None else (begin <= select) & (select < end)
        picked = None if select is None else (select[chosen] - begin).astype(np.int32)
        sequence = _Sequence(graph, alone, picked, elementary, confidence)
        rows = {"tokens": slice(begin, end), "seqs": slice(number, number + 1), "selected": chosen}
        for output in order:
            got = answers[output]
            kind = str(graph.type_of(graph.outputs[output]).shape[0])
            if len(got[rows[kind]]):
                largest = max(largest, sequence.settle(graph.outputs[output], got[rows[kind]]))
    return largest


_NEAR = 1.0
"""Standard deviations within which most edges lie that fell otherwise; others are tried where none of these helps."""


class _Sequence:
    """One sequence, and the roundings in it that have been turned to the other side."""

    def __init__(self, graph: Graph, batch: Batch, select: Array | None, elementary: float, confidence: float) -> None:
        self.graph, self.batch, self.select = graph, batch, select
        self.elementary, self.confidence = elementary, confidence
        self.turned: frozenset[Edge] = frozenset()
        self.settled = 0  # roundings, from the first on

    def settle(self, value: str, got: Array) -> float:
        """Turns edges until ``value`` agrees with ``got`` or none brings it much closer; the excess that is left."""
        if not np.isfinite(got).all():
            return float("inf")
        now = self._compare(value, got, self.turned)
        while now.excess > 1:
            best, best_turned = now, self.turned
            for far, edge in now.edges:
                if far > _NEAR and best.distance <= _WORTHWHILE * now.distance:
                    break
                turned = self.turned ^ {edge}  # or back, when it was turned for want of a better one
                tried = self._compare(value, got, turned)
                if tried.distance < best.distance:
                    best, best_turned = tried, turned
                    if tried.excess <= 1:
                        break
            if best.excess > 1 and best.distance > _WORTHWHILE * now.distance:
                break
            now, self.turned = best, best_turned
        maker = self.graph.producer(value)
        # A narrow copy of the value itself is rounded with it, but nothing in the value tells how it fell.
        self.settled = now.roundings - (maker is not None and maker.op.endswith("_narrow"))
        return now.excess

    def _compare(self, value: str, got: Array, turned: frozenset[Edge]) -> _Compared:
        """The reference, ``turned`` to their other sides, beside the engine."""
        rules = _NarrowRules(self.elementary, self.confidence, turned)
        made = Reference(self.graph).values([value], self.batch, self.select, rules.table())[value]
        left = sorted((far, edge) for edge, far in rules.edges.items() if edge[0] >= self.settled)
        return _Compared(
            largest_excess(got, made.exact, self.confidence * made.sigma),
            float(np.sqrt(((got - made.exact) ** 2).mean())),
            left,
            rules.roundings,
        )


@dataclass(frozen=True)
class _Compared:
    """How far the engine is: largest excess, root mean square. Edges that may be turned, nearest first, with their
    distances in standard deviations; all roundings.

    The way goes by the root mean square: of several roundings that fell otherwise, one may hide the others' largest.
    """

    excess: float
    distance: float
    edges: list[tuple[float, Edge]]
    roundings: int


def _flat(scores: Value) -> Value:
    """``[heads, queries, keys]`` as ``[heads, pairs]``."""
    return Value(*(x.reshape(len(x), -1) for x in (scores.exact, scores.sigma)))


class _NarrowRules(Rules):
    """The rules of plain ops, and those of graphs compiled to bf16.

    ``edges``: every rounding so far that may fall to either side, with its distance from there in standard deviations.
    """

    def __init__(self, elementary: float, confidence: float, turned: frozenset[Edge]) -> None:
        super().__init__(elementary)
        self.confidence, self.turned = confidence, turned
        self.edges: dict[Edge, float] = {}
        self.roundings = 0

    def table(self) -> dict[str, Callable[..., Any]]:
        narrow: dict[str, Callable[..., Any]] = {
            "linear_bf16": self.linear,
            "cast_bf16": lambda context, x: self.round(x),
            "attention": self.attention,
            "local_attention": lambda context, qkv, seen, **attrs: self.attention(context, qkv, None, seen, **attrs),
            "disentangled_attention": self.disentangled_attention,
            "rotary_qkv": self.rotary_qkv,
            "embed_layer_norm": self.embed_layer_norm,
            "add_layer_norm": self.add_layer_norm,
        }
        plain = super().table()
        for name in ("embed_layer_norm", "add_layer_norm", "layer_norm", "rms_norm", "gated_activation"):
            narrow[f"{name}_narrow"] = self._with_narrow(narrow.get(name) or plain[name])
        return plain | narrow

    def round(self, x: Value) -> Value:
        """``x`` to bf16, without error but for turned edges; they are noted."""
        rounded = np.asarray(EVALUATORS["cast_bf16"](None, x.exact))
        bits = x.exact.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        inner, outer = ((bits + np.uint32(step)).view(np.float32).astype(np.float64) for step in (0, 1 << 16))
        gap, middle = np.abs(outer - inner), (inner + outer) / 2
        reach = self.confidence * x.sigma
        # An error of more than half a step may pass several edges. It leaves as at most |error| + gap, so within
        # three times what it may have been.
        lost = reach >= gap / 2
        with np.errstate(divide="ignore", invalid="ignore"):
            distance = np.where(x.sigma > 0, np.abs(x.exact - middle) / x.sigma, np.inf)
        site, self.roundings = self.roundings, self.roundings + 1
        firsts: dict[str, Edge] = {}
        for index in map(int, np.flatnonzero((distance <= self.confidence) & ~lost)):
            # Equal tokens have equal values, in the engine to the last bit: they fall to the same side.
            edge = firsts.setdefault(f"{x.exact.flat[index]:.11e}", (site, index))
            self.edges[edge] = float(distance.flat[index])
            if edge in self.turned:
                rounded.flat[index] = (inner + outer - rounded).flat[index]
        return Value(rounded, np.where(lost, 3 * x.sigma, 0.0))

    def linear(self, context: Context, x: Value, weight: Array, bias: Array | None, *, activation: str) -> Value:
        made = super().linear(context, x, weight, bias, activation="none")
        return made if activation == "none" else self.activation(context, made, kind=activation)

    def activation(self, context: Context, x: Value, *, kind: str) -> Value:
        made = super().activation(context, x, kind=kind)
        if kind not in BUMPS:
            return made
        # A coarse form has a step where its parabolas meet, and an error may cross it.
        low, high = (
            EVALUATORS["activation"](context, x.exact + sign * self.confidence * x.sigma, kind=kind) for sign in (-1, 1)
        )
        return Value(made.exact, np.hypot(made.sigma, (high - low) / self.confidence))

    def embed_layer_norm(
        self,
        context: Context,
        token_ids: Array,
        token_type_ids: Array | None,
        word: Array,
        position: Array | None,
        token_type: Array | None,
        gamma: Array,
        beta: Array,
        *,
        eps: float,
        position_offset: int,
        position_skip_id: int,
    ) -> Value:
        total = exactly(word[token_ids])
        if token_type is not None:
            total = self.add(context, total, exactly(token_type[token_type_ids]))
        if position is not None:
            ids = EVALUATORS["position_ids"](context, token_ids, offset=position_offset, skip_id=position_skip_id)
            total = self.add(context, total, exactly(position[ids]))
        return self.layer_norm(context, total, gamma, beta, eps=eps)

    def add_layer_norm(
        self, context: Context, x: Value, residual: Value, gamma: Array, beta: Array, *, eps: float
    ) -> Value:
        return self.layer_norm(context, self.add(context, x, residual), gamma, beta, eps=eps)

    def attention(
        self,
        context: Context,
        qkv: Value,
        bias: Array | None,
        seen: Array | None = None,
        *,
        heads: int,
        scale: float,
        products: str,
        reach: int | None = None,
    ) -> Value:
        assert products == "bf16", f"there are no rules for products in {products}"
        (length,) = (length for _, _, length in context.sequences())
        narrow = self.round(qkv)
        q, k, v = (
            per_head(Value(*parts), heads)
            for parts in zip(*(np.split(x, 3, axis=1) for x in (narrow.exact, narrow.sigma)), strict=True)
        )
        made = product(q, Value(k.exact.transpose(0, 2, 1), k.sigma.transpose(0, 2, 1)))
        scores = self.scale(context, made, factor=scale)
        if bias is not None:
            positions = np.arange(length)
            columns = positions[None, :] - positions[:, None] + (bias.shape[1] + 1) // 2 - 1
            scores = self.add(context, scores, exactly(bias[:, columns]))
        if reach is not None:
            scores = self.local_mask(Context(np.array([0, length], np.int32)), _flat(scores), reach=reach)
            scores = Value(*(x.reshape(heads, length, length) for x in (scores.exact, scores.sigma)))
        if seen is not None:
            scores = self.hide_keys(Context(np.array([0, length], np.int32)), _flat(scores), seen)
            scores = Value(*(x.reshape(heads, length, length) for x in (scores.exact, scores.sigma)))
        # Powers are rounded, so the error of the largest score counts in each: unlike in softmax it does not cancel.
        top = scores.exact.argmax(axis=2)[..., None]
        below = np.take_along_axis(scores.exact, top, axis=2) - scores.exact
        apart = scores.sigma**2 + np.take_along_axis(scores.sigma, top, axis=2) ** 2
        powers = np.exp(-below)
        relative = np.sqrt(apart + (UNIT * np.where(powers > 0, below, 0.0)) ** 2 + self.elementary**2)
        p = self.round(Value(powers, powers * relative))
        mixed = product(p, v)
        total = p.exact.sum(axis=2, keepdims=True)
        exact = mixed.exact / total
        of_total = np.sqrt((p.sigma**2).sum(axis=2, keepdims=True)) / total
        own = UNIT * np.sqrt(length / 9 + 4)
        sigma = np.sqrt((mixed.sigma / total) ** 2 + exact**2 * (of_total**2 + own**2))
        return Value(*(x.transpose(1, 0, 2).reshape(length, -1) for x in (exact, sigma)))

    def disentangled_attention(
        self,
        context: Context,
        qkv: Value,
        key_table: Array | None,
        query_table: Array | None,
        *,
        heads: int,
        scale: float,
        products: str,
        shared: bool,
    ) -> Value:
        """By the rules of the plain ops: its products are f32."""
        assert products == "f32", f"there are no rules for products in {products}"
        (length,) = (length for _, _, length in context.sequences())
        q, k, v = (
            Value(*parts) for parts in zip(*(np.split(x, 3, axis=1) for x in (qkv.exact, qkv.sigma)), strict=True)
        )
        scores = self.attention_scores(context, q, k, heads=heads)
        queries, keys = np.arange(length)[:, None], np.arange(length)[None, :]
        for table, x, at, distances in (
            (key_table, q, queries, keys - queries),
            (query_table, k, keys, queries - keys),
        ):
            if table is None:
                continue
            vectors = unpack_distances(table, 1 if shared else heads, qkv.exact.shape[1] // 3 // heads)
            made = product(per_head(x, heads), exactly(vectors.transpose(0, 2, 1)))
            place = (slice(None), at, distances + distance_origin(vectors.shape[1]))
            picked = Value(*(part[place].reshape(heads, -1) for part in (made.exact, made.sigma)))
            scores = self.add(context, scores, picked)
        scores = self.scale(context, scores, factor=scale)
        return self.attention_context(context, self.softmax(context, scores), v)

    def rotary_qkv(self, context: Context, qkv: Value, table: Array, *, heads: int) -> Value:
        (length,) = (length for _, _, length in context.sequences())
        cos, sin = np.split(table[:length], 2, axis=1)
        columns = qkv.exact.shape[1] // 3 * 2
        made = turned(Value(qkv.exact[:, :columns], qkv.sigma[:, :columns]), cos, sin)
        parts = ((made.exact, qkv.exact), (made.sigma, qkv.sigma))
        return Value(*(np.concatenate([one, other[:, columns:]], axis=1) for one, other in parts))

    def _with_narrow(self, rule: Callable[..., Value]) -> Callable[..., tuple[Value, Value]]:
        def evaluate(context: Context, *operands: Any, also: str, **attributes: Any) -> tuple[Value, Value]:
            assert also == "bf16", f"there are no rules for {also}"
            wide = rule(context, *operands, **attributes)
            return wide, self.round(wide)

        return evaluate
