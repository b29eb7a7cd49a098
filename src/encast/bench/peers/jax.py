"""JAX with XLA: encast's graph through jax.numpy, compiled ahead of time for each shape.

XLA's defaults were the fastest of what its CPU compiler offers (oneDNN and XNNPACK calls, YNNPACK fusions, 512-bit
vectors, fast math, merged projections of queries, keys and values: within the noise or slower).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from encast.bench.peers.base import Shape, States
from encast.bench.peers.interpret import Array, Inputs, InterpretedPeer, NumpyLike, Program, input_types, interpret

__all__ = ["Jax"]


class Jax(InterpretedPeer):
    """bf16: the operands of every product are bf16; its sums, norms and softmax are f32."""

    name = "JAX with XLA"
    dtypes = ("f32", "bf16")
    modules = ("jax",)
    requirements = ("jax==0.10.2",)
    # The first two size the one pool that XLA's client computes on.
    variables: ClassVar = {"PJRT_NPROC": "{threads}", "NPROC": "{threads}", "JAX_PLATFORMS": "cpu"}

    def start(self) -> None:
        self.jax = importlib.import_module("jax")
        self.weights: dict[str, Array] = {}

    def compile(self, shape: Shape) -> Program:
        jax = self.jax

        def forward(library: _Library, given: Mapping[str, Array]) -> Array:
            return interpret(self.graph, library, shape, given)

        spec = {name: jax.ShapeDtypeStruct(*kind) for name, kind in input_types(shape).items()}
        # Weights are arguments: as constants of the program each shape would hold a copy of them.
        narrow = self.dtype == "bf16"
        stored: dict[str, Array] = {}
        jax.eval_shape(lambda given: forward(_Library(jax, narrow, stored, keep=True), given), spec)
        self.weights.update({name: jax.device_put(stored[name]) for name in stored if name not in self.weights})
        weights = {name: self.weights[name] for name in stored}
        traced = jax.jit(lambda weights, given: forward(_Library(jax, narrow, weights), given))
        compiled = traced.lower(weights, spec).compile()

        def program(inputs: Inputs) -> States:
            given = jax.device_put(dict(inputs))
            return lambda: np.asarray(compiled(weights, given))

        return program

    def facts(self) -> Mapping[str, Any]:
        return {
            "version": self.jax.__version__,
            "devices": [str(device) for device in self.jax.devices()],
            "threads": self.threads,
            "inputs": "on the device before the call",
        }


class _Library(NumpyLike):
    """Takes constants from ``weights`` or, with ``keep``, puts them there."""

    def __init__(self, jax: Any, narrow: bool, weights: dict[str, Array], *, keep: bool = False) -> None:
        super().__init__(jax.numpy)
        self.jax, self.narrow, self.weights, self.keep = jax, narrow, weights, keep

    def constant(self, name: str, array: np.ndarray[Any, Any]) -> Array:
        if self.keep:
            self.weights[name] = array
        return self.weights[name]

    def weight(self, name: str, array: np.ndarray[Any, Any]) -> Array:
        return self.constant(name, array.astype(self.jax.numpy.bfloat16) if self.keep and self.narrow else array)

    def matmul(self, a: Array, b: Array, *, transpose_b: bool = False) -> Array:
        b = self.namespace.swapaxes(b, -1, -2) if transpose_b else b
        if not self.narrow:
            return self.namespace.matmul(a, b)
        narrow = self.namespace.bfloat16
        return self.namespace.matmul(a.astype(narrow), b.astype(narrow), preferred_element_type=np.float32)

    def erf(self, x: Array) -> Array:
        return self.jax.lax.erf(x)
