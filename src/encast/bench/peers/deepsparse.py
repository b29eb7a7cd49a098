"""DeepSparse 1.8: encast's graph written as ONNX, compiled for each shape, in f32 and static int8.

The ONNX is what DeepSparse runs best: decomposed norms and GELU, integer products. In int8 a product with weights is
``QuantizeLinear -> MatMulInteger -> Add (i32 bias) -> Cast -> Mul``, all of which it computes as one; graphs of
QuantizeLinear and DequantizeLinear pairs, as ONNX Runtime writes them, it computes in f32. Products inside attention
stay f32: as ``QLinearMatMul`` they gained nothing that could be told from noise.

It finds zeros in weights itself, in f32 and int8. Whether it computes the integer products with kernels of its own is
read off its analysis before anything is timed; where it does not, there is no int8 row.

It needs an environment of its own, for it takes NumPy before 2 and an old ONNX alone.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from encast.bench.peers.base import Feeds, Shape, States
from encast.bench.peers.interpret import (
    Array,
    ArrayLibrary,
    Inputs,
    InterpretedPeer,
    NumpyLike,
    Program,
    input_types,
    inputs_of,
    interpret,
)
from encast.errors import ResourceError
from encast.ir import Graph, Node

__all__ = ["DeepSparse", "Ranges", "calibrate", "kernels_of", "write"]

Ranges = Mapping[str, tuple[float, float]]
"""The least and the largest number in a value of the graph, by the value's name."""

_OPSET = 13

_PRODUCT = "MatMulInteger"
_ANALYSED_TOKENS = 128
_FALLBACK = "Naive Subgraph"
"""A layer of its analysis that is no kernel of its own."""


class DeepSparse(InterpretedPeer):
    """int8: the products with weights. Activations have the extremes over ``ModelFiles.calibration`` as range."""

    name = "DeepSparse"
    dtypes = ("f32", "int8")
    modules = ("deepsparse",)
    requirements = ("deepsparse==1.8.0",)
    python = "python3.11"
    variables: ClassVar = {"NM_DISABLE_ANALYTICS": "1", "OMP_NUM_THREADS": "{threads}"}

    def start(self) -> None:
        self._deepsparse: Any = importlib.import_module("deepsparse")
        self._engines: dict[Shape, Any] = {}

    def calibrate(self, texts: Sequence[Feeds]) -> Ranges:
        return calibrate(self.graph, texts)

    def converted(self) -> Path:
        """Which kernels the engine chooses. Raises ``ResourceError`` where int8 would be computed as f32."""
        self.open()
        file = self._kernels()
        found = json.loads(file.read_text())
        if self.dtype == "int8" and found["integer_products"] < found["of"]:
            raise ResourceError(
                f"DeepSparse computes {found['integer_products']} of {found['of']} integer products with kernels of "
                "its own on this processor, and the others as f32; take deepsparse-f32"
            )
        return file

    def _kernels(self) -> Path:
        """With the threads of the process that converts; the timed ones find it and analyse nothing."""

        def make(folder: Path) -> None:
            shape = (1, min(_ANALYSED_TOKENS, self.encoder.max_len))
            with tempfile.TemporaryDirectory(prefix="encast-deepsparse-") as place:
                file = Path(place) / "model.onnx"
                products = write(file, self.graph, shape, self.ranges if self.dtype == "int8" else None)
                inputs = inputs_of(self.encoder.example(*shape))
                names = self._deepsparse.Engine(str(file), batch_size=None, num_cores=self.threads).input_names
                given = [_wide(inputs[name]) for name in input_types(shape) if name in names]
                seen = self._deepsparse.model_debug_analysis(
                    str(file),
                    given,
                    batch_size=None,
                    num_cores=self.threads,
                    num_iterations=1,
                    num_warmup_iterations=1,
                )
            (folder / "kernels.json").write_text(json.dumps(kernels_of(seen["layer_info"], products)))

        processor = self._deepsparse.cpu.cpu_architecture()
        settings = {
            "dtype": self.dtype,
            "processor": [processor.isa, processor.vnni],
            "calibration": self.calibration_digest() if self.dtype == "int8" else None,
        }
        return self.kept("deepsparse-kernels", make, self.modules, **settings) / "kernels.json"

    def compile(self, shape: Shape) -> Program:
        with tempfile.TemporaryDirectory(prefix="encast-deepsparse-") as folder:
            file = Path(folder) / "model.onnx"
            write(file, self.graph, shape, self.ranges if self.dtype == "int8" else None)
            # Without batch_size the shapes of the file stay: token ids are one axis of rows and columns.
            engine = self._deepsparse.Engine(str(file), batch_size=None, num_cores=self.threads)
        self._engines[shape] = engine
        names = [name for name in input_types(shape) if name in engine.input_names]

        def program(inputs: Inputs) -> States:
            given = [_wide(inputs[name]) for name in names]
            return lambda: engine.run(given, val_inp=False)[0]

        return program

    def facts(self) -> Mapping[str, Any]:
        facts: dict[str, Any] = {
            "version": self._deepsparse.__version__,
            "num_cores": self.threads,
            "supported_ops": min((engine.fraction_of_supported_ops for engine in self._engines.values()), default=None),
        }
        found = json.loads(self._kernels().read_text())
        facts["kernels"] = found["kernels"]
        if self.dtype == "int8":
            facts |= {
                "int8": "products with weights, static",
                "integer_products": f"{found['integer_products']} of {found['of']}",
                "calibrated_on": len(self.model.calibration),
            }
        return facts


