"""Reading an export: every node of the ONNX graph is given a meaning, in order.

What depends on ids, mask and sizes alone (shape arithmetic, masks, positions) is computed for a probe batch; rows of
the encoder are followed as values of encast's own graph. So a mask is known by what it does to scores, an activation by
its values, a position by its number, however the exporter wrote them. The file is read several times, with probes of
different sizes and of texts that fill them or not; all readings must make the same graph. No name of a node or weight
is looked at; the inputs are known by their names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np

from encast.errors import CheckpointError, EncastError, UnsupportedModelError
from encast.importers.files import Folder, quote
from encast.importers.model_inputs import Inputs
from encast.importers.onnx import attention, elementwise, microsoft_attention, pooling, quantised
from encast.importers.onnx.arrangements import ONE_HOT, look_up, look_up_one_hot
from encast.importers.onnx.dequantised import Dequantised
from encast.importers.onnx.disentangled import lift
from encast.importers.onnx.folding import fold
from encast.importers.onnx.inputs import FEEDS, INTEGERS, LONGEST, SHORTEST, check_inputs
from encast.importers.onnx.microsoft import MICROSOFT, take_apart
from encast.importers.onnx.model import Input, Model, OnnxNode, read_model
from encast.importers.onnx.norm import layer_normalization  # noqa: F401
from encast.importers.onnx.reader import HANDLERS, Probe, Reader, SpecialIdFoundError, Value
from encast.importers.onnx.values import Known, Seen, labels
from encast.ir import Graph

__all__ = ["Export", "Output", "read_export"]

# Importing them registers their handlers.
_SECTIONS = (attention, elementwise, microsoft_attention, pooling, quantised)

_MOST_SPECIAL = 8
_MOST_BYTES = 512 << 20
"""Of all arrays that are computed in one reading; masks and positions of a real export are a few megabytes."""
_LONG = 523
"""Positions of the second probe where there is no position table. With one it has a position for each row, so nothing
can differ behind it. Without a table it is longer than windows are, and than the distances that DeBERTa's buckets tell
apart."""

_EXACT = (1, 6, 7, 11)
"""Data types that hold every id of a table of words: f32, i32, i64, f64."""
_RESHAPING = ("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze")


@dataclass(frozen=True)
class Output:
    """An output that was read: ``kind`` is ``rows``, ``sequences`` or ``column`` (number ``column`` of ``value``)."""

    name: str
    kind: str
    value: str
    column: int = 0


@dataclass(frozen=True)
class Export:
    """``graph`` has nodes and constants, named after the file's, and no outputs or facts; ``where``: the file.

    ``rounding``: how far, relatively, its numbers may be from what they were rounded from, which is 0 unless the file
    has f16 or bf16; ``angles``: the same of its rotary positions, which such a file may compute in f32.
    ``inputs``: what the file takes. ``cut``: how many tokens the position table is for, where the file has only the
    rows that its fixed length needs; 0 where it has all.
    ``distances``: for every node ``relative_scores``, whose ``max_distance`` means nothing, the rows of its table that
    the file picks, by distance query - key from the most negative on.
    ``quantised``: "" for a graph in floating point, else how it quantises rows: ``dynamic``, ``static``, ``mixed``, or
    ``unquantised``, where integers are those of constants alone. ``fixed``: by the value that products read, scale and
    zero point of the unsigned bytes that all of them round it to, where the file fixes these. ``elsewhere``: how many
    values besides it rounds with a fixed scale.
    """

    graph: Graph
    outputs: tuple[Output, ...]
    where: str
    rounding: float
    quantised: str = ""
    fixed: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    elsewhere: int = 0
    distances: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    angles: float = 0.0
    inputs: Inputs = field(default_factory=lambda: Inputs({}))
    cut: int = 0

    @property
    def arithmetic(self) -> str:
        """What a runtime computes it in: ``f32``, ``f16`` (bf16 too), or integers with scales that are ``dynamic`` or
        ``fixed``. Integers of weights alone are f32 by then."""
        if self.quantised in ("static", "mixed"):
            return "fixed"
        if self.quantised == "dynamic":
            return "dynamic"
        return "f16" if self.rounding else "f32"


def read_export(folder: Folder, name: str) -> Export:
    """Reads the ONNX file ``name`` of ``folder``.

    Raises ``CheckpointError`` for a damaged file and ``UnsupportedModelError`` for a graph of which no output is that
    of an encoder, naming the node that is not understood.
    """
    model = read_model(folder, name)
    if model.domains.get(MICROSOFT, 1) != 1:
        raise UnsupportedModelError(
            f"{model.where}: the ops of {quote(MICROSOFT)} are those of version {model.domains[MICROSOFT]}; 1 is read"
        )
    inputs = check_inputs(model)
    dequantised = Dequantised(_bytes_of_integers(model))
    fixed, takes_mask = inputs.positions is not None, "attention_mask" in inputs.names.values()

    def read(sequences: int, positions: int, variant: int = 0) -> tuple[Export, int]:
        """A reading, and how many tokens its longest text has."""
        sequences = inputs.sequences or sequences
        probe = Probe.make(sequences, positions, variant=variant, fixed=fixed, takes_mask=takes_mask)
        return _read(model, inputs, probe, dequantised), probe.longest

    variants: Sequence[int] = (2,)
    if inputs.positions is not None:
        export, positions = read(3, inputs.positions)
        variants = (1, 2)
    else:
        first, tokens = read(3, SHORTEST)
        longest = _longest(first.graph)
        if longest is not None and not SHORTEST <= longest <= LONGEST:
            raise UnsupportedModelError(
                f"{model.where}: the position table is for {longest} tokens; {SHORTEST} to {LONGEST} are read: "
                "compile the model's checkpoint"
            )
        short = _steps(first, tokens)
        del first  # which may hold all weights
        export, positions = read(2, longest or _LONG)
        sizes = (
            f"texts of {SHORTEST} and of {positions} tokens: sizes of the example that it was exported with are fixed "
            "in it; export it with dynamic axes"
        )
        _need_same(export, tokens, short, sizes)
        reach = max((int(node.attrs["reach"]) for node in export.graph.nodes if node.op == "local_mask"), default=0)
        if reach >= SHORTEST - 1:
            # A window is not seen in texts that are shorter than it.
            again, tokens = read(3, reach + 2)
            _need_same(export, tokens, _steps(again, tokens), sizes)
    for variant in variants:
        again, tokens = read(2, positions, variant)
        said = f"two batches of texts of up to {positions} tokens: compile the model's checkpoint"
        _need_same(export, tokens, _steps(again, tokens), said)
    return export


def _need_same(export: Export, tokens: int, others: list[str], said: str) -> None:
    """Raises ``UnsupportedModelError`` unless another reading, with texts of up to so many tokens, has the same steps;
    ``said``: of which texts, and what to do."""
    for one, other in zip_longest(_steps(export, tokens), others, fillvalue="nothing"):
        if one != other:
            raise UnsupportedModelError(
                f"{export.where}: computes different things for {said}. The first difference is {quote(other)} in the "
                f"place of {quote(one)}"
            )


def _steps(export: Export, tokens: int) -> list[str]:
    """What is computed of texts of so many tokens, up to the names of values: without the windows that hide none."""
    names: dict[str, str] = {}
    steps: list[str] = []
    for node in export.graph.nodes:
        inputs = [names.get(one, one) for one in node.inputs]
        if node.op == "local_mask" and int(node.attrs["reach"]) >= tokens - 1:
            names[node.outputs[0]] = inputs[0]
            continue
        names |= {one: f"%{len(steps)}.{place}" for place, one in enumerate(node.outputs)}
        steps.append(f"{node.op}({', '.join(inputs)}) {sorted(node.attrs.items())}")
    outputs = [(one.name, one.kind, names.get(one.value, one.value), one.column) for one in export.outputs]
    constants = [f"{name}: {constant.type}" for name, constant in export.graph.constants.items()]
    return [*steps, str(outputs), *sorted(constants)]


def _bytes_of_integers(model: Model) -> int:
    """Of 8 bits, those that the file holds and those that it makes of its weights."""
    tensors = model.initializers
    made = {node.inputs[0] for node in model.nodes if node.op == "QuantizeLinear" and node.inputs}
    return sum(math.prod(one.shape) for name, one in tensors.items() if one.dtype.itemsize == 1 or name in made)


def _longest(graph: Graph) -> int | None:
    """How many tokens the position table allows, the longest of several; None if there is none."""
    found = [
        int(graph.type_of(user.inputs[1]).shape[0]) - int(node.attrs["offset"])
        for node in graph.nodes
        if node.op == "position_ids"
        for user in graph.users(node.outputs[0])
    ]
    return max(found, default=None)


def _read(model: Model, inputs: Inputs, probe: Probe, dequantised: Dequantised) -> Export:
    while True:
        try:
            return _Walk(model, inputs, probe, dequantised).export()
        except SpecialIdFoundError as error:
            probe = probe.with_special(error.value)
            if len(probe.special) > _MOST_SPECIAL:
                raise UnsupportedModelError(
                    f"{model.where}: compares the token ids with {len(probe.special)} numbers; encoders do so with a "
                    "padding id"
                ) from None


class _TooMuchError(CheckpointError):
    """A file computes more than it may, whether an output needs that or not."""


class _Walk:
    """One reading of the nodes."""

    def __init__(self, model: Model, inputs: Inputs, probe: Probe, dequantised: Dequantised) -> None:
        self.model, self.inputs = model, inputs
        self.reader = Reader(model.where, model.opset, probe, dequantised, model.rounding, model.initializers)
        self.values: dict[str, Value | EncastError] = {}
        self.computed = 0
        self.cast: set[tuple[str, ...]] = set()
        for one in model.inputs:
            if one.name not in model.initializers:
                self._define(one.name, self._input(one))

    def _input(self, one: Input) -> Value:
        what = self.inputs.names[one.name]
        return Known(FEEDS[what](self.reader.probe).astype(INTEGERS[one.dtype]), constant=False, source=what)

    def _define(self, name: str, value: Value | EncastError) -> None:
        if name in self.values or name in self.model.initializers:
            raise CheckpointError(
                f"{self.model.where}: two nodes or inputs are named {quote(name)}; the file is damaged"
            )
        self.values[name] = value

    def _value(self, name: str, label: str) -> Value | EncastError:
        if name in self.values:
            return self.values[name]
        if name in self.model.initializers:
            tensor = self.model.initializers[name]
            self.values[name] = Known(tensor.array(), constant=True, name=name)
            # An initializer stays one: ``_define`` refuses its name.
            return self.values[name]
        raise CheckpointError(
            f"{self.model.where}: {label} reads {quote(name)}, which nothing before it makes; nodes must be sorted, "
            "without cycles, and all weights be there"
        )

    def export(self) -> Export:
        for node in self.model.nodes:
            self._step(node)
        outputs: list[Output] = []
        errors: list[EncastError] = []
        for name in self.model.outputs:
            value = self._value(name, "an output")
            if isinstance(value, EncastError):
                errors.append(value)
                continue
            try:
                outputs.append(self._output(name, value))
            except EncastError as error:
                errors.append(error)
        if not outputs:
            raise errors[0]
        reader = self.reader
        dequantised = "unquantised" if reader.dequantised.used else ""
        quantised = "mixed" if len(reader.activations) > 1 else next(iter(reader.activations), dequantised)
        met = {one.node for found in reader.read.values() for one in found if one is not None}
        elsewhere = len(reader.rounded - met)
        where, rounding = self.model.where, reader.rounding
        fixed, distances = self._fixed(), reader.distances
        return Export(
            graph=reader.graph,
            outputs=tuple(outputs),
            where=where,
            rounding=rounding,
            quantised=quantised,
            fixed=fixed,
            elsewhere=elsewhere,
            distances=distances,
            angles=reader.angles,
            inputs=self.inputs,
            cut=reader.cut_at,
        )

    def _fixed(self) -> dict[str, tuple[float, int]]:
        """The roundings of values that all products round alike."""
        fixed = {}
        for value, found in self.reader.read.items():
            ways = {None if one is None else one.fixed for one in found}
            way = ways.pop() if len(ways) == 1 else None
            if way is not None:
                fixed[value] = way
        return fixed

    def _output(self, name: str, value: Value) -> Output:
        self.reader.node, self.reader.inputs = OnnxNode("output", "", name, [name], [], {}), [value]
        if isinstance(value, Seen) and value.kind == "column" and labels(value.axes) == "b,s" and len(value.axes) == 2:
            return Output(name, "column", value.value, value.extra)
        seen = self.reader.rows(value)
        if labels(seen.axes) not in ("b,s,n", "b,n") or not all(seen.axes):
            raise self.reader.fail("an output is [batch, sequence, columns] or [batch, columns]")
        return Output(name, seen.kind, seen.value)

    def _step(self, node: OnnxNode) -> None:
        inputs: list[Value | None] = []
        broken: EncastError | None = None
        for name in node.inputs:
            value = self._value(name, node.label) if name else None
            if isinstance(value, EncastError):
                broken = broken or value
            else:
                inputs.append(value)
        outputs: list[Value] = []
        if broken is None:
            try:
                outputs = self._meaning(node, inputs)
            except _TooMuchError:
                raise
            except EncastError as error:
                # Another output of the file may do without this node: a pooler's, say. The error is kept without the
                # frames that it came through, which hold the arrays that were computed there.
                broken = error.with_traceback(None)
                broken.__context__ = None
        for place, name in enumerate(node.outputs):
            if name and broken is None and place >= len(outputs):
                broken = UnsupportedModelError(
                    f"{self.model.where}: {node.label}: its output {place} is not read; the first {len(outputs)} are"
                )
            if name:
                self._define(name, outputs[place] if broken is None else broken)

    def _meaning(self, node: OnnxNode, inputs: list[Value | None]) -> list[Value]:
        reader = self.reader
        reader.node, reader.inputs = node, inputs
        if node.domain == MICROSOFT and (node.domain, node.op) not in self.model.functions:
            return take_apart(reader, node, inputs, self._meaning)
        if node.domain not in ("", "ai.onnx"):
            what = (
                "a function of the file" if (node.domain, node.op) in self.model.functions else "no op of ONNX itself"
            )
            raise UnsupportedModelError(
                f"{self.model.where}: {node.label} of {quote(node.domain)} is {what}; standard ops, and those "
                f"of {quote(MICROSOFT)}, are read: export the model without functions and without graph optimisations"
            )
        known = [one for one in inputs if isinstance(one, Known)]
        if len(known) == sum(one is not None for one in inputs):
            if node.op == "Gather" and len(known) == 2 and known[0].constant and self._of_tokens(known[1]):
                first = node.attributes.get("axis", 0) == 0
                rows = (quantised.rows_in_bytes(*known) or look_up(reader, *known)) if first else None
                if rows is not None:
                    return rows
            if node.op == "MatMul" and len(known) == 2 and known[0].source.startswith(ONE_HOT) and known[1].constant:
                rows = look_up_one_hot(reader, known[1], known[0])
                if rows is not None:
                    return rows
            source = self._source(node, inputs)
            arrays = [one.array if isinstance(one, Known) else None for one in inputs]
            constant = all(one.constant for one in known)
            if node.op == "DequantizeLinear" and constant:
                return [quantised.weight(reader)]
            lifted = lift(reader, known) if known else None
            if isinstance(lifted, Seen):
                return self._handled(node, [lifted, *inputs[1:]])
            made = quantised.fold(reader) or fold(node, arrays, self.model.opset)
            if made is not None:
                if not self._of_file(node, known):
                    given = [one.array for one in known]
                    self.computed += sum(
                        _held(array) for array in made if not any(np.may_share_memory(array, one) for one in given)
                    )
                if self.computed > _MOST_BYTES:
                    raise _TooMuchError(
                        f"{self.model.where}: computes more than {_MOST_BYTES} bytes of masks and sizes, by "
                        f"{node.label}, which no encoder does; export the unchanged model of transformers, or compile "
                        "its checkpoint"
                    )
                name = known[0].name if len(known) > 0 and len(made) == 1 else ""
                return [Known(array, constant, name, source) for array in made]
        elif node.op in HANDLERS:
            return self._handled(node, inputs)
        quantised.refuse_operators(reader)
        raise reader.fail(f"{quote(node.op)} is not read here; ops on rows are {', '.join(sorted(HANDLERS))}")

    def _of_tokens(self, index: Known) -> bool:
        """Whether an index may be that of the tokens of a text; with a fixed length positions are a constant."""
        probe = self.reader.probe
        return not index.constant or (probe.fixed and index.array.shape[-1:] == probe.ids.shape[1:])

    def _handled(self, node: OnnxNode, inputs: list[Value | None]) -> list[Value]:
        """The outputs of a node of which an input is no known array."""
        reader = self.reader
        reader.inputs = inputs
        try:
            if quantised.waits(reader):
                return quantised.moved(reader)
            return HANDLERS[node.op](reader)
        except (ValueError, IndexError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise CheckpointError(
                f"{self.model.where}: {node.label} does not fit its inputs "
                f"({', '.join('nothing' if one is None else one.meaning for one in inputs)}): {error}"
            ) from None

    def _of_file(self, node: OnnxNode, known: list[Known]) -> bool:
        """Whether a node of known values makes no more than the elements of the file: a weight, or a cast of one."""
        if node.op not in ("Cast", "QuantizeLinear") or not known[0].constant:
            return node.op == "Constant"
        tensor = self.model.initializers.get(known[0].name)
        if tensor is None or known[0].array.size != math.prod(tensor.shape):  # spread, or a part
            return False
        made = (known[0].name, node.op, str(node.attributes.get("to")))
        first = made not in self.cast
        self.cast.add(made)
        return first

    def _source(self, node: OnnxNode, inputs: list[Value | None]) -> str:
        """The input that a node of known values hands on as it is; "" if it is none.

        Token ids may be looked up, compared with a number, and asked for their shape. Whatever else is made of them
        could be what it seems for the probe's ids alone.
        """
        names = [one.source if isinstance(one, Known) else "" for one in inputs]
        first = names[0] if names else ""
        if "input_ids" in names[1:] and (node.op, names.index("input_ids")) not in (("Equal", 1), ("CastLike", 1)):
            raise self.reader.fail("token ids are looked up in a table of words, or compared with a padding id")
        if node.op == "OneHot" and first in ("input_ids", "token_type_ids") and _is_plain(node, inputs):
            return ONE_HOT + first
        if node.op in _RESHAPING or (node.op == "Cast" and node.attributes.get("to") in _EXACT):
            return first
        if node.op == "Equal" and "input_ids" in names:
            self._note_special([one for one, name in zip(inputs, names, strict=True) if name != "input_ids"])
        elif first == "input_ids" and node.op not in ("Shape", "Size"):
            raise self.reader.fail("token ids are looked up in a table of words, or compared with a padding id")
        return ""

    def _note_special(self, others: list[Value | None]) -> None:
        """A comparison of token ids with a number: the probe must have tokens of that id."""
        number = self.reader.scalar(others[0]) if len(others) == 1 else None
        if number is None:
            raise self.reader.fail("token ids are compared with one number")
        # No token has an id that is no integer, or beyond 31 bits.
        if math.isfinite(number) and number.is_integer() and 0 <= number < 1 << 31:
            value = int(number)
            if value not in self.reader.probe.special:
                raise SpecialIdFoundError(value)


def _is_plain(node: OnnxNode, inputs: list[Value | None]) -> bool:
    """Whether OneHot puts 0 and 1 along a last axis of its own."""
    index, values = inputs[0], inputs[2] if len(inputs) > 2 else None
    last = isinstance(index, Known) and node.attributes.get("axis", -1) in (-1, index.array.ndim)
    return last and isinstance(values, Known) and values.array.tolist() == [0, 1]


def _held(array: np.ndarray[Any, Any]) -> int:
    """Bytes of an array, those that are spread counted once."""
    sizes: list[int] = [size for size, stride in zip(array.shape, array.strides, strict=True) if stride != 0]
    return int(array.itemsize) * math.prod(sizes)
