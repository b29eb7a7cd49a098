"""Runs encast's portable graph of plain ops with the array functions of another library.

One table maps each op that the hidden states need to a function over an ``ArrayLibrary``. Where a library traces
what it is given (TensorFlow, JAX, TVM, MXNet, a writer of ONNX files), running the table once builds that library's
own program. Every such backend computes the graph that encast compiles, so their agreement with the reference
checks the graph as much as the backend.

Batches are rectangles: an activation is ``[rows * columns, hidden]``, scores are ``[rows, heads, columns, columns]``,
and what was filled up is masked out of the softmax.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from encast.errors import GraphError
from encast.ir import OPS, Graph, Node
from encast.ir.relative import relative_buckets
from encast.ir.types import ValueType

__all__ = ["HEAD_OPS", "INTERPRETED", "MASKED", "ArrayLibrary", "NumpyLike", "Rectangle", "interpret"]

Array = Any
"""An array of the library at hand, or what it traces in place of one."""

Observer = Callable[[Node, Array], None]

MASKED = -1e9
"""Added to the scores of keys that are padding; far below every score, and finite in bf16 and f32 sums."""

HEAD_OPS = frozenset({"first_token", "select_rows", "pooling", "normalize"})
"""Plain ops that come after the hidden states, which is as far as backends are compared."""


class ArrayLibrary(abc.ABC):
    """The array functions that the table of ops is written in. Products are ``x @ weight`` with ``weight: [in, out]``.

    Besides these methods, arrays must offer ``+`` between equal shapes and ``*`` with a Python float.
    """

    @abc.abstractmethod
    def constant(self, name: str, array: np.ndarray[Any, Any]) -> Array:
        """An f32 or i32 array; a name means the same array in every pass over a graph, and comes once in each."""

    @abc.abstractmethod
    def weight(self, name: str, array: np.ndarray[Any, Any]) -> Array:
        """As ``constant``, for the ``f32[in, out]`` of a product."""

    @abc.abstractmethod
    def linear(self, x: Array, weight: Array, bias: Array | None) -> Array:
        """``x @ weight + bias``."""

    @abc.abstractmethod
    def take(self, table: Array, ids: Array) -> Array:
        """Rows of ``table`` by ``ids: i32[n]``."""

    @abc.abstractmethod
    def broadcast_add(self, a: Array, b: Array) -> Array:
        """``a + b``, where axes of length 1 of ``b`` are repeated."""

    @abc.abstractmethod
    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array: ...

    @abc.abstractmethod
    def transpose(self, x: Array, axes: tuple[int, ...]) -> Array: ...

    @abc.abstractmethod
    def matmul(self, a: Array, b: Array, *, transpose_b: bool = False) -> Array:
        """Products of the matrices in the last two axes, those of ``b`` transposed or not."""

    @abc.abstractmethod
    def softmax(self, x: Array) -> Array:
        """Over the last axis."""

    @abc.abstractmethod
    def layer_norm(self, x: Array, gamma: Array, beta: Array, eps: float) -> Array:
        """Over the last axis of ``x: [n, hidden]``."""

    @abc.abstractmethod
    def activation(self, x: Array, kind: str) -> Array:
        """One of ``encast.ir.ops.ACTIVATIONS``."""

    @abc.abstractmethod
    def positions(self, ids: Array, skip_id: int) -> Array:
        """For ``ids: i32[rows, columns]``: how many up to and with each differ from ``skip_id``, 0 for those equal."""


class NumpyLike(ArrayLibrary):
    """The functions of a namespace with NumPy's names (numpy, jax.numpy); NumPy itself by default."""

    def __init__(self, namespace: Any = np) -> None:
        self.namespace = namespace

    def constant(self, name: str, array: np.ndarray[Any, Any]) -> Array:
        return self.namespace.asarray(array)

    def weight(self, name: str, array: np.ndarray[Any, Any]) -> Array:
        return self.constant(name, array)

    def linear(self, x: Array, weight: Array, bias: Array | None) -> Array:
        product = self.matmul(x, weight)
        return product if bias is None else product + bias

    def take(self, table: Array, ids: Array) -> Array:
        return self.namespace.take(table, ids, axis=0)

    def broadcast_add(self, a: Array, b: Array) -> Array:
        return a + b

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        return self.namespace.reshape(x, shape)

    def transpose(self, x: Array, axes: tuple[int, ...]) -> Array:
        return self.namespace.transpose(x, axes)

    def matmul(self, a: Array, b: Array, *, transpose_b: bool = False) -> Array:
        return self.namespace.matmul(a, self.namespace.swapaxes(b, -1, -2) if transpose_b else b)

    def softmax(self, x: Array) -> Array:
        powers = self.namespace.exp(x - self.namespace.max(x, axis=-1, keepdims=True))
        return powers / self.namespace.sum(powers, axis=-1, keepdims=True)

    def layer_norm(self, x: Array, gamma: Array, beta: Array, eps: float) -> Array:
        centred = x - self.namespace.mean(x, axis=-1, keepdims=True)
        variance = self.namespace.mean(centred * centred, axis=-1, keepdims=True)
        return centred / self.namespace.sqrt(variance + eps) * gamma + beta

    def activation(self, x: Array, kind: str) -> Array:
        tanh = self.namespace.tanh
        if kind == "gelu":
            return x * 0.5 * (self.erf(x * math.sqrt(0.5)) + 1.0)
        if kind == "gelu_tanh":
            return x * 0.5 * (tanh((x + x * x * x * 0.044715) * math.sqrt(2.0 / math.pi)) + 1.0)
        if kind == "silu":
            return x * 0.5 * (tanh(x * 0.5) + 1.0)
        return tanh(x) if kind == "tanh" else self.namespace.maximum(x, 0.0)

    def erf(self, x: Array) -> Array:
        """Within 1.5e-7 (Abramowitz and Stegun, "Handbook of Mathematical Functions", 7.1.26): NumPy has none."""
        size = np.abs(x)
        t = 1.0 / (1.0 + 0.3275911 * size)
        series = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
        return np.copysign(1.0 - series * np.exp(-size * size), x)

    def positions(self, ids: Array, skip_id: int) -> Array:
        counted = (ids != skip_id).astype(ids.dtype)
        return self.namespace.cumsum(counted, axis=1, dtype=ids.dtype) * counted


