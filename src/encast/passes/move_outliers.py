"""Scales channels that are far out in what products read down there, and up in the weights: SmoothQuant.

    linear(norm(x, gamma, beta), weight)  →  linear(norm(x, gamma / s, beta / s), weight * s)

With a scale a row (or one for all) of int8 activations, one channel that is far out takes the levels of all others;
weights have a scale an output and room for it. The factor of a channel is ``max|x|^a / max|w|^(1 - a)``
(G. Xiao et al., "SmoothQuant", 2022, arXiv:2211.10438, equation 4), here rounded to a power of two: then every product
of a value and a weight keeps all its bits, and the f32 function is the same to the last one.

Where the value comes from decides what is rewritten:

- a norm whose rows only products read: its gamma and beta;
- a norm whose rows a residual reads too, as in post-norm BERT: the products get a second norm of the same
  sum, with gamma and beta of its own, and the residual keeps the first (but not that of the embeddings: a plan has
  one step that looks rows up);
- attention: a context is a mean of value rows, channel by channel, so that the rows of the projection take the factor;
- a linear with relu or without an activation: its rows and bias.

What comes out of gelu, silu and tanh stays: ``gelu(x / s)`` is not ``gelu(x) / s``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from encast.errors import InputError
from encast.ir import Graph, Node
from encast.ir.ops import ATTENTIONS
from encast.passes.fuse_narrow import NORMS
from encast.passes.patch import Index, MismatchError, Patch, apply, fresh_name
from encast.passes.report import Outcome
from encast.passes.set_precision import dtype_of
from encast.quant.spec import QuantSpec

__all__ = ["move_outliers"]

Array = np.ndarray[Any, Any]

_MOST = 24
"""Factors are at most two to this power, far from where f32 ends."""


@dataclass(frozen=True)
class _Move:
    """``value``, which ``consumers`` read, made by ``producer``; ``weights``: theirs."""

    value: str
    producer: Node
    private: bool
    consumers: tuple[Node, ...]
    weights: tuple[str, ...]


def move_outliers(graph: Graph, spec: QuantSpec, largest: Mapping[str, Array]) -> Outcome:
    """Does nothing where ``spec`` moves none; products that it leaves wider keep what they read.

    ``largest: f64[channels]`` has the largest magnitudes of the values that linears read, by name.

    Raises ``InputError`` where it lacks one: it is another model's.
    """
    if spec.move_outliers is None:
        return Outcome()
    index = Index(graph)
    narrow = [node for node in graph.nodes if node.op == "linear" and dtype_of(graph, node, spec) == "int8"]
    values = dict.fromkeys(node.inputs[0] for node in narrow)
    moves = [move for value in values if (move := _find(graph, index, value, narrow)) is not None]
    # Layers that share their weights share the factors too, so that they go on to share the weights.
    seen: dict[tuple[str, ...], Array] = {}
    for move in moves:
        found = largest.get(move.value)
        if found is None or found.shape != graph.type_of(move.value).shape[1:]:
            raise InputError(
                f"the calibration has not seen {move.value!r} as this model has it: it is of another model or task; "
                "calibrate the checkpoint that you compile, with the same task"
            )
        seen[move.weights] = np.maximum(seen.get(move.weights, 0.0), found)
    scaled = _Scaled(graph)
    factors = {
        weights: _factors(found, [graph.constants[weight].array for weight in weights], spec.move_outliers)
        for weights, found in seen.items()
    }
    twins: list[Patch] = []
    for move in moves:
        factor = factors[move.weights]
        if not (factor != 1.0).any():
            continue
        key = move.weights
        for consumer in move.consumers:
            consumer.inputs[1] = scaled.constant(consumer.inputs[1], key, factor, axis=1)
        inverse = 1.0 / factor
        if move.producer.op in NORMS:
            count = _vectors(move.producer)
            inputs = [
                *move.producer.inputs[:-count],
                *(scaled.constant(c, key, inverse) for c in move.producer.inputs[-count:]),
            ]
            if move.private:
                move.producer.inputs = inputs
                continue
            name = fresh_name(graph, f"{move.value}.moved")
            norm = move.producer
            twin = Node(norm.op, inputs, [name], dict(norm.attrs), name, norm.layer)
            twins.append(Patch((norm,), (norm, twin)))
            for consumer in move.consumers:
                consumer.inputs[0] = name
        else:
            linear = _projection(index, move.producer)
            rows = int(graph.type_of(linear.outputs[0]).shape[1])
            # Of a projection of queries, keys and values the last third.
            inverse = np.concatenate([np.ones(rows - len(inverse), np.float32), inverse])
            for place in range(1, len(linear.inputs)):
                if linear.inputs[place]:
                    linear.inputs[place] = scaled.constant(linear.inputs[place], key, inverse)
    apply(graph, twins)
    read = {operand for node in graph.nodes for operand in node.inputs} | set(graph.outputs.values())
    graph.constants = {name: constant for name, constant in graph.constants.items() if name in read}
    return Outcome(changes=len(moves))


def _find(graph: Graph, index: Index, value: str, narrow: list[Node]) -> _Move | None:
    """The move at ``value``, which some of ``narrow`` read; None where the function would change."""
    producer = index.producer(value)
    if producer is None:
        return None
    readers = index.users(value)
    consumers = tuple(node for node in narrow if node.inputs[0] == value)
    weights = tuple(dict.fromkeys(consumer.inputs[1] for consumer in consumers))
    private = len(consumers) == len(readers) and not index.is_output(value)
    needed = [*weights]
    if producer.op in NORMS:
        if producer.op == "embed_layer_norm" and not private:
            return None
        needed += producer.inputs[-_vectors(producer) :]
    else:
        try:
            linear = _projection(index, producer)
        except MismatchError:
            return None
        if not private or linear.attrs["activation"] not in ("none", "relu"):
            return None
        needed += [operand for operand in linear.inputs[1:] if operand]
    if any(name not in graph.constants for name in needed):
        return None
    return _Move(value, producer, private, consumers, weights)


def _vectors(norm: Node) -> int:
    """How many operands of a norm, the last ones, are multiplied with the factors: gamma, and beta if it has one."""
    return 1 if norm.op == "rms_norm" else 2


def _projection(index: Index, producer: Node) -> Node:
    """The linear that makes a value, or the values that an attention takes the mean of; ``MismatchError`` if none."""
    if producer.op not in ATTENTIONS:
        return index.made_by(producer.outputs[0], "linear")
    linear = index.made_by(producer.inputs[0], "linear", "rotary_qkv")
    index.need_private(producer.inputs[0], producer)
    if linear.op == "rotary_qkv":  # which leaves the values as they are
        index.need_private(linear.inputs[0], linear)
        linear = index.made_by(linear.inputs[0], "linear")
    if linear.attrs["activation"] != "none":
        raise MismatchError(f"{linear.name!r} ends in an activation")
    return linear


def _factors(largest: Array, weights: list[Array], exponent: float) -> Array:
    """Powers of two ``f32[channels]``; 1 for a channel that is always zero, in the value or in the weights."""
    widest = np.max([np.abs(weight).max(axis=0) for weight in weights], axis=0).astype(np.float64)
    used = (largest > 0) & (widest > 0)
    logs = exponent * np.log2(np.where(used, largest, 1.0)) - (1 - exponent) * np.log2(np.where(used, widest, 1.0))
    return np.asarray(np.exp2(np.clip(np.rint(logs), -_MOST, _MOST)), np.float32)


class _Scaled:
    """Constants times factors, each once for each set of factors."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._made: dict[tuple[str, tuple[str, ...], int], str] = {}

    def constant(self, name: str, key: tuple[str, ...], factor: Array, axis: int = 0) -> str:
        """The constant whose entries along ``axis`` are multiplied by ``factor``, which ``key`` identifies."""
        made = (name, key, axis)
        if made not in self._made:
            array = self._graph.constants[name].array
            shape = [1] * array.ndim
            shape[axis] = -1
            self._made[made] = self._graph.add_constant(
                fresh_name(self._graph, f"{name}.moved"), array * factor.reshape(shape)
            )
        return self._made[made]
