"""Ops of ``com.microsoft``, into which ONNX Runtime fuses the ops of an export.

Each is taken apart into the standard ops that it stands for, and those are read like any others, so nothing behind the
reader knows of fused graphs. Source: docs/ContribOperators.md of onnxruntime. An attribute, an input or an output that
is not understood is refused by its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from encast.errors import CheckpointError, EncastError, UnsupportedModelError
from encast.importers.files import quote
from encast.importers.onnx.model import OnnxNode
from encast.importers.onnx.reader import Reader, Value
from encast.importers.onnx.values import Known, Seen, shape_of

__all__ = ["FUSED", "MICROSOFT", "Parts", "fuses", "take_apart"]

MICROSOFT = "com.microsoft"

Meaning = Callable[[OnnxNode, "list[Value | None]"], "list[Value]"]

_EPSILON = 1e-12
"""Of the fused layer norms, where they have no attribute."""
_ACTIVATIONS = ("Relu", "Sigmoid", "Tanh")
"""What FusedGemm may end with; its others have parameters."""


class Parts:
    """A fused node and what it takes; ``do`` reads a standard op in its place."""

    def __init__(self, reader: Reader, node: OnnxNode, inputs: Sequence[Value | None], meaning: Meaning) -> None:
        self.reader, self.node, self.inputs, self._meaning = reader, node, inputs, meaning

    def do(self, op: str, *inputs: Value | None, **attributes: Any) -> Value:
        """The first output of a standard op, as a part of the fused node."""
        part = OnnxNode(op, "", self.node.name, [], self.node.outputs[:1], attributes, part_of=self.node.op)
        return self._meaning(part, list(inputs))[0]

    def fail(self, accepted: str) -> UnsupportedModelError:
        """The error for the fused node; as ``Reader.fail``."""
        self.reader.node, self.reader.inputs = self.node, self.inputs
        return self.reader.fail(accepted)

    def check(
        self,
        names: Sequence[str],
        *,
        read: Collection[str] = (),
        fixed: Mapping[str, Collection[int]] | None = None,
        absent: Collection[str] = (),
        outputs: Collection[int] = (0,),
    ) -> None:
        """Fails for what is not understood.

        ``names``: of all inputs of the op, in order, of which those in ``absent`` may not be there; ``read``:
        attributes that the caller reads; ``fixed``: those that may have some values only; ``outputs``: those that are
        given.
        """
        for name, value in self.node.attributes.items():
            if name in (fixed or {}):
                if value not in (fixed or {})[name]:
                    values = " or ".join(str(one) for one in (fixed or {})[name])
                    raise self.fail(f"its attribute {quote(name)} is {quote(str(value))}; {values} is read")
            elif name not in read:
                raise self.fail(f"its attribute {quote(name)} is not understood")
        if len(self.inputs) > len(names):
            raise self.fail(f"it has {len(self.inputs)} inputs; those of the op are {', '.join(names)}")
        for name, one in zip(names, self.inputs, strict=False):
            if one is not None and name in absent:
                raise self.fail(f"its input {quote(name)} is not read")
        for place, name in enumerate(self.node.outputs):
            if name and place not in outputs:
                raise self.fail(f"its output {place} is not read")

    def given(self, place: int) -> Value | None:
        """An input, None if it is left out."""
        return self.inputs[place] if place < len(self.inputs) else None

    def rows(self, place: int, what: str) -> Seen:
        """An input that depends on the rows."""
        value = self.given(place)
        if not isinstance(value, Seen):
            raise self.fail(f"its {what} is made of the encoder's rows")
        return value

    def known(self, place: int, what: str) -> Known | None:
        """An input that does not depend on the rows, None if it is left out."""
        value = self.given(place)
        if isinstance(value, Seen):
            raise self.fail(f"its {what} does not depend on the rows")
        return value

    def whole(self, name: str) -> int:
        """An attribute that is a number above 0; fails if it is none."""
        value = self.node.attributes.get(name)
        if not isinstance(value, int) or value < 1:
            raise self.fail(f"its attribute {quote(name)} is a number above 0")
        return value

    def added(self, x: Value, bias: Known | None) -> Value:
        """``x`` plus a bias of one number a column, if there is one."""
        if bias is None:
            return x
        width = shape_of(x.axes)[-1] if isinstance(x, Seen) else -1
        if bias.array.shape != (width,):
            raise self.fail(f"its bias has one number for each of {width} columns, not {list(bias.array.shape)}")
        return self.do("Add", x, bias)


Apart = Callable[[Parts], "list[Value]"]
FUSED: dict[str, Apart] = {}


def fuses(*ops: str) -> Callable[[Apart], Apart]:
    """Registers what takes these ops of ``com.microsoft`` apart."""

    def register(function: Apart) -> Apart:
        FUSED.update(dict.fromkeys(ops, function))
        return function

    return register


def take_apart(reader: Reader, node: OnnxNode, inputs: Sequence[Value | None], meaning: Meaning) -> list[Value]:
    """The outputs of a node of ``com.microsoft``; ``meaning`` reads a standard node.

    Raises ``UnsupportedModelError`` for ops, attributes, inputs and outputs that are not understood, and
    ``CheckpointError`` for shapes that do not fit.
    """
    if node.op not in FUSED:
        raise UnsupportedModelError(
            f"{reader.where}: {node.label} of {quote(MICROSOFT)} is not read; of its ops, {', '.join(sorted(FUSED))} "
            "are: export the model without graph optimisations, or compile its checkpoint"
        )
    try:
        return FUSED[node.op](Parts(reader, node, inputs, meaning))
    except EncastError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        met = ", ".join("nothing" if one is None else one.meaning for one in inputs)
        raise CheckpointError(f"{reader.where}: {node.label} does not fit its inputs ({met}): {error}") from None


# Activations


@fuses("Gelu", "BiasGelu")
def _gelu(parts: Parts) -> list[Value]:
    """By erf; BiasGelu adds a bias before."""
    biased = parts.node.op == "BiasGelu"
    parts.check(("A", "B") if biased else ("X",))
    bias = parts.known(1, "bias")
    if biased and bias is None:
        raise parts.fail("it has a bias")
    return [parts.do("Gelu", parts.added(parts.rows(0, "first input"), bias))]


@fuses("FastGelu")
def _fast_gelu(parts: Parts) -> list[Value]:
    parts.check(("X", "bias"))
    return [parts.do("Gelu", parts.added(parts.rows(0, "X"), parts.known(1, "bias")), approximate="tanh")]


@fuses("QuickGelu")
def _quick_gelu(parts: Parts) -> list[Value]:
    """x times the sigmoid of ``alpha`` x, which is SiLU with 1."""
    parts.check(("X",), read=("alpha",))
    x = parts.rows(0, "X")
    alpha = _number(parts.node.attributes.get("alpha", 1.702))
    return [parts.do("Mul", x, parts.do("Sigmoid", parts.do("Mul", x, alpha)))]


def _number(value: float) -> Known:
    return Known(np.array(value, np.float64), constant=True)


# Products


@fuses("FusedMatMul")
def _fused_matmul(parts: Parts) -> list[Value]:
    parts.check(("A", "B"), read=("alpha", "transA", "transB"), fixed={"transBatchA": (0,), "transBatchB": (0,)})
    sides = []
    for place, name in enumerate("AB"):
        side = parts.given(place)
        if side is None:
            raise parts.fail("it takes two values")
        if parts.node.attributes.get(f"trans{name}", 0):
            rank = len(side.axes) if isinstance(side, Seen) else side.array.ndim
            side = parts.do("Transpose", side, perm=[*range(rank - 2), rank - 1, rank - 2])
        sides.append(side)
    return [_times(parts, parts.do("MatMul", *sides), float(parts.node.attributes.get("alpha", 1.0)))]


def _times(parts: Parts, x: Value, factor: float) -> Value:
    return x if factor == 1.0 else parts.do("Mul", x, _number(factor))


@fuses("FusedGemm")
def _fused_gemm(parts: Parts) -> list[Value]:
    """Gemm and then an activation, by its name."""
    gemm = ("alpha", "beta", "transA", "transB")
    unused = ("activation_alpha", "activation_beta", "activation_gamma")
    parts.check(("A", "B", "C"), read=("activation", *gemm, *unused))
    activation = parts.node.attributes.get("activation", "")
    if activation not in _ACTIVATIONS:
        raise parts.fail(f"its activation is {quote(str(activation))}; {', '.join(_ACTIVATIONS)} are read")
    given = {name: value for name, value in parts.node.attributes.items() if name in gemm}
    return [parts.do(activation, parts.do("Gemm", *parts.inputs, **given))]


@fuses("BiasSoftmax")
def _bias_softmax(parts: Parts) -> list[Value]:
    """The softmax over the last axis of scores plus a mask or a relative bias."""
    parts.check(("data", "bias"), read=("axis", "is_inner_broadcast"))
    scores, bias = parts.rows(0, "data"), parts.given(1)
    shape = shape_of(scores.axes)
    axis = parts.node.attributes.get("axis", 1)
    if bias is None or axis not in (-1, len(shape) - 1):
        raise parts.fail("softmax goes over the keys, the last axis, of scores and a bias")
    found = bias.array.shape if isinstance(bias, Known) else shape_of(bias.axes)
    inner = bool(parts.node.attributes.get("is_inner_broadcast", 0))
    if not _spreads(found, shape, inner=inner):
        raise parts.fail(
            f"its attribute 'is_inner_broadcast' is {int(inner)}, so that a bias is the same for "
            f"{'axes in the middle' if inner else 'leading axes'}, which {list(found)} is not"
        )
    return [parts.do("Softmax", parts.do("Add", scores, bias), axis=len(shape) - 1)]


def _spreads(found: tuple[int, ...], shape: tuple[int, ...], *, inner: bool) -> bool:
    """Whether a bias is repeated along the axes that BiasSoftmax says: not the last one, and all side by side."""
    wide = (1,) * (len(shape) - len(found)) + found
    if len(wide) != len(shape) or wide[-1] != shape[-1]:
        return False
    pairs = [(mine, whole) for mine, whole in zip(wide[:-1], shape[:-1], strict=True) if whole != 1]
    turns = "".join("s" if mine == whole else "r" if mine == 1 else "x" for mine, whole in pairs)  # same, repeated
    return re.fullmatch("s*r*" if inner else "r*s*", turns) is not None


# Norms


@fuses("SkipLayerNormalization")
def _skip_layer_norm(parts: Parts) -> list[Value]:
    """The layer norm of the sum of a product, its bias and a residual; output 3 is that sum."""
    parts.check(("input", "skip", "gamma", "beta", "bias"), read=("epsilon",), outputs=(0, 3))
    skip = parts.given(1)
    # With a fixed length the rows of positions, which are added to those of words, are a constant.
    if not parts.reader.probe.fixed or not isinstance(skip, Known):
        skip = parts.rows(1, "skip")
    sides: list[Value] = [parts.rows(0, "input"), skip]
    bias = parts.known(4, "bias")
    if bias is not None:
        # The optimiser takes the bias from the product, which may be either side.
        bare = [place for place, one in enumerate(sides) if isinstance(one, Seen) and one.kind == "product"]
        if len(bare) != 1:
            raise parts.fail("its bias is that of the one side that is a product without a bias")
        sides[bare[0]] = parts.added(sides[bare[0]], bias)
    total = parts.do("Add", *sides)
    norm = _norm(parts, total, 2)
    return [norm, norm, norm, total]  # outputs 1 and 2 have no names, ``check`` saw to it


def _norm(parts: Parts, x: Value, place: int) -> Value:
    gamma, beta = parts.known(place, "gamma"), parts.known(place + 1, "beta")
    epsilon = parts.node.attributes.get("epsilon", _EPSILON)
    return parts.do("LayerNormalization", x, gamma, beta, epsilon=epsilon)


@fuses("EmbedLayerNormalization")
def _embed_layer_norm(parts: Parts) -> list[Value]:
    """The layer norm of the sum of rows of two or three tables; lengths of the texts; that sum."""
    names = ["input_ids", "segment_ids", "word_embedding", "position_embedding", "segment_embedding"]
    names += ["gamma", "beta", "mask", "position_ids"]
    parts.check(names, read=("epsilon",), fixed={"mask_index_type": (0, 1)}, outputs=(0, 1, 2))
    shape = parts.reader.probe.ids.shape
    ids, types, mask, positions = (parts.known(place, names[place]) for place in (0, 1, 7, 8))
    if positions is None:
        positions = Known(np.arange(shape[1])[None], constant=False)
    if (types is None) != (parts.given(4) is None):
        raise parts.fail("it has both, segment_ids and segment_embedding, or none")
    total: Value | None = None
    for table, index, name in ((2, ids, "input_ids"), (3, positions, "position_ids"), (4, types, "segment_ids")):
        if table == 4 and types is None:
            continue
        rows = _rows_of_table(parts, table, names[table], index, name)
        total = rows if total is None else parts.do("Add", total, rows)
    assert total is not None
    if mask is not None and mask.array.shape != shape:
        raise parts.fail(f"its mask is [batch, sequence], not {list(mask.array.shape)}")
    lengths = np.zeros(shape[0], np.int32) if mask is None else (mask.array == 1).sum(1).astype(np.int32)
    return [_norm(parts, total, 5), Known(lengths, constant=False), total]


def _rows_of_table(parts: Parts, place: int, what: str, index: Known | None, name: str) -> Value:
    table = parts.known(place, what)
    if table is None or table.array.ndim != 2 or table.array.dtype.kind != "f" or not table.constant:
        raise parts.fail(f"its {what} is a table [rows, columns] of constants in floating point")
    if index is None or index.constant or index.array.ndim != 2 or index.array.dtype.kind != "i":
        raise parts.fail(f"its {name} are integers [batch, sequence]")
    rows = parts.do("Gather", table, index)
    if not isinstance(rows, Seen):
        raise parts.fail(f"its {name} are made of the inputs of the file, one for each token")
    return rows