@dataclass(frozen=True)
class Rectangle:
    """A batch as the library sees it: ``token_ids`` and ``token_type_ids`` are ``i32[rows * columns]``.

    ``bias: f32[rows, 1, 1, columns]`` is 0 for tokens and ``MASKED`` for padding.
    """

    rows: int
    columns: int
    token_ids: Array
    token_type_ids: Array
    bias: Array


class _Run:
    """One pass over a graph: the method of an op's name computes it. Operands that are constants arrive as names."""

    def __init__(self, graph: Graph, library: ArrayLibrary, at: Rectangle) -> None:
        self.graph, self.library, self.at = graph, library, at
        self.made: dict[str, Array] = {}

    def node(self, node: Node, operands: list[Array]) -> Array:
        self.current = node
        return getattr(self, node.op)(*operands, **node.attrs)

    def position_ids(self, token_ids: Array, *, offset: int, skip_id: int) -> Array:
        rows, columns = self.at.rows, self.at.columns
        if skip_id < 0:
            numbers = np.tile(np.arange(offset, offset + columns, dtype=np.int32), rows)
            return self._constant(f"positions.{offset}.{rows}x{columns}", numbers)
        counts = self.library.positions(self.library.reshape(token_ids, (rows, columns)), skip_id)
        before: Array = np.full((rows, columns), offset - 1, np.int32)
        before = self._constant(f"positions.before.{offset}.{rows}x{columns}", before)
        return self.library.reshape(counts + before, (rows * columns,))

    def embedding(self, ids: Array, table: str) -> Array:
        return self.library.take(self._stored(table), ids)

    def add(self, a: Array, b: Array) -> Array:
        return a + b

    def scale(self, x: Array, *, factor: float) -> Array:
        return x * factor

    def linear(self, x: Array, weight: str, bias: str | None = None, *, activation: str) -> Array:
        product = self.library.linear(x, self._weight(weight), None if bias is None else self._stored(bias))
        return product if activation == "none" else self.library.activation(product, activation)

    def layer_norm(self, x: Array, gamma: str, beta: str, *, eps: float) -> Array:
        return self.library.layer_norm(x, self._stored(gamma), self._stored(beta), eps)

    def activation(self, x: Array, *, kind: str) -> Array:
        return self.library.activation(x, kind)

    def attention_scores(self, q: Array, k: Array, *, heads: int) -> Array:
        return self.library.matmul(self._split(q, 0, heads), self._split(k, 1, heads), transpose_b=True)

    def relative_bias(self, scores: Array, table: str, *, max_distance: int) -> Array:
        array, positions = self.graph.constants[table].array, np.arange(self.at.columns)
        buckets = relative_buckets(positions[None, :] - positions[:, None], array.shape[0], max_distance)
        bias = np.ascontiguousarray(array[buckets].transpose(2, 0, 1)[None])
        return self.library.broadcast_add(scores, self._constant(f"{table}.{self.at.columns}", bias))

    def softmax(self, scores: Array) -> Array:
        return self.library.softmax(self.library.broadcast_add(scores, self.at.bias))

    def attention_context(self, probs: Array, v: Array) -> Array:
        heads, hidden = int(self._type(0).shape[0]), int(self._type(1).shape[1])
        mixed = self.library.matmul(probs, self._split(v, 1, heads))
        joined = self.library.transpose(mixed, (0, 2, 1, 3))
        return self.library.reshape(joined, (self.at.rows * self.at.columns, hidden))

    def _split(self, x: Array, operand: int, heads: int) -> Array:
        """``[rows * columns, hidden]`` as ``[rows, heads, columns, hidden / heads]``."""
        shape = (self.at.rows, self.at.columns, heads, int(self._type(operand).shape[1]) // heads)
        return self.library.transpose(self.library.reshape(x, shape), (0, 2, 1, 3))

    def _type(self, operand: int) -> ValueType:
        return self.graph.type_of(self.current.inputs[operand])

    def _stored(self, name: str) -> Array:
        return self._constant(name, self.graph.constants[name].array)

    def _weight(self, name: str) -> Array:
        made = f"{name}.transposed"
        if made not in self.made:
            self.made[made] = self.library.weight(made, self.graph.constants[name].array.T)
        return self.made[made]

    def _constant(self, name: str, array: np.ndarray[Any, Any]) -> Array:
        if name not in self.made:
            self.made[name] = self.library.constant(name, array)
        return self.made[name]


INTERPRETED = frozenset(OPS) & frozenset(vars(_Run))
"""The ops of the table that have a function here: all plain ones but ``HEAD_OPS``."""


def interpret(graph: Graph, library: ArrayLibrary, at: Rectangle, observe: Observer | None = None) -> Array:
    """The last hidden state, ``[rows * columns, hidden]`` in the library's arrays.

    ``observe`` is called with every node and its value. Raises ``GraphError`` for a graph that is not plain.
    """
    run = _Run(graph, library, at)
    values: dict[str, Array] = {"token_ids": at.token_ids, "token_type_ids": at.token_type_ids}
    for node in graph.nodes:
        if node.op not in INTERPRETED:
            raise GraphError(f"node {node.name!r}: {node.op} has no function here; {sorted(INTERPRETED)} have")
        operands = [values.get(name, name) if name else None for name in node.inputs]
        values[node.outputs[0]] = run.node(node, operands)
        if observe is not None:
            observe(node, values[node.outputs[0]])
    return values[graph.outputs["last_hidden_state"]]
