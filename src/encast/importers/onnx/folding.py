"""Ops on known arrays: shape arithmetic, masks, ids and weights, as the ONNX operators say, with NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers.onnx.model import OnnxNode
from encast.importers.onnx.tensors import OnnxTensor, narrowed

__all__ = ["LIMIT", "axes_of", "fold", "index_slices", "place_of", "resolve_shape"]

LIMIT = 1 << 25
"""Elements of an array that is computed; weights are views of the file and do not count."""

Array = np.ndarray[Any, Any]

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Pow": np.power,
    "Max": np.maximum,
    "Min": np.minimum,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Xor": np.logical_xor,
    "Equal": np.equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Mod": np.mod,
}
_UNARY: dict[str, Callable[[Any], Any]] = {
    "Not": np.logical_not,
    "Neg": np.negative,
    "Abs": np.abs,
    "Sqrt": np.sqrt,
    "Log": np.log,
    "Exp": np.exp,
    "Reciprocal": lambda x: 1 / x,
    "IsNaN": np.isnan,
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Sign": np.sign,
    "Cos": np.cos,
    "Sin": np.sin,
    "Identity": lambda x: x,
}
_REDUCE: dict[str, Callable[..., Any]] = {
    "ReduceSum": np.sum,
    "ReduceMax": np.max,
    "ReduceMin": np.min,
    "ReduceMean": np.mean,
    "ReduceProd": np.prod,
}


def fold(node: OnnxNode, inputs: Sequence[Array | None], opset: int) -> list[Array] | None:
    """The outputs of a node of known inputs; None if the op is not among those that are folded.

    Raises ``CheckpointError`` for shapes that do not fit, ``UnsupportedModelError`` for results beyond ``LIMIT``.
    """
    try:
        with np.errstate(all="ignore"):
            return _fold(node, inputs, opset)
    except (
        ValueError,
        IndexError,
        TypeError,
        OverflowError,
        KeyError,
        AttributeError,
        ZeroDivisionError,
        MemoryError,
    ) as error:
        shapes = [None if one is None else list(one.shape) for one in inputs]
        raise CheckpointError(f"{node.label} does not fit its inputs of shapes {shapes}: {error}") from None


def _fold(node: OnnxNode, inputs: Sequence[Array | None], opset: int) -> list[Array] | None:
    op, given = node.op, node.attributes
    x = inputs[0] if inputs else None
    if op in _BINARY or op in ("Div", "Where"):
        arrays = [one for one in inputs if one is not None]
        _bound(node, np.broadcast_shapes(*(one.shape for one in arrays)))
        if op == "Where":
            return [np.where(arrays[0], arrays[1], arrays[2])]
        if op == "Div":
            return [_divide(arrays[0], arrays[1])]
        function: Callable[[Any, Any], Any] = np.fmod if op == "Mod" and given.get("fmod", 0) else _BINARY[op]
        result = arrays[0]
        for other in arrays[1:]:
            result = function(result, other)
        kind = None if result.dtype == bool or op == "Pow" else arrays[0].dtype
        return [result.astype(kind or (arrays[0].dtype if op == "Pow" else result.dtype))]
    if op == "Constant":
        return [_constant(node)]
    if op == "ConstantOfShape":
        value = given.get("value")
        single = value.array().reshape(-1)[:1] if isinstance(value, OnnxTensor) else np.zeros(1, np.float32)
        shape = _ints(inputs[0])
        _bound(node, shape)
        return [np.broadcast_to(single.reshape(()), tuple(shape))]
    if op == "Range":
        start, stop, step = (np.asarray(one).reshape(()) for one in inputs)
        _bound(node, [max(0, math.ceil((stop.item() - start.item()) / step.item()))])
        return [np.arange(start.item(), stop.item(), step.item(), dtype=start.dtype)]
    if x is None:
        return None
    if op in _UNARY:
        return [np.asarray(_UNARY[op](x))]
    if op == "MatMul":
        other = np.asarray(inputs[1])
        # What it costs, which is more than what it holds: angles are a column by a row.
        shared = np.broadcast_shapes(x.shape[:-2], other.shape[:-2])
        _bound(node, [*shared, *x.shape[-2:], *other.shape[-1:]])
        return [np.matmul(x, other)]
    if op == "Cast":
        return [narrowed(x, given["to"])]
    if op == "CastLike":
        return [x.astype(np.asarray(inputs[1]).dtype)]
    if op == "Shape":
        return [np.array(x.shape[given.get("start", 0) : given.get("end", x.ndim)], np.int64)]
    if op == "Size":
        return [np.array(x.size, np.int64)]
    if op == "Reshape":
        return [x.reshape(resolve_shape(x.shape, _ints(inputs[1]), bool(given.get("allowzero", 0))))]
    if op == "Flatten":
        axis = given.get("axis", 1)
        if axis != x.ndim:
            place_of(axis, x.ndim)
        return [x.reshape(math.prod(x.shape[:axis]), -1)]
    if op == "Transpose":
        return [x.transpose(given.get("perm") or None)]
    if op in ("Unsqueeze", "Squeeze"):
        axes = axes_of(node, inputs)
        if op == "Squeeze":
            if axes == []:
                raise ValueError("no axes")
            return [np.squeeze(x, None if axes is None else tuple(axes))]
        return [np.expand_dims(x, tuple(axes or ()))]
    if op == "Expand":
        wide = np.broadcast_shapes(x.shape, tuple(_ints(inputs[1])))
        _bound(node, wide)
        return [np.broadcast_to(x, wide)]
    if op == "Tile":
        repeats = _ints(inputs[1])
        _bound(node, [x.size, *repeats])
        return [np.tile(x, repeats)]
    if op == "Concat":
        _bound(node, [sum(one.size for one in inputs if one is not None)])
        return [np.concatenate([one for one in inputs if one is not None], given["axis"])]
    if op == "Split":
        return _split(node, x, inputs)
    if op == "Slice":
        return [x[index_slices(node, x.ndim, inputs)]]
    if op == "Gather":
        index, axis = np.asarray(inputs[1]), given.get("axis", 0)
        _bound(node, [index.size, x.size // max(1, x.shape[axis])])
        return [np.take(x, index, axis)]
    if op == "GatherND":
        index = np.asarray(inputs[1])
        if given.get("batch_dims", 0):
            return None
        _bound(node, [*index.shape[:-1], *x.shape[index.shape[-1] :]])
        return [x[tuple(np.moveaxis(index, -1, 0))]]
    if op == "GatherElements":
        return [_gather_elements(node, x, np.asarray(inputs[1]), place_of(given.get("axis", 0), x.ndim))]
    if op == "CumSum":
        if given.get("exclusive", 0) or given.get("reverse", 0):
            return None
        return [np.cumsum(x, int(np.asarray(inputs[1]).item()), dtype=x.dtype)]
    if op == "Clip":
        low, high = (inputs[place] if len(inputs) > place else None for place in (1, 2))
        _bound(node, np.broadcast_shapes(*(one.shape for one in (x, low, high) if one is not None)))
        return [np.clip(x, low, high).astype(x.dtype)]
    if op == "Trilu":
        offset = int(np.asarray(inputs[1]).item()) if len(inputs) > 1 and inputs[1] is not None else 0
        return [np.triu(x, offset) if given.get("upper", 1) else np.tril(x, offset)]
    if op == "OneHot":
        return [_one_hot(node, x, *(np.asarray(one) for one in inputs[1:3]))]
    if op in _REDUCE:
        axes = axes_of(node, inputs)
        if not axes and given.get("noop_with_empty_axes", 0):
            return [x]
        result = _REDUCE[op](x, axis=tuple(axes) if axes else None, keepdims=bool(given.get("keepdims", 1)))
        return [np.asarray(result).astype(x.dtype)]
    return None


def _bound(node: OnnxNode, shape: Sequence[int]) -> None:
    if any(dim < 0 for dim in shape) or math.prod(shape) > LIMIT:
        raise UnsupportedModelError(
            f"{node.label} makes an array of shape {list(shape)[:8]}, of more than {LIMIT} elements; no encoder needs "
            "that"
        )


def _divide(a: Array, b: Array) -> Array:
    if a.dtype.kind in "iu":
        # ONNX cuts towards zero.
        quotient = np.abs(a) // np.abs(np.where(b == 0, 1, b))
        return (quotient * np.sign(a) * np.sign(b)).astype(a.dtype)
    return np.asarray(a / b)


def _one_hot(node: OnnxNode, x: Array, depth: Array, values: Array) -> Array:
    """``values`` are what stands for all other places, and what for that of the index."""
    count = int(depth.item())
    _bound(node, [*x.shape, count])
    low, high = values.reshape(-1)
    spread = np.where(np.arange(count) == np.where(x < 0, x + count, x)[..., None], high, low)
    return np.moveaxis(spread, -1, place_of(node.attributes.get("axis", -1), x.ndim + 1))


def _gather_elements(node: OnnxNode, x: Array, index: Array, axis: int) -> Array:
    """An index that is smaller than the data along another axis takes the first of it; NumPy would spread it."""
    _bound(node, index.shape)
    sizes = enumerate(zip(index.shape, x.shape, strict=True))
    if any(mine > whole for place, (mine, whole) in sizes if place != axis):
        raise ValueError("an index larger than the data")
    cut = tuple(slice(None) if place == axis else slice(size) for place, size in enumerate(index.shape))
    return np.take_along_axis(x[cut], index, axis)


def _constant(node: OnnxNode) -> Array:
    for name, value in node.attributes.items():
        if isinstance(value, OnnxTensor):
            return value.array()
        if name in ("value_int", "value_ints"):
            return np.array(value, np.int64)
        if name in ("value_float", "value_floats"):
            return np.array(value, np.float32)
    raise UnsupportedModelError(f"{node.label} holds no tensor and no number; only these are read")


def _ints(array: Array | None) -> list[int]:
    return [int(one) for one in np.asarray(array).reshape(-1)]


def axes_of(node: OnnxNode, inputs: Sequence[Array | None]) -> list[int] | None:
    """The axes of a node, an attribute in older opsets and an input in newer ones; None for all."""
    if len(inputs) > 1 and inputs[1] is not None:
        return _ints(inputs[1])
    return node.attributes.get("axes")


def place_of(axis: int, rank: int) -> int:
    """An axis, which may count from the end, counted from the start."""
    if not -rank <= axis < rank:
        raise ValueError(f"there is no axis {axis} among {rank}")
    return axis % rank


def resolve_shape(old: Sequence[int], wanted: Sequence[int], keep_zero: bool) -> tuple[int, ...]:
    """The shape that Reshape makes of ``old``: 0 is the size of the same axis, -1 what is left."""
    shape = [old[place] if size == 0 and not keep_zero else size for place, size in enumerate(wanted)]
    if shape.count(-1) == 1:
        rest = math.prod(size for size in shape if size != -1)
        if rest and math.prod(old) % rest == 0:
            shape[shape.index(-1)] = math.prod(old) // rest
    if math.prod(shape) != math.prod(old) or any(size < 0 for size in shape):
        raise ValueError(f"cannot take the shape {list(wanted)}")
    return tuple(shape)


def index_slices(node: OnnxNode, rank: int, inputs: Sequence[Array | None]) -> tuple[slice, ...]:
    """What Slice takes, for every axis."""
    starts, ends = _ints(inputs[1]), _ints(inputs[2])
    axes = _ints(inputs[3]) if len(inputs) > 3 and inputs[3] is not None else list(range(len(starts)))
    steps = _ints(inputs[4]) if len(inputs) > 4 and inputs[4] is not None else [1] * len(starts)
    result = [slice(None)] * rank
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step < 1:
            raise ValueError("a step below 1")
        result[axis] = slice(start, end, step)
    return tuple(result)


def _split(node: OnnxNode, x: Array, inputs: Sequence[Array | None]) -> list[Array]:
    axis = node.attributes.get("axis", 0)
    sizes = _ints(inputs[1]) if len(inputs) > 1 and inputs[1] is not None else node.attributes.get("split")
    if sizes is None:
        count = node.attributes.get("num_outputs", len(node.outputs))
        part = -(-x.shape[axis] // count)
        sizes = [part] * (count - 1) + [x.shape[axis] - part * (count - 1)]
        if count != len(node.outputs) or ("num_outputs" not in node.attributes and sizes[-1] != part):
            raise ValueError("the parts are not the whole")
    if sum(sizes) != x.shape[axis] or min(sizes) < 0:
        raise ValueError("the parts are not the whole")
    return list(np.split(x, np.cumsum(sizes)[:-1], axis))