def kernels_of(layers: Sequence[Mapping[str, Any]], products: int) -> dict[str, Any]:
    """What an analysis says of an engine: ``layer_info`` of its report, and the integer products that the graph has.

    ``kernels``: how many layers have which kernel (``ks_...`` are for sparse weights, ``..._q`` for quantised ones;
    ``pyramid`` fuses several nodes); ``integer_products`` of ``of`` are computed by one of them.
    """
    own = [layer for layer in layers if not str(layer["name"]).startswith(_FALLBACK)]
    kernels = Counter(re.sub(r"(-[0-9.]+%)?_[0-9]+$", "", str(layer["name"])) for layer in own)
    nodes = [node.strip() for layer in own for node in str(layer["canonical_name"]).split(",")]
    integer = sum(node.startswith(f"{_PRODUCT}.") for node in nodes)
    return {"kernels": dict(sorted(kernels.items())), "integer_products": integer, "of": products}


def write(file: Path, graph: Graph, shape: Shape, ranges: Ranges | None = None) -> int:
    """An ONNX model of that shape (rows, columns); in int8 with ``ranges`` of the activations (``calibrate``). Returns
    how many integer products it has.

    Ids are i64 there, as exporters leave them. Inputs that the model does not read are left out.
    """
    onnx: Any = importlib.import_module("onnx")
    writer = _Writer(onnx, graph, ranges)
    kinds = input_types(shape)
    out = interpret(graph, writer, shape, {name: _Value(writer, name) for name in kinds}, writer.follow)
    tensor, element = onnx.helper.make_tensor_value_info, onnx.TensorProto
    read = {name for node in writer.nodes for name in node.input}
    inputs = [
        tensor(name, element.FLOAT if dtype is np.float32 else element.INT64, list(size))
        for name, (size, dtype) in kinds.items()
        if name in read
    ]
    outputs = [tensor(out.name, element.FLOAT, [*kinds["token_ids"][0], graph.meta.hidden])]
    stored = [onnx.numpy_helper.from_array(array, name) for name, array in writer.arrays.items() if name in read]
    whole = onnx.helper.make_graph(writer.nodes, "encoder", inputs, outputs, stored)
    model = onnx.helper.make_model(whole, opset_imports=[onnx.helper.make_opsetid("", _OPSET)])
    model.ir_version = 7  # of opset 13
    onnx.save(model, str(file))
    return sum(node.op_type == _PRODUCT for node in writer.nodes)


def calibrate(graph: Graph, texts: Sequence[Feeds]) -> Ranges:
    """The ranges of activations over texts without padding, computed with NumPy in f32."""
    ranges: dict[str, tuple[float, float]] = {}

    def see(node: Node, value: np.ndarray[Any, Any]) -> None:
        if value.dtype == np.float32:
            low, high = ranges.get(node.outputs[0], (0.0, 0.0))
            ranges[node.outputs[0]] = (min(low, float(value.min())), max(high, float(value.max())))

    for feeds in texts:
        interpret(graph, NumpyLike(), (1, feeds["input_ids"].size), inputs_of(feeds), see)
    return ranges


