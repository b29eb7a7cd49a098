"""The state of one reading: what every value means, and the graph that comes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from encast.errors import UnsupportedModelError
from encast.importers.onnx.dequantised import Dequantised
from encast.importers.onnx.model import OnnxNode
from encast.importers.onnx.tensors import OnnxTensor
from encast.importers.onnx.values import ARGUMENTS, Known, Rounding, Seen, arguments
from encast.ir import Graph, Integers
from encast.ir.types import ValueType

__all__ = ["HANDLERS", "Handler", "Probe", "Reader", "Value", "erf", "handles"]

Value = Known | Seen
Array = np.ndarray[Any, Any]

_RISING = 2
"""The variant of a probe whose texts are short at first."""
_SPARE_BYTES = 64 << 20
"""Of scaled weights that are no initializers."""
_TOLERANCE = 4e-6
"""How far apart two writings of one function may be, with their constants in f32; erf's and tanh's GELU are 4e-4."""
_NARROW_TOLERANCE = 1.5e-4
"""The same with constants in f16: rounding the root of 2, or 0.044715 and its factor, moves GELU by up to 1.3e-4."""


def erf(x: Array) -> Array:
    """The error function to about 1e-15, by its series and its continued fraction (Abramowitz and Stegun 7.1.6, "
    "7.1.14)."""
    size = np.minimum(np.abs(x), 6.5)
    term = 2.0 / np.sqrt(np.pi) * size * np.exp(-size * size)
    near = np.zeros_like(size)
    for order in range(120):
        near += term
        term = term * 2.0 * size * size / (2 * order + 3)
    tail = np.zeros_like(size)
    for order in range(60, 0, -1):
        tail = (order / 2.0) / (np.maximum(size, 2.0) + tail)
    far = 1.0 - np.exp(-size * size) / np.sqrt(np.pi) / (np.maximum(size, 2.0) + tail)
    return np.asarray(np.sign(x) * np.where(size < 3.0, near, far))


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": lambda x: 0.5 * x * (1.0 + erf(x / np.sqrt(2.0))),
    "gelu_tanh": lambda x: 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0.0),
    "silu": lambda x: x / (1.0 + np.exp(-x)),
    "tanh": np.tanh,
}


