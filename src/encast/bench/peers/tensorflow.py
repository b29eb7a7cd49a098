"""TensorFlow: encast's graph as a ``tf.function`` of a fixed shape, run by its own kernels (oneDNN) or through XLA.

What is written here is what was fastest: weights captured (as constants of the graph they cost half a minute of
constant folding and gain nothing), ``batch_normalization`` as the form of a norm that its optimiser fuses, and in
bf16 the whole stream of activations in bf16 for its own kernels, but f32 sums and norms for XLA. Its automatic mixed
precision was 1.1 to 1.8 times slower than that.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from encast.bench.peers.base import Shape, States
from encast.bench.peers.interpret import Array, ArrayLibrary, Inputs, InterpretedPeer, Program, input_types, interpret

__all__ = ["TensorFlow", "TensorFlowXla"]


class TensorFlow(InterpretedPeer):
    """The graph executor. bf16: all activations are bf16; norms and softmax sum in f32."""

    name = "TensorFlow graph"
    dtypes = ("f32", "bf16")
    modules = ("tensorflow",)
    requirements = ("tensorflow-cpu==2.21.0",)
    # NPROC sizes the pools of XLA's compiler.
    variables: ClassVar = {
        "TF_NUM_INTRAOP_THREADS": "{threads}",
        "TF_NUM_INTEROP_THREADS": "1",
        "OMP_NUM_THREADS": "{threads}",
        "NPROC": "{threads}",
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    xla: ClassVar[bool] = False

    def start(self) -> None:
        self.tf = importlib.import_module("tensorflow")
        self.tf.config.threading.set_intra_op_parallelism_threads(self.threads)
        self.tf.config.threading.set_inter_op_parallelism_threads(1)
        self.library = (_XlaLibrary if self.xla else _Library)(self.tf, narrow=self.dtype == "bf16")

    def compile(self, shape: Shape) -> Program:
        tf, library = self.tf, self.library

        def forward(*given: Array) -> Array:
            return tf.cast(interpret(self.graph, library, shape, dict(zip(spec, given, strict=True))), tf.float32)

        spec = {name: tf.TensorSpec(*kind) for name, kind in input_types(shape).items()}
        spec["bias"] = tf.TensorSpec(spec["bias"].shape, library.stream)
        concrete = tf.function(forward, jit_compile=self.xla).get_concrete_function(*spec.values())

        def program(inputs: Inputs) -> States:
            given = [tf.cast(array, spec[name].dtype) for name, array in inputs.items()]
            return lambda: concrete(*given).numpy()

        return program

    def facts(self) -> Mapping[str, Any]:
        threading = self.tf.config.threading
        return {
            "version": self.tf.__version__,
            "xla": self.xla,
            "onednn": os.environ.get("TF_ENABLE_ONEDNN_OPTS", "default"),
            "intra_op_threads": threading.get_intra_op_parallelism_threads(),
            "inter_op_threads": threading.get_inter_op_parallelism_threads(),
            "inputs": "tensors made before the call",
        }


class TensorFlowXla(TensorFlow):
    """``jit_compile``. bf16: the operands of every product are bf16; its sums, norms and softmax are f32."""

    name = "TensorFlow with XLA"
    xla = True


class _Library(ArrayLibrary):
    """``products`` is the dtype of the operands of products, ``stream`` that of activations."""

    def __init__(self, tf: Any, *, narrow: bool) -> None:
        self.tf = tf
        self.products = tf.bfloat16 if narrow else tf.float32
        self.stream = self.products
        self.made: dict[str, Array] = {}

    def constant(self, name: str, array: np.ndarray[Any, Any]) -> Array:
        return self._made(name, array, self.stream)

    def weight(self, name: str, array: np.ndarray[Any, Any]) -> Array:
        return self._made(name, array, self.products)

    def _made(self, name: str, array: np.ndarray[Any, Any], dtype: Any) -> Array:
        if name not in self.made:
            with self.tf.init_scope():  # outside of the trace, so that all shapes share it
                made = self.tf.constant(array)
                self.made[name] = self.tf.cast(made, dtype) if made.dtype == self.tf.float32 else made
        return self.made[name]

    def linear(self, x: Array, weight: Array, bias: Array | None) -> Array:
        product = self.matmul(x, weight)
        return product if bias is None else self.tf.nn.bias_add(product, bias)

    def take(self, table: Array, ids: Array) -> Array:
        return self.tf.gather(table, ids)

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        return self.tf.reshape(x, shape)

    def transpose(self, x: Array, axes: tuple[int, ...]) -> Array:
        return self.tf.transpose(x, axes)

    def matmul(self, a: Array, b: Array, *, transpose_b: bool = False) -> Array:
        return self.tf.matmul(a, b, transpose_b=transpose_b)

    def softmax(self, x: Array) -> Array:
        return self.tf.nn.softmax(x)

    def layer_norm(self, x: Array, gamma: Array, beta: Array, eps: float) -> Array:
        wide, cast = self.tf.float32, self.tf.cast
        mean, variance = self.tf.nn.moments(cast(x, wide), -1, keepdims=True)
        beta, gamma = cast(beta, wide), cast(gamma, wide)
        normed = self.tf.nn.batch_normalization(cast(x, wide), mean, variance, beta, gamma, eps)
        return cast(normed, self.stream)

    def activation(self, x: Array, kind: str) -> Array:
        nn = self.tf.nn
        if kind in ("gelu", "gelu_tanh"):
            return nn.gelu(x, approximate=kind == "gelu_tanh")
        return {"relu": nn.relu, "silu": nn.silu, "tanh": nn.tanh}[kind](x)

    def positions(self, ids: Array, skip_id: int) -> Array:
        counted = self.tf.cast(self.tf.not_equal(ids, skip_id), ids.dtype)
        return self.tf.cumsum(counted, axis=1) * counted


class _XlaLibrary(_Library):
    def __init__(self, tf: Any, *, narrow: bool) -> None:
        super().__init__(tf, narrow=narrow)
        self.stream = tf.float32

    def matmul(self, a: Array, b: Array, *, transpose_b: bool = False) -> Array:
        a, b = self.tf.cast(a, self.products), self.tf.cast(b, self.products)
        return self.tf.matmul(a, b, transpose_b=transpose_b, output_type=self.stream)