def _wide(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.astype(np.int64) if array.dtype == np.int32 else array


@dataclass(frozen=True)
class _Value:
    """A value of the ONNX graph."""

    writer: _Writer
    name: str

    def __add__(self, other: _Value) -> _Value:
        return self.writer.node("Add", self, other)

    def __mul__(self, factor: float) -> _Value:
        return self.writer.node("Mul", self, self.writer.number(np.float32(factor)))


@dataclass(frozen=True)
class _Quantized:
    """Unsigned ``bytes`` that stand for ``step * (byte - zero)``."""

    bytes: _Value
    zero: _Value
    step: np.float32


class _Writer(ArrayLibrary):
    """Appends nodes; f32 throughout without ``ranges``, else with the products in int8."""

    def __init__(self, onnx: Any, graph: Graph, ranges: Ranges | None) -> None:
        self.onnx, self.graph, self.ranges = onnx, graph, ranges
        self.nodes: list[Any] = []
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}
        self._of: dict[str, tuple[float, float]] = {}
        self._quantized: dict[str, _Quantized] = {}

    def follow(self, node: Node, value: Array) -> None:
        """Notes the range of a value that the table of ops has just made."""
        if self.ranges is not None and node.outputs[0] in self.ranges:
            self._of[value.name] = self.ranges[node.outputs[0]]

    def node(self, kind: str, *operands: _Value, **attributes: Any) -> _Value:
        name = f"{kind}.{len(self.nodes)}"
        made = self.onnx.helper.make_node(kind, [value.name for value in operands], [name], name=name, **attributes)
        self.nodes.append(made)
        return _Value(self, name)

    def number(self, array: Any) -> _Value:
        return self._store(f"number.{len(self.arrays)}", np.asarray(array))

    def _store(self, name: str, array: np.ndarray[Any, Any]) -> _Value:
        self.arrays[name] = np.ascontiguousarray(array) if array.ndim else array
        return _Value(self, name)

    def constant(self, name: str, array: np.ndarray[Any, Any]) -> Array:
        return self._store(name, _wide(array))

    def linear(self, x: Array, weight: Array, bias: Array | None) -> Array:
        if self.ranges is None or x.name not in self._of:
            product = self.node("MatMul", x, weight)
            return product if bias is None else product + bias
        given, array = self._quantize(x), self.arrays[weight.name]
        step = np.float32(max(float(np.abs(array).max()), 1e-30) / 127)
        codes = np.clip(np.rint(array / step), -127, 127).astype(np.int8)
        stored = self._store(f"{weight.name}.int8", codes)
        sums = self.node(_PRODUCT, given.bytes, stored, given.zero, self.number(np.int8(0)))
        scale = np.float32(given.step * step)
        if bias is not None:
            sums = sums + self.number(np.rint(self.arrays[bias.name] / scale).astype(np.int32))
        wide = self.node("Cast", sums, to=self.onnx.TensorProto.FLOAT)
        return wide * float(scale)

    def _quantize(self, x: _Value) -> _Quantized:
        """Once for each value: queries, keys and values read one."""
        if x.name not in self._quantized:
            low, high = self._of[x.name]
            step = np.float32(max(high - low, 1e-30) / 255)
            zero = self.number(np.uint8(np.clip(np.rint(-low / step), 0, 255)))
            made = self.node("QuantizeLinear", x, self.number(step), zero)
            self._quantized[x.name] = _Quantized(made, zero, step)
        return self._quantized[x.name]

    def take(self, table: Array, ids: Array) -> Array:
        return self.node("Gather", table, ids, axis=0)

    def reshape(self, x: Array, shape: tuple[int, ...]) -> Array:
        return self.node("Reshape", x, self.number(np.array(shape, np.int64)))

    def transpose(self, x: Array, axes: tuple[int, ...]) -> Array:
        return self.node("Transpose", x, perm=list(axes))

    def matmul(self, a: Array, b: Array, *, transpose_b: bool = False) -> Array:
        return self.node("MatMul", a, self.transpose(b, (0, 1, 3, 2)) if transpose_b else b)

    def softmax(self, x: Array) -> Array:
        return self.node("Softmax", x, axis=-1)

    def layer_norm(self, x: Array, gamma: Array, beta: Array, eps: float) -> Array:
        centred = self.node("Sub", x, self.node("ReduceMean", x, axes=[-1]))
        square = self.node("Pow", centred, self.number(np.float32(2)))
        variance = self.node("ReduceMean", square, axes=[-1]) + self.number(np.float32(eps))
        normed = self.node("Div", centred, self.node("Sqrt", variance))
        return self.node("Mul", normed, gamma) + beta

    def activation(self, x: Array, kind: str) -> Array:
        if kind == "gelu":
            inner = self.node("Erf", self.node("Div", x, self.number(np.float32(math.sqrt(2.0)))))
        elif kind == "gelu_tanh":
            cube = self.node("Mul", self.node("Mul", x, x), x)
            inner = self.node("Tanh", (x + cube * 0.044715) * math.sqrt(2.0 / math.pi))
        elif kind == "silu":
            return self.node("Mul", x, self.node("Sigmoid", x))
        else:
            return self.node({"relu": "Relu", "tanh": "Tanh"}[kind], x)
        return self.node("Mul", x, inner + self.number(np.float32(1))) * 0.5

    def positions(self, ids: Array, skip_id: int) -> Array:
        same = self.node("Equal", ids, self.number(np.int64(skip_id)))
        counted = self.node("Cast", self.node("Not", same), to=self.onnx.TensorProto.INT64)
        return self.node("Mul", self.node("CumSum", counted, self.number(np.int64(1))), counted)
