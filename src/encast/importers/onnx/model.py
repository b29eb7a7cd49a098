"""The messages of an ONNX file that importers need: nodes, attributes, inputs, outputs, initializers.

Source: onnx.proto (github.com/onnx/onnx, IR versions 3 to 13). Messages inside of messages are read to the depth that
the schema of an encoder has; a graph inside of an attribute (If, Loop) is only noticed, never entered.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers.files import Folder, MappedFile, quote, refuse_pointer
from encast.importers.onnx.tensors import OnnxTensor, bounded, numbers_of, read_tensor, rounding_of
from encast.importers.protobuf import MALFORMED, Bytes, fields, integer, message, text

__all__ = ["Input", "Model", "OnnxNode", "read_model"]

_OLDEST, _NEWEST = 11, 23
_MOST_NODES = 1 << 17
"""An encoder of 24 layers, exported without any folding, has less than 10,000."""
_MOST_OUTPUTS = 256
"""One of 24 layers with all hidden states and attentions has about 50."""


@dataclass(frozen=True)
class Subgraph:
    """An attribute that holds a graph, whose content is not read."""


@dataclass(frozen=True)
class OnnxNode:
    """``attributes``: name → int, float, str, ``OnnxTensor``, ``Subgraph`` or a list of numbers.

    ``part_of``: the op of the node of the file, where that is taken apart into several.
    """

    op: str
    domain: str
    name: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any]
    part_of: str = ""

    @property
    def label(self) -> str:
        """What messages call the node."""
        return f"node {quote(self.name or (self.outputs[0] if self.outputs else ''))} ({self.part_of or self.op})"


@dataclass(frozen=True)
class Input:
    """``shape``: a number where the file fixes one, else None; None as a whole where the file says nothing."""

    name: str
    dtype: int
    shape: tuple[int | None, ...] | None


@dataclass
class Model:
    """A file, ``opset`` being that of the standard ops and ``domains`` the versions of all others."""

    where: str
    opset: int = 0
    domains: dict[str, int] = field(default_factory=dict)
    nodes: list[OnnxNode] = field(default_factory=list)
    initializers: dict[str, OnnxTensor] = field(default_factory=dict)
    inputs: list[Input] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    functions: set[tuple[str, str]] = field(default_factory=set)

    @property
    def rounding(self) -> float:
        """How far, relatively, constants may be from what they were rounded from: 0 where no node reads 16 bits."""
        tensors, casts = [], []
        for node in self.nodes:
            tensors += [self.initializers[name] for name in node.inputs if name in self.initializers]
            tensors += [one for one in node.attributes.values() if isinstance(one, OnnxTensor)]
            casts += [node.attributes.get("to")] if node.op == "Cast" else []
        return max([0.0, *(one.rounding for one in tensors), *(rounding_of(one) for one in casts)])


def read_model(folder: Folder, name: str) -> Model:
    """The model of a file of ``folder``; tensors are checked against the sizes of what holds them, and not read.

    Raises ``CheckpointError`` for damage and ``UnsupportedModelError`` for what no encoder needs.
    """
    where = str(folder.path(name))
    mapped = folder.map(name)
    refuse_pointer(mapped.bytes[:32], where)
    try:
        return _read_model(folder, mapped, where)
    except MALFORMED as error:
        raise CheckpointError(f"{where}: no ONNX file, or a damaged one ({error}); export or fetch it again") from None


def _read_model(folder: Folder, mapped: MappedFile, where: str) -> Model:
    model = Model(where)
    graphs = 0
    for number, value in fields(memoryview(mapped.bytes)):
        if number == 7:
            graphs += 1
            _read_graph(model, message(value), folder)
        elif number == 8:
            domain, version = "", 0
            for inner, item in fields(message(value)):
                if inner == 1:
                    domain = text(item)
                elif inner == 2:
                    version = integer(item)
            if domain in ("", "ai.onnx"):
                model.opset = version
            else:
                model.domains[domain] = version
        elif number == 25:
            parts = {inner: text(item) for inner, item in fields(message(value)) if inner in (1, 10)}
            model.functions.add((parts.get(10, ""), parts.get(1, "")))
    if graphs != 1 or not model.outputs:
        raise CheckpointError(
            f"{where}: holds {graphs} graphs with {len(model.outputs)} outputs; no ONNX model has that"
        )
    if not _OLDEST <= model.opset <= _NEWEST:
        raise UnsupportedModelError(
            f"{where}: the ops are those of opset {model.opset}; {_OLDEST} to {_NEWEST} are read: export it again "
            "with one"
        )
    return model


def _read_graph(model: Model, data: Bytes, folder: Folder) -> None:
    for number, value in fields(data):
        if number == 1:
            if len(model.nodes) == _MOST_NODES:
                raise UnsupportedModelError(f"{model.where}: more than {_MOST_NODES} nodes, which no encoder has")
            model.nodes.append(_read_node(message(value), model.where))
        elif number == 5:
            tensor = read_tensor(message(value), folder, model.where)
            if not tensor.name or tensor.name in model.initializers:
                raise CheckpointError(f"{model.where}: the initializer {quote(tensor.name)} is there twice or nameless")
            model.initializers[tensor.name] = tensor
        elif number == 11:
            model.inputs.append(_read_input(message(value)))
        elif number == 12:
            if len(model.outputs) == _MOST_OUTPUTS:
                raise UnsupportedModelError(f"{model.where}: more than {_MOST_OUTPUTS} outputs, which no encoder has")
            model.outputs.append(_read_input(message(value)).name)
        elif number == 15:
            raise UnsupportedModelError(
                f"{model.where}: has sparse initializers; weights must be dense: export the model without them"
            )


def _read_node(data: Bytes, where: str) -> OnnxNode:
    names: dict[int, str] = {}
    inputs: list[str] = []
    outputs: list[str] = []
    attributes: dict[str, Any] = {}
    for number, value in fields(data):
        if number == 1:
            inputs.append(text(value))
        elif number == 2:
            outputs.append(text(value))
        elif number in (3, 4, 7):
            names[number] = text(value)
        elif number == 5:
            name, content = _read_attribute(message(value), where)
            if name in attributes:
                raise CheckpointError(f"{where}: a node has the attribute {quote(name)} twice")
            attributes[name] = content
    return OnnxNode(names.get(4, ""), names.get(7, ""), names.get(3, ""), inputs, outputs, attributes)


def _read_attribute(data: Bytes, where: str) -> tuple[str, Any]:
    name, kind = "", 0
    found: dict[int, Any] = {}
    numbers: list[int] = []
    floats: list[float] = []
    for number, value in fields(data):
        if number == 1:
            name = text(value)
        elif number == 20:
            kind = integer(value)
        elif number == 2:
            found[1] = struct.unpack("<f", message(value))[0]
        elif number == 3:
            found[2] = signed(integer(value))
        elif number == 4:
            found[3] = bytes(message(value)).decode("utf-8", "replace")
        elif number == 5:
            found[4] = read_tensor(message(value), None, where)
        elif number in (6, 11):
            found[5] = Subgraph()
        elif number == 7:
            bounded(floats, (one[0] for one in struct.iter_unpack("<f", message(value))), where)
        elif number == 8:
            bounded(numbers, numbers_of(value), where)
        elif number == 21:
            raise CheckpointError(f"{where}: the attribute {quote(name)} refers to a function's, outside of a function")
    if kind == 6 or floats:
        return name, floats
    if kind == 7 or numbers:
        return name, numbers
    # Zero is left out by writers that follow proto3; ``kind`` then says what it is.
    defaults = {1: 0.0, 2: 0, 3: ""}
    return name, next(iter(found.values()), defaults.get(kind))


def signed(value: int) -> int:
    """A varint as the int64 that it stands for."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _read_input(data: Bytes) -> Input:
    name, dtype = "", 0
    shape: tuple[int | None, ...] | None = None
    for number, value in fields(data):
        if number == 1:
            name = text(value)
        elif number == 2:
            for inner, kind in fields(message(value)):
                if inner == 1:
                    for part, content in fields(message(kind)):
                        if part == 1:
                            dtype = integer(content)
                        elif part == 2:
                            dims = [message(dim) for key, dim in fields(message(content)) if key == 1]
                            shape = tuple(_fixed(dim) for dim in dims)
    return Input(name, dtype, shape)


def _fixed(dim: Bytes) -> int | None:
    return next((signed(integer(value)) for number, value in fields(dim) if number == 1), None)
