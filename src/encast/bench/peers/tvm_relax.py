"""Encast's graph in TVM's Relax, by its block builder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from encast.bench.peers.interpret import Array, ArrayLibrary
from encast.bench.peers.transformer import Shape

__all__ = ["INPUTS", "RelaxLibrary"]

INPUTS = ("token_ids", "token_type_ids", "bias")
"""Parameters of the function that come before its weights."""


@dataclass(frozen=True)
class _Value:
    """A value of the function; ``expr`` is Relax's variable."""

    library: RelaxLibrary
    expr: Any

    def __add__(self, other: _Value) -> _Value:
        return self.library.emit("add", self, other)

    def __mul__(self, factor: float) -> _Value:
        return self.library.emit("multiply", self, self.library.number(np.float32(factor)))


class RelaxLibrary(ArrayLibrary):
    """Emits into the dataflow block that ``builder`` is in. Constants become parameters, by name and in order.

    As parameters they keep out of the program's text, and TVM may change their layout once, when they are given.
    """

    def __init__(self, relax: Any, builder: Any) -> None:
        self.relax, self.builder = relax, builder
        self.parameters: dict[str, _Value] = {}
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}

    def inputs(self, shape: Shape) -> dict[str, _Value]:
        rows, columns = shape
        ids = [rows * columns]
        kinds = {
            "token_ids": (ids, "int32"),
            "token_type_ids": (ids, "int32"),
            "bias": ([rows, 1, 1, columns], "float32"),
        }
        return {name: self._parameter(name, *kinds[name]) for name in INPUTS}

    def _parameter(self, name: str, shape: Any, dtype: str) -> _Value:
        return _Value(self, self.relax.Var(name, self.relax.TensorType(shape, dtype)))

    def emit(self, op: str, *operands: Any, **attributes: Any) -> _Value:
        """Relax's function of that name below ``relax.op``."""
        function = self.relax.op
        for part in op.split("."):
            function = getattr(function, part)
        given = [operand.expr if isinstance(operand, _Value) else operand for operand in operands]
        return _Value(self, self.builder.emit(function(*given, **attributes)))

    def number(self, value: Any) -> _Value:
        return _Value(self, self.relax.const(value, str(np.asarray(value).dtype)))

    def constant(self, name: str, array: np.ndarray[Any, Any]) -> Array:
        if name not in self.parameters:
            self.arrays[name] = array
            self.parameters[name] = self._parameter(
                f"weight{len(self.parameters)}", list(array.shape), str(array.dtype)
            )
        return self.parameters[name]

    def weight(self, name: str, array: np.ndarray[Any, Any]) -> Array:
        return self.constant(name, array)

    def linear(self, x: Array, weight: Array, bias: Array | None) -> Array:
        product = self.emit("matmul", x, weight)
        return product if bias is None else self.emit("add", product, bias)

    def take(self, table: Array, ids: Array) -> Array:
        return self.emit("take", table, ids, axis=0, mode="clip")

    def broadcast_add(self, a: Array, b: Array) -> Array:
        return self.emit("add", a, b)

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        return self.emit("reshape", x, shape)

    def transpose(self, x: Array, axes: tuple[int, ...]) -> Array:
        return self.emit("permute_dims", x, list(axes))

    def matmul(self, a: Array, b: Array, *, transpose_b: bool = False) -> Array:
        return self.emit("matmul", a, self.transpose(b, (0, 1, 3, 2)) if transpose_b else b)

    def softmax(self, x: Array) -> Array:
        return self.emit("nn.softmax", x, axis=-1)

    def layer_norm(self, x: Array, gamma: Array, beta: Array, eps: float) -> Array:
        return self.emit("nn.layer_norm", x, gamma, beta, axes=-1, epsilon=eps)

    def activation(self, x: Array, kind: str) -> Array:
        if kind == "gelu":  # by its parts, of which the quick form of erf is known
            half = self.emit("erf", x * float(np.sqrt(0.5))) + self.number(np.float32(1))
            return self.emit("multiply", x * 0.5, half)
        return self.emit({"relu": "nn.relu", "silu": "nn.silu", "tanh": "tanh", "gelu_tanh": "nn.gelu_tanh"}[kind], x)

    def positions(self, ids: Array, skip_id: int) -> Array:
        counted = self.emit("astype", self.emit("not_equal", ids, self.number(np.int32(skip_id))), "int32")
        return self.emit("multiply", self.emit("cumsum", counted, axis=1, dtype="int32"), counted)
