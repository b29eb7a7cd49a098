"""Apache MXNet 1.9.1, its last release: encast's graph as a symbol, fused and quantised by its oneDNN backend.

It needs an environment of its own, for it works with NumPy before 1.24 alone. Its engine computes in the calling
thread (``NaiveEngine``): through its worker threads calls of one sequence took 1.1 (f32) to 2 times (int8) as long.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from encast.batch import Batch
from encast.bench.peers.base import Feeds, Shape, States
from encast.bench.peers.interpret import (
    Array,
    ArrayLibrary,
    Inputs,
    InterpretedPeer,
    Program,
    input_types,
    inputs_of,
    interpret,
)

__all__ = ["MxNet"]

_INT8 = {"calib_mode": "naive", "quantized_dtype": "auto", "quantize_mode": "smart"}
_GRANULARITY = "channel-wise"


class MxNet(InterpretedPeer):
    """bf16: its automatic mixed precision, with the weights of products narrowed once.

    int8: static, quantised as its oneDNN backend does it: ranges of activations are their extremes over
    ``ModelFiles.calibration``, weights have a scale for each channel.
    """

    name = "MXNet"
    dtypes = ("f32", "bf16", "int8")
    modules = ("mxnet",)
    requirements = ("mxnet==1.9.1", "numpy==1.23.5")
    python = "python3.11"
    variables: ClassVar = {
        "OMP_NUM_THREADS": "{threads}",
        "OPENBLAS_NUM_THREADS": "{threads}",
        "MXNET_ENGINE_TYPE": "NaiveEngine",
    }

    def start(self) -> None:
        self.mx = importlib.import_module("mxnet")
        self.arrays: dict[str, Array] = {}
        self.narrow: dict[str, Array] = {}

    def compile(self, shape: Shape) -> Program:
        mx = self.mx
        symbol, arrays = self._symbol(shape)
        if self.dtype == "bf16":
            symbol, arrays = self._narrowed(symbol, arrays)
        elif self.dtype == "int8":
            symbol, arrays, collector = self._quantised(symbol, arrays)
            collector.min_max_dict = self.ranges
            calibrate = mx.contrib.quantization.calib_graph
            symbol, arrays, _ = calibrate(symbol, arrays, {}, collector, _INT8["calib_mode"], logger=None)
            symbol = symbol.get_backend_symbol("MKLDNN_QUANTIZE")
        wanted = set(symbol.list_arguments())

        def program(inputs: Inputs) -> States:
            executor = symbol.bind(mx.cpu(), self._arguments(arrays, inputs, wanted), grad_req="null")
            return lambda: executor.forward(is_train=False)[0].asnumpy()

        return program

    def _symbol(self, shape: Shape) -> tuple[Array, dict[str, Array]]:
        """The symbol of a shape and its constants. Operators have the same names in symbols of all shapes."""
        library = _Library(self.mx, self.arrays, typed=self.dtype != "bf16")
        kinds = input_types(shape)
        given = {name: self.mx.sym.var(name, shape=size, dtype=dtype) for name, (size, dtype) in kinds.items()}
        with self.mx.name.NameManager():
            symbol = interpret(self.graph, library, shape, given)
        return symbol, {name: self.arrays[name] for name in library.used}

    def _arguments(self, arrays: Mapping[str, Array], inputs: Inputs, wanted: set[str]) -> dict[str, Array]:
        given = {name: self.mx.nd.array(array, dtype=array.dtype) for name, array in inputs.items()}
        return {name: array for name, array in {**arrays, **given}.items() if name in wanted}

    def _narrowed(self, symbol: Array, arrays: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        amp = importlib.import_module("mxnet.contrib.amp.amp")
        # Of these the conversion keeps the dtype; those of all other arguments it infers.
        integers = ["token_ids", "token_type_ids", *(name for name, array in arrays.items() if array.dtype == np.int32)]
        symbol = amp.convert_symbol(symbol, "bfloat16", data_names=integers, cast_optional_params=True)
        operands: set[str] = set()
        for node in self.graph.nodes:
            if node.op == "linear":
                operands.update((f"{node.inputs[1]}.transposed", *node.inputs[2:]))
        for name in operands & set(arrays) - set(self.narrow):
            self.narrow[name] = self.mx.nd.amp_cast(arrays[name], dtype=amp.bfloat16)
        return symbol, {**arrays, **{name: self.narrow[name] for name in operands & set(arrays)}}

    def _quantised(self, symbol: Array, arrays: dict[str, Array]) -> tuple[Array, dict[str, Array], Any]:
        """Symbol and constants in int8 without ranges yet, and what collects them by name."""
        symbol = symbol.get_backend_symbol("MKLDNN_QUANTIZE")
        quantise = self.mx.contrib.quantization.quantize_graph
        symbol, arrays, _, collector = quantise(
            symbol, arrays, {}, **_INT8, quantize_granularity=_GRANULARITY, logger=None
        )
        return symbol, arrays, collector

    def calibrate(self, texts: Sequence[Feeds]) -> Mapping[str, tuple[float, float]]:
        collector: Any = None
        for length, group in _of_few_lengths([feeds["input_ids"][0].tolist() for feeds in texts]):
            symbol, arrays = self._symbol((1, length))
            if collector is None:
                *_, collector = self._quantised(symbol, arrays)
            fused = symbol.get_backend_symbol("MKLDNN_QUANTIZE")
            given = [inputs_of(self.encoder.feeds(Batch.of([ids]))) for ids in group]
            arguments = self._arguments(arrays, given[0], set(fused.list_arguments()))
            executor = fused.bind(self.mx.cpu(), arguments, grad_req="null")
            executor.set_monitor_callback(collector.collect, monitor_all=True)
            for inputs in given:
                executor.forward(is_train=False, **self._arguments({}, inputs, set(arguments)))[0].wait_to_read()
        return {name: (float(low), float(high)) for name, (low, high) in collector.min_max_dict.items()}

    def facts(self) -> Mapping[str, Any]:
        facts: dict[str, Any] = {
            "version": self.mx.__version__,
            "threads": int(os.environ["OMP_NUM_THREADS"]),
            "engine": os.environ["MXNET_ENGINE_TYPE"],
            "backend": "MKLDNN_QUANTIZE" if self.dtype == "int8" else "MKLDNN",
        }
        if self.dtype == "int8":
            facts |= {**_INT8, "quantize_granularity": _GRANULARITY, "calibrated_on": len(self.model.calibration)}
        return facts


def _of_few_lengths(texts: Sequence[Sequence[int]]) -> Iterator[tuple[int, list[list[int]]]]:
    """The texts by length, each shortened to the next of a few lengths; its last token (the separator) stays."""
    lengths = sorted({power * part // 2 for power in (2**exponent for exponent in range(3, 16)) for part in (2, 3)})
    groups: dict[int, list[list[int]]] = {}
    for ids in texts:
        length = max((known for known in lengths if known <= len(ids)), default=len(ids))
        groups.setdefault(length, []).append([*ids[: length - 1], ids[-1]])
    yield from sorted(groups.items())


class _Library(ArrayLibrary):
    """Makes symbols; constants go to ``arrays`` once, and their names to ``used`` each time."""

    def __init__(self, mx: Any, arrays: dict[str, Array], *, typed: bool) -> None:
        """``typed``: whether f32 constants say their dtype, without which the mixed precision may choose it."""
        self.mx, self.sym, self.arrays, self.typed = mx, mx.sym, arrays, typed
        self.used: list[str] = []
        self.sizes: dict[str, int] = {}

    def constant(self, name: str, array: np.ndarray[Any, Any]) -> Array:
        self.used.append(name)
        if name not in self.arrays:
            self.arrays[name] = self.mx.nd.array(array, dtype=array.dtype)
        dtype = array.dtype if self.typed or array.dtype == np.int32 else None
        return self.sym.var(name, shape=array.shape, dtype=dtype)

    def weight(self, name: str, array: np.ndarray[Any, Any]) -> Array:
        self.sizes[name] = array.shape[1]
        return self.constant(name, array.T)

    def linear(self, x: Array, weight: Array, bias: Array | None) -> Array:
        product = self.sym.FullyConnected
        size = self.sizes[weight.name]
        if bias is None:
            return product(x, weight, num_hidden=size, no_bias=True, flatten=False)
        return product(x, weight, bias, num_hidden=size, flatten=False)

    def take(self, table: Array, ids: Array) -> Array:
        return self.sym.take(table, ids)

    def broadcast_add(self, a: Array, b: Array) -> Array:
        return self.sym.broadcast_add(a, b)

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        return self.sym.reshape(x, shape=shape)

    def transpose(self, x: Array, axes: tuple[int, ...]) -> Array:
        return self.sym.transpose(x, axes=axes)

    def matmul(self, a: Array, b: Array, *, transpose_b: bool = False) -> Array:
        # batch_dot takes three axes: -3 joins the first two, and the last reshape takes them from a.
        product = self.sym.batch_dot(
            self.sym.reshape(a, shape=(-3, -2)), self.sym.reshape(b, shape=(-3, -2)), transpose_b=transpose_b
        )
        return self.sym.reshape_like(product, a, lhs_begin=0, lhs_end=1, rhs_begin=0, rhs_end=2)

    def softmax(self, x: Array) -> Array:
        return self.sym.softmax(x, axis=-1)

    def layer_norm(self, x: Array, gamma: Array, beta: Array, eps: float) -> Array:
        return self.sym.LayerNorm(x, gamma, beta, eps=eps)

    def activation(self, x: Array, kind: str) -> Array:
        sym = self.sym
        if kind == "gelu":
            return sym.LeakyReLU(x, act_type="gelu")
        if kind == "gelu_tanh":
            return x * 0.5 * (sym.tanh((x + x * x * x * 0.044715) * math.sqrt(2.0 / math.pi)) + 1.0)
        return x * sym.sigmoid(x) if kind == "silu" else sym.Activation(x, act_type=kind)

    def positions(self, ids: Array, skip_id: int) -> Array:
        counted = ids != skip_id
        return self.sym.cumsum(counted, axis=1) * counted