@dataclass(frozen=True)
class Probe:
    """A batch for which ids, masks and shapes are computed; the readings of a file have different ones.

    ``ids``, ``mask``: i64[sequences, positions], padding behind; ``special``: ids that the graph compares with;
    ``fixed``: whether the file takes no other number of positions, so that what follows from them may be constant.
    ``masked``: whether the mask is an input of the file, and hides something.
    """

    ids: Array
    mask: Array
    types: Array
    special: tuple[int, ...]
    fixed: bool = False
    variant: int = 0
    masked: bool = False

    @staticmethod
    def make(
        sequences: int,
        positions: int,
        special: tuple[int, ...] = (),
        *,
        variant: int = 0,
        fixed: bool = False,
        takes_mask: bool = False,
    ) -> Probe:
        """Probes of one size differ by ``variant``: other ids, and texts of other lengths.

        The first text has all positions in variant 0, one less in 1, and two in 2. Those behind it get shorter by two
        each in 0 and 1, and longer by one in 2: so all but the first and last positions of a text are tokens in one
        probe, and padding in another. A file without a mask has no padding: all texts have all positions.
        """
        random = np.random.RandomState(sequences * 1000 + positions + variant)
        ids = random.randint(100, 1000, (sequences, positions))
        for place, value in enumerate(special):
            # The first text has none of the first one, the padding: it has as many positions as there can be.
            ids[(place + 1) % min(2, sequences), 1 + place // 2 :: 3] = value
        if not takes_mask:
            lengths = [positions] * sequences
        elif variant < _RISING:
            lengths = [max(1, positions - variant - 2 * row) for row in range(sequences)]
        else:
            # Two at least: the second position tells the base of rotary ones, and has the first special id.
            lengths = [min(positions, 2 + row) for row in range(sequences)]
        mask = (np.arange(positions)[None, :] < np.array(lengths)[:, None]).astype(np.int64)
        types = random.randint(0, 2, (sequences, positions))
        types[0, :2] = (0, 1)[:positions]
        masked = takes_mask and not mask.all()
        return Probe(ids.astype(np.int64), mask, types.astype(np.int64), special, fixed, variant, masked)

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return int(self.mask.sum(axis=1).max())

    def with_special(self, value: int) -> Probe:
        """The same probe with tokens of one more id."""
        sequences, positions = self.ids.shape
        special = (*self.special, value)
        return Probe.make(sequences, positions, special, variant=self.variant, fixed=self.fixed, takes_mask=self.masked)


class SpecialIdFoundError(Exception):
    """The graph compares ids with one that the probe does not have yet."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


class Reader:
    """Handlers ask it for what a node takes, and emit nodes of plain ops through it."""

    def __init__(
        self,
        where: str,
        opset: int,
        probe: Probe,
        dequantised: Dequantised,
        rounding: float = 0.0,
        initializers: Mapping[str, OnnxTensor] | None = None,
    ) -> None:
        self.initializers = initializers or {}
        self.where = where
        self.opset = opset
        self.probe = probe
        self.rounding = rounding
        self.angles = 0.0
        """``rounding`` where angles of rotary positions are narrow too."""
        self.dequantised = dequantised
        self.activations: set[str] = set()
        self.rounded: set[str] = set()
        self.read: dict[str, list[Rounding | None]] = {}
        self.graph = Graph()
        self.graph.add_input("token_ids", ValueType("i32", ("tokens",)))
        self.node: OnnxNode = OnnxNode("", "", "", [], [], {})
        self.inputs: Sequence[Value | None] = ()
        self._made: dict[Any, str] = {}
        self._kept: list[Array] = []
        self._rescaled: dict[Any, tuple[Array, Array]] = {}
        self.distances: dict[str, Array] = {}
        self.cut_at = 0
        """How many positions the file has rows for, where it has rows in the place of a table."""
        self._zeros: dict[int, Array] = {}
        self._held = self._joined = self._scaled = 0
        self._most_scaled = _SPARE_BYTES + 4 * sum(math.prod(one.shape) for one in self.initializers.values())

    def fail(self, accepted: str) -> UnsupportedModelError:
        """The error for the node that is read: what came in, and what is ``accepted``."""
        met = ", ".join("nothing" if one is None else one.meaning for one in self.inputs)
        return UnsupportedModelError(
            f"{self.where}: {self.node.label} takes {met or 'nothing'}; {accepted}. Export the unchanged model of "
            "transformers, or compile its checkpoint"
        )

    # Emitting

    def emit(self, op: str, *inputs: str, **attrs: Any) -> str:
        """The value of a node of a plain op, which is added unless the same one is there."""
        key = (op, inputs, tuple(sorted(attrs.items(), key=str)) if "modes" not in attrs else str(attrs))
        if key not in self._made:
            at = self.node.name or (self.node.outputs[0] if self.node.outputs else "output")
            name = f"{len(self.graph.nodes)}:{at}"
            self._made[key] = self.graph.add(op, *inputs, name=name, **attrs)
        return self._made[key]

    def constant(self, known: Known, array: Array) -> str:
        """A constant of the graph: ``array`` is that of ``known``, in some arrangement."""
        if not known.constant:
            raise self.fail("weights must be constants")
        if array.dtype.kind != "f":
            raise self.fail("weights must be numbers in floating point")
        key = ("constant", array.__array_interface__["data"][0], array.shape, array.strides)
        if key not in self._made:
            name = f"{len(self.graph.constants)}:{known.name}"
            with np.errstate(over="ignore"):
                made = array.astype(np.float32, copy=False)
            self._made[key] = self.graph.add_constant(name, made, integers=self.dequantised.integers(made))
            self._held += made.nbytes
            self._kept.append(array)  # an address stands for an array as long as that lives
        return self._made[key]

    def cut(self, value: str, start: int, stop: int) -> str:
        """Columns ``start`` to ``stop`` of a product with a weight, as a product with a part of the weight."""
        node = self.graph.producer(value)
        assert node is not None
        names = [self._rows_of([(name, start, stop)]) if name else "" for name in node.inputs[1:]]
        return self.emit("linear", node.inputs[0], *names, activation="none")

    def stacked(self, values: Sequence[str]) -> str | None:
        """The columns of several products of the same rows, side by side as one product; None if they are none."""
        nodes = [node for node in map(self.graph.producer, values) if node is not None and node.op == "linear"]
        sources = {node.inputs[0] for node in nodes}
        if len(nodes) != len(values) or len(sources) != 1 or len({bool(node.inputs[2]) for node in nodes}) != 1:
            return None
        names = []
        for place in (1, 2):
            given = [node.inputs[place] for node in nodes]
            parts = [(name, 0, int(self.graph.type_of(name).shape[0])) for name in given if name]
            names.append(self._rows_of(parts) if parts else "")
        return self.emit("linear", sources.pop(), *names, activation="none")

    def repeated_heads(self, value: str, groups: int, times: int) -> str | None:
        """Rows in ``groups`` of heads, turned by their positions or not, with each group ``times`` over; None where no
        product with a weight makes them."""
        node = self.graph.producer(value)
        if node is not None and node.op == "rotary":
            inner = self.repeated_heads(node.inputs[0], groups, times)
            return None if inner is None else self.emit("rotary", inner, **{**node.attrs, "heads": groups * times})
        if node is None or node.op != "linear":
            return None
        names = [self._repeated(name, groups, times) if name else "" for name in node.inputs[1:]]
        return self.emit("linear", node.inputs[0], *names, activation="none")

    def _repeated(self, name: str, groups: int, times: int) -> str:
        key = ("repeated", name, groups, times)
        if key not in self._made:
            array = self.graph.constants[name].array
            parts = array.reshape(groups, -1, *array.shape[1:])
            self._joined += times * array.nbytes
            if self._joined > self._held:
                raise self.fail("keys and values that heads share are no larger than all other weights")
            wide = np.repeat(parts, times, axis=0).reshape(-1, *array.shape[1:])
            made = f"{len(self.graph.constants)}:{name}"
            self._made[key] = self.graph.add_constant(made, wide)
        return self._made[key]

    def _rows_of(self, parts: Sequence[tuple[str, int, int]]) -> str:
        """A constant of rows of constants, ``(name, first, last + 1)`` each, in this order."""
        key = ("rows", *parts)
        if key not in self._made:
            constants = [self.graph.constants[name] for name, _, _ in parts]
            arrays, integers = [], []
            for one, (_, start, stop) in zip(constants, parts, strict=True):
                arrays.append(one.array[start:stop])
                integers.append(None if one.integers is None else one.integers.rows(start, stop))
            if len(arrays) > 1:
                self._joined += sum(array.nbytes for array in arrays)
                if self._joined > self._held:
                    raise self.fail("every weight is put beside others once")
            array = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            name = f"{len(self.graph.constants)}:{'+'.join(name for name, _, _ in parts)}"
            self._made[key] = self.graph.add_constant(name, array, integers=Integers.stacked(integers))
        return self._made[key]

    def rescaled(self, weight: Known, scales: Array) -> Array:
        """``weight.array`` with its rows times ``scales``, made once; fails for the same weight with other scales."""
        if not weight.constant or weight.array.dtype != np.float32:
            raise self.fail("weights must be constant numbers in f32")
        key = ("rescaled", weight.array.__array_interface__["data"][0], weight.array.shape, weight.array.strides)
        if key not in self._rescaled:
            self._scaled += weight.array.nbytes
            if self._scaled > self._most_scaled:
                raise self.fail("every weight is scaled once, and no part of it again")
            with np.errstate(over="ignore"):
                made = (weight.array.T * scales).T
            if not np.isfinite(made).all():
                raise self.fail("scales make numbers beyond f32")
            self._rescaled[key] = (made, scales)
            self._kept.append(weight.array)
        made, before = self._rescaled[key]
        if not np.array_equal(before, scales):
            raise self.fail("a weight is read with the same scales each time")
        return made

    def zeros(self, size: int) -> Array:
        """One array of zeros for all that ask for this size."""
        return self._zeros.setdefault(size, np.zeros(size, np.float32))

    def types_input(self) -> str:
        if "token_type_ids" not in self.graph.inputs:
            self.graph.add_input("token_type_ids", ValueType("i32", ("tokens",)))
        return "token_type_ids"

    def note_activations(self, scheme: str) -> None:
        """That rows are quantised: ``dynamic`` or ``static``."""
        self.activations.add(scheme)

    def note_product(self, value: str, seen: Seen) -> None:
        """That a product with a weight reads ``value``, which ``seen`` is."""
        self.read.setdefault(value, []).append(seen.rounded)

    # Asking

    def table(self, rows: Known) -> Known | None:
        """The whole table of the file of which ``rows`` are the first ones; None if they are those of none."""
        tensor = self.initializers.get(rows.name)
        if tensor is None or len(tensor.shape) != 2 or rows.array.shape[-1:] != tensor.shape[1:]:
            return None
        whole, part = tensor.array(), rows.array
        same = whole.__array_interface__["data"][0] == part.__array_interface__["data"][0]
        fits = part.size <= whole.size and part.flags.c_contiguous and part.dtype == whole.dtype
        return Known(whole, constant=True, name=rows.name) if same and fits else None

    def known(self, place: int) -> Known | None:
        value = self.inputs[place] if place < len(self.inputs) else None
        return value if isinstance(value, Known) else None

    def scalar(self, value: Value | None) -> float | None:
        """The number that a value is, None if it is none."""
        if isinstance(value, Known) and value.array.size == 1 and value.array.dtype.kind in "fiu":
            return float(value.array.reshape(())[()])
        return None

    def finished(self, seen: Seen) -> Seen:
        """The value with its pending product and function emitted; fails if that is none of the op table."""
        if seen.kind == "product":
            weight, kind = seen.extra
            value = self.emit("linear", seen.value, self.constant(weight, weight.array.T), "", activation="none")
            return self.finished(Seen(kind, value, seen.axes, seen.curve))
        if seen.kind == "part":
            return self.finished(Seen("rows", self.cut(seen.value, *seen.extra), seen.axes, seen.curve))
        if seen.curve is None:
            return seen
        if seen.kind not in ("rows", "sequences", "scores"):
            raise self.fail("a norm or a pooling is not finished here")
        ratio = float(seen.curve[-1] / ARGUMENTS[-1])
        if np.allclose(seen.curve, ratio * arguments(seen), rtol=1e-6, atol=0.0):
            value = seen.value if ratio == 1.0 else self.emit("scale", seen.value, factor=ratio)
            return Seen(seen.kind, value, seen.axes, hidden=seen.hidden)
        kind = self.activation(seen.curve)
        if kind is not None and seen.kind != "scores":
            return Seen(seen.kind, self.emit("activation", seen.value, kind=kind), seen.axes)
        raise self.fail(f"what comes in is no activation that encast has, which are {sorted(_ACTIVATIONS)}")

    def activation(self, curve: Array) -> str | None:
        """The activation of the op table whose values at ``ARGUMENTS`` are ``curve``; None if there is none."""
        tolerance = _NARROW_TOLERANCE if self.rounding else _TOLERANCE
        for kind, function in _ACTIVATIONS.items():
            with np.errstate(all="ignore"):
                wanted = function(ARGUMENTS)
                near = np.abs(curve - wanted) <= tolerance * (1.0 + np.abs(wanted))
            if near.all():
                return kind
        return None

    def rows(self, value: Value | None) -> Seen:
        """A finished value of rows, one for a token or a sequence."""
        if isinstance(value, Seen) and value.kind == "masked":
            # The rows of padding, which no token reads.
            return Seen("rows", value.value, value.axes)
        if isinstance(value, Seen) and value.kind == "normed" and value.extra[1] is not None:
            eps, gamma, kind = value.extra
            scale, shift = gamma.array.reshape(-1), Known(self.zeros(gamma.array.size), constant=True)
            names = self.constant(gamma, scale), self.constant(shift, shift.array)
            return Seen(kind, self.emit("layer_norm", value.value, *names, eps=eps), value.axes)
        if isinstance(value, Seen) and value.kind == "rooted" and value.extra[1] is not None:
            eps, gamma, kind = value.extra
            name = self.constant(gamma, gamma.array.reshape(-1))
            return Seen(kind, self.emit("rms_norm", value.value, name, eps=eps), value.axes)
        if isinstance(value, Seen) and value.kind in ("rows", "sequences", "product", "part", "table"):
            return self.finished(value)
        raise self.fail("rows of the encoder are needed")


Handler = Callable[[Reader], "list[Value]"]
HANDLERS: dict[str, Handler] = {}


def handles(*ops: str) -> Callable[[Handler], Handler]:
    """Registers what reads nodes of these ops of which an input is no known array."""

    def register(function: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(ops, function))
        return function

    return register
