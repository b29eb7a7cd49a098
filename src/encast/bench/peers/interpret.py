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
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from encast.bench.environments import THIS_PYTHON, WORKER_NEEDS, how_to_make
from encast.bench.peers.base import Feeds, ModelFiles, PaddedPeer, Shape, States, plain_graph
from encast.errors import GraphError
from encast.ir import OPS, Graph, Node
from encast.ir.relative import relative_buckets
from encast.ir.types import ValueType

__all__ = [
    "ABSENT_OPS",
    "HEAD_OPS",
    "INTERPRETED",
    "MASKED",
    "ArrayLibrary",
    "Inputs",
    "InterpretedPeer",
    "NumpyLike",
    "Program",
    "input_types",
    "inputs_of",
    "interpret",
]

Array = Any
"""An array of the library at hand, or what it traces in place of one."""

Inputs = Mapping[str, np.ndarray[Any, Any]]
"""A batch as a rectangle, by the names, in the order and with the shapes and dtypes of ``input_types``."""

Program = Callable[[Inputs], States]
"""Takes inputs once and gives a call that computes ``f32[rows * columns, hidden]`` of them each time."""

Observer = Callable[[Node, Array], None]

MASKED = -1e9
"""Added to the scores of keys that are padding; far below every score, and finite in bf16 and f32 sums."""

HEAD_OPS = frozenset({"first_token", "select_rows", "pooling", "normalize", "concat"})
"""Plain ops that come after the hidden states, which is as far as backends are compared."""

ABSENT_OPS = frozenset(
    {
        "gated_activation", "hide_keys", "linear_bias", "local_mask", "relative_scores", "rms_norm", "rotary",
        "seen_tokens", "window_rows",
    }
)  # fmt: skip
"""Plain ops without a function here: those of DeBERTa, of the gated encoders and of ColBERT's queries, which these
backends refuse."""


class ArrayLibrary(abc.ABC):
    """The array functions that the table of ops is written in. Products are ``x @ weight`` with ``weight: [in, out]``.

    Besides these methods, arrays must offer ``+``, of vectors and matrices too, and ``*`` with a Python float.
    """

    @abc.abstractmethod
    def constant(self, name: str, array: np.ndarray[Any, Any]) -> Array:
        """An f32 or i32 array; a name means the same array in every pass over a graph, and comes once in each."""

    def weight(self, name: str, array: np.ndarray[Any, Any]) -> Array:
        """As ``constant``, for the ``f32[in, out]`` of a product."""
        return self.constant(name, array)

    def linear(self, x: Array, weight: Array, bias: Array | None) -> Array:
        """``x @ weight + bias``."""
        product = self.matmul(x, weight)
        return product if bias is None else product + bias

    @abc.abstractmethod
    def take(self, table: Array, ids: Array) -> Array:
        """Rows of ``table`` by ``ids: i32[n]``."""

    def broadcast_add(self, a: Array, b: Array) -> Array:
        """``a + b``, where axes of length 1 of ``b`` are repeated."""
        return a + b

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

    def take(self, table: Array, ids: Array) -> Array:
        return self.namespace.take(table, ids, axis=0)

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


def input_types(shape: Shape) -> dict[str, tuple[tuple[int, ...], type]]:
    """Shape and dtype of each input for (rows, columns). ``bias`` is 0 for tokens and ``MASKED`` for padding."""
    rows, columns = shape
    ids = ((rows * columns,), np.int32)
    return {"token_ids": ids, "token_type_ids": ids, "bias": ((rows, 1, 1, columns), np.float32)}


def inputs_of(feeds: Feeds) -> dict[str, np.ndarray[Any, Any]]:
    """The ``Inputs`` of a rectangle."""
    ids = feeds["input_ids"]
    rows, columns = ids.shape
    arrays = (ids, feeds.get("token_type_ids", np.zeros_like(ids)), np.where(feeds["attention_mask"] == 0, MASKED, 0.0))
    kinds = input_types((rows, columns)).items()
    return {name: array.reshape(size).astype(kind) for (name, (size, kind)), array in zip(kinds, arrays, strict=True)}


