"""Relax and ONNX as far as encast's graph needs them, each op computed with NumPy by its documentation.

What is built is checked like the real libraries check it: element types of two operands must be equal, and parameters
must have the shapes that were declared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_erf = np.vectorize(math.erf, otypes=[np.float32])


def equal_types(a: Array, b: Array) -> None:
    assert a.dtype == b.dtype, f"operands are {a.dtype} and {b.dtype}"


def softmax(x: Array, axis: int) -> Array:
    powers = np.exp(x - x.max(axis, keepdims=True))
    return np.asarray(powers / powers.sum(axis, keepdims=True))


class RelaxExpr:
    """What an op makes: a value once the parameters have theirs."""

    def __init__(self, value: Callable[[Mapping[str, Array]], Array]) -> None:
        self._value = value

    def value(self, parameters: Mapping[str, Array]) -> Array:
        return self._value(parameters)


class RelaxVar(RelaxExpr):
    """A parameter, whose value must be of the declared type, or what the builder has emitted, computed once."""

    def __init__(self, name: str, kind: tuple[list[int], str]) -> None:
        self.name, self.kind = name, kind
        super().__init__(self._look_up)

    def _look_up(self, parameters: Mapping[str, Array]) -> Array:
        found = parameters[self.name]
        assert (list(found.shape), str(found.dtype)) == self.kind, self.name
        return found


class Builder:
    """``relax.BlockBuilder``: emits in order."""

    def emit(self, expr: RelaxExpr) -> RelaxExpr:
        kept: list[Array] = []

        def once(parameters: Mapping[str, Array]) -> Array:
            if not kept:
                kept.append(expr.value(parameters))
            return kept[0]

        return RelaxExpr(once)


def fake_relax() -> Any:
    """The namespace ``tvm.relax``."""

    def op(compute: Callable[..., Array]) -> Callable[..., RelaxExpr]:
        def make(*operands: Any, **attributes: Any) -> RelaxExpr:
            def value(parameters: Mapping[str, Array]) -> Array:
                given = [one.value(parameters) if isinstance(one, RelaxExpr) else one for one in operands]
                return compute(*given, **attributes)

            return RelaxExpr(value)

        return make

    def typed(compute: Callable[[Array, Array], Any]) -> Callable[[Array, Array], Array]:
        def checked(a: Array, b: Array) -> Array:
            equal_types(a, b)
            return np.asarray(compute(a, b))

        return checked

    def take(x: Array, indices: Array, *, axis: int, mode: str) -> Array:
        assert mode == "clip"
        return np.take(x, indices, axis, mode="clip")

    def layer_norm(x: Array, gamma: Array, beta: Array, *, axes: int, epsilon: float) -> Array:
        centred = x - x.mean(axes, keepdims=True)
        return np.asarray(centred / np.sqrt((centred * centred).mean(axes, keepdims=True) + epsilon) * gamma + beta)

    nn = {
        "softmax": lambda x, *, axis: softmax(x, axis),
        "layer_norm": layer_norm,
        "relu": lambda x: np.maximum(x, 0),
        "silu": lambda x: x / (1 + np.exp(-x)),
        "gelu_tanh": lambda x: x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    }
    ops: dict[str, Callable[..., Any]] = {
        "add": typed(np.add),
        "multiply": typed(np.multiply),
        "matmul": typed(np.matmul),
        "not_equal": typed(np.not_equal),
        "take": take,
        "reshape": np.reshape,
        "permute_dims": np.transpose,
        "erf": _erf,
        "tanh": np.tanh,
        "astype": lambda x, dtype: x.astype(dtype),
        "cumsum": lambda x, *, axis, dtype: np.cumsum(x, axis, dtype=dtype),
    }
    return SimpleNamespace(
        Var=RelaxVar,
        TensorType=lambda shape, dtype: (list(shape), dtype),
        const=lambda value, dtype: RelaxExpr(lambda parameters: np.asarray(value, dtype)),
        op=SimpleNamespace(
            **{name: op(compute) for name, compute in ops.items()},
            nn=SimpleNamespace(**{name: op(compute) for name, compute in nn.items()}),
        ),
    )


class FakeOnnx(ModuleType):
    """The module ``onnx``; ``saved`` is the model of the last ``save``."""

    def __init__(self) -> None:
        super().__init__("onnx")
        self.saved: Any = None
        self.TensorProto = SimpleNamespace(FLOAT=np.float32, INT64=np.int64)
        self.numpy_helper = SimpleNamespace(from_array=lambda array, name: (name, array))
        self.helper = SimpleNamespace(
            make_tensor_value_info=lambda name, kind, shape: SimpleNamespace(name=name, kind=kind, shape=list(shape)),
            make_node=lambda kind, inputs, outputs, name, **attributes: SimpleNamespace(
                op_type=kind, input=inputs, output=outputs, attributes=attributes
            ),
            make_graph=lambda nodes, name, inputs, outputs, stored: SimpleNamespace(
                node=nodes, input=inputs, output=outputs, initializer=stored
            ),
            make_opsetid=lambda domain, version: (domain, version),
            make_model=lambda graph, opset_imports: SimpleNamespace(graph=graph, opsets=opset_imports),
        )

    def save(self, model: Any, file: str) -> None:
        self.saved = model


def _quantize(x: Array, scale: Array, zero: Array) -> Array:
    return np.clip(np.rint(x / scale) + zero, 0, 255).astype(zero.dtype)


def _product_of_integers(a: Array, b: Array, a_zero: Array, b_zero: Array) -> Array:
    assert (a.dtype, a_zero.dtype, b.dtype, b_zero.dtype) == (np.uint8, np.uint8, np.int8, np.int8)
    return (a.astype(np.int32) - a_zero.astype(np.int32)) @ (b.astype(np.int32) - b_zero.astype(np.int32))


_ONNX: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Pow": np.power,
    "MatMul": np.matmul,
    "Equal": np.equal,
    "Not": np.logical_not,
    "Sqrt": np.sqrt,
    "Tanh": np.tanh,
    "Erf": _erf,
    "Relu": lambda x: np.maximum(x, 0),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Cast": lambda x, to: x.astype(to),
    "Gather": lambda x, ids, axis: np.take(x, ids, axis),
    "Reshape": lambda x, shape: x.reshape(shape),
    "Transpose": lambda x, perm: x.transpose(perm),
    "Softmax": lambda x, axis: softmax(x, axis),
    "ReduceMean": lambda x, axes: x.mean(tuple(axes), keepdims=True),
    "CumSum": lambda x, axis: np.cumsum(x, int(axis), dtype=x.dtype),
    "QuantizeLinear": _quantize,
    "MatMulInteger": _product_of_integers,
}
_SAME_TYPES = ("Add", "Sub", "Mul", "Div", "Pow", "MatMul", "Equal")


def run_onnx(model: Any, feeds: Mapping[str, Array]) -> Array:
    """The one output of a model of ``FakeOnnx``, its nodes taken in the order of the file."""
    graph = model.graph
    values: dict[str, Array] = dict(graph.initializer)
    for declared in graph.input:
        given = feeds[declared.name]
        assert (list(given.shape), given.dtype) == (declared.shape, declared.kind), declared.name
        values[declared.name] = given
    for node in graph.node:
        given = [values[name] for name in node.input]
        if node.op_type in _SAME_TYPES:
            equal_types(*given)
        values[node.output[0]] = np.asarray(_ONNX[node.op_type](*given, **node.attributes))
    (out,) = graph.output
    found = values[out.name]
    assert (list(found.shape), found.dtype) == (out.shape, out.kind)
    return found