class _Run:
    """One pass over a graph: the method of an op's name computes it. Operands that are constants arrive as names."""

    def __init__(self, graph: Graph, library: ArrayLibrary, shape: Shape, bias: Array) -> None:
        self.graph, self.library, self.bias = graph, library, bias
        self.rows, self.columns = shape
        self.made: dict[str, Array] = {}

    def node(self, node: Node, operands: list[Array]) -> Array:
        self.current = node
        return getattr(self, node.op)(*operands, **node.attrs)

    def position_ids(self, token_ids: Array, *, offset: int, skip_id: int) -> Array:
        rows, columns = self.rows, self.columns
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
        array, positions = self.graph.constants[table].array, np.arange(self.columns)
        buckets = relative_buckets(positions[None, :] - positions[:, None], array.shape[0], max_distance)
        bias = np.ascontiguousarray(array[buckets].transpose(2, 0, 1)[None])
        return self.library.broadcast_add(scores, self._constant(f"{table}.{self.columns}", bias))

    def softmax(self, scores: Array) -> Array:
        return self.library.softmax(self.library.broadcast_add(scores, self.bias))

    def attention_context(self, probs: Array, v: Array) -> Array:
        heads, hidden = int(self._type(0).shape[0]), int(self._type(1).shape[1])
        mixed = self.library.matmul(probs, self._split(v, 1, heads))
        joined = self.library.transpose(mixed, (0, 2, 1, 3))
        return self.library.reshape(joined, (self.rows * self.columns, hidden))

    def _split(self, x: Array, operand: int, heads: int) -> Array:
        """``[rows * columns, hidden]`` as ``[rows, heads, columns, hidden / heads]``."""
        shape = (self.rows, self.columns, heads, int(self._type(operand).shape[1]) // heads)
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
"""The ops of the table that have a function here: all plain ones but ``HEAD_OPS`` and ``ABSENT_OPS``."""


def interpret(
    graph: Graph, library: ArrayLibrary, shape: Shape, inputs: Mapping[str, Array], observe: Observer | None = None
) -> Array:
    """The last hidden state, ``[rows * columns, hidden]``, of inputs in the library's arrays (see ``input_types``).

    ``observe`` is called with every node and its value. Raises ``GraphError`` for a graph that is not plain.
    """
    for node in graph.nodes:
        if node.op not in INTERPRETED:
            raise GraphError(f"node {node.name!r}: {node.op} has no function here; {sorted(INTERPRETED)} have")
    run = _Run(graph, library, shape, inputs["bias"])
    values = {name: inputs[name] for name in ("token_ids", "token_type_ids")}
    for node in graph.nodes:
        operands = [values.get(name, name) if name else None for name in node.inputs]
        values[node.outputs[0]] = run.node(node, operands)
        if observe is not None:
            observe(node, values[node.outputs[0]])
    return values[graph.outputs["last_hidden_state"]]


class InterpretedPeer(PaddedPeer):
    """Opens the graph and compiles a program for each shape (rows, columns) when it first occurs.

    Its packages do not go together with encast's: it has an environment of its own, named as its module.
    """

    requirements: ClassVar[tuple[str, ...]]
    """What pip installs there."""
    python: ClassVar[str] = THIS_PYTHON
    """An interpreter that all of them have wheels for."""
    needs = tuple(WORKER_NEEDS)
    any_format = True
    variables: ClassVar[Mapping[str, str]] = {}
    """Of the process's environment, read when the packages are imported; ``{threads}`` stands for their number."""
    graph: Graph
    ranges: Mapping[str, tuple[float, float]]
    """In int8: of activations by name the least and the largest number, see ``calibrate``."""

    def __init__(self, model: ModelFiles, dtype: str, threads: int, cache: Path, **options: Any) -> None:
        super().__init__(model, dtype, threads, cache, **options)
        os.environ.update({name: value.format(threads=threads) for name, value in self.variables.items()})

    @abc.abstractmethod
    def start(self) -> None:
        """Sets the library up; ``graph`` is there."""

    @abc.abstractmethod
    def compile(self, shape: Shape) -> Program:
        """The program of a shape; called once for each."""

    def calibrate(self, texts: Sequence[Feeds]) -> Mapping[str, tuple[float, float]]:
        """The ranges of activations over these texts; for those that have int8."""
        raise NotImplementedError

    @classmethod
    def how_to_install(cls, absent: Sequence[str]) -> str:
        command = how_to_make(cls.modules[0], *cls.requirements, python=cls.python)
        return f"it has an environment of its own: {command}"

    def converted(self) -> Path | None:
        """In int8 the ranges of activations; programs are made when a shape is first bound."""
        if self.dtype != "int8":
            return None
        self.open()
        return self._ranges_file

    def open(self) -> None:
        self.graph = plain_graph(self.model.checkpoint)
        self._programs: dict[Shape, Program] = {}
        self.start()
        if self.dtype == "int8":

            def make(folder: Path) -> None:
                (folder / "ranges.json").write_text(json.dumps(self.calibrate(self.calibration_feeds())))

            calibration = self.calibration_digest()
            kept = self.kept(f"{self.modules[0]}-ranges", make, self.modules, calibration=calibration)
            self._ranges_file = kept / "ranges.json"
            self.ranges = {name: (low, high) for name, (low, high) in json.loads(self._ranges_file.read_text()).items()}

    def prepare(self, feeds: Feeds) -> States:
        rows, columns = feeds["input_ids"].shape
        if (rows, columns) not in self._programs:
            self._programs[rows, columns] = self.compile((rows, columns))
        return self._programs[rows, columns](inputs_of(feeds))
