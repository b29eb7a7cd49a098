"""The graph: nodes in execution order over named values, with a readable text form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from encast.errors import GraphError
from encast.ir.integers import Integers
from encast.ir.meta import GraphMeta
from encast.ir.ops import OPS
from encast.ir.types import ValueType

__all__ = ["Constant", "Graph", "Node", "ValueType"]


@dataclass(frozen=True)
class Constant:
    """A weight: its type and its array.

    ``array`` may be a memory-mapped view; nothing may write to it. bf16 arrays are stored as
    uint16 bit patterns. ``integers``: of an f32 weight that was stored as 8-bit integers, these, row by row; whoever
    makes another array of it makes a constant without them.
    """

    type: ValueType
    array: np.ndarray[Any, Any]
    integers: Integers | None = None

    @staticmethod
    def of(array: np.ndarray[Any, Any], dtype: str | None = None) -> Constant:
        """Wraps an array; the dtype follows from it unless given (uint16 bits need ``"bf16"``)."""
        names = {"float32": "f32", "int8": "s8", "int32": "i32"}
        name = dtype or names.get(array.dtype.name)
        if name is None:
            raise GraphError(f"a constant of dtype {array.dtype} cannot be stored; {sorted(names)} can")
        return Constant(ValueType(name, array.shape), array)


@dataclass
class Node:
    """One step: ``outputs = op(inputs, attrs)``.

    ``inputs`` are names of values, constants or graph inputs; an absent operand is ``""``.
    ``name`` is the path of the module that it came from (``layer.3.attention.query``); ``layer`` is the
    index of the encoder layer, -1 outside of them.
    """

    op: str
    inputs: list[str]
    outputs: list[str]
    attrs: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    layer: int = -1


class Graph:
    """A program over packed batches.

    ``inputs``: name to type; always ``token_ids`` and, if used, ``token_type_ids`` and ``select``.
    ``constants``: name to ``Constant``. ``nodes``: topological order. ``outputs``: public name
    (``last_hidden_state``, ``embedding``, ``logits``) to value name. ``fixed``: of a plain graph whose checkpoint fixes
    how products round what they read, by the value: scale and zero point of its unsigned bytes. ``meta``: the facts
    that later stages need; who builds a graph sets it last, when its layers are known.
    """

    meta: GraphMeta

    def __init__(self) -> None:
        self.inputs: dict[str, ValueType] = {}
        self.constants: dict[str, Constant] = {}
        self.nodes: list[Node] = []
        self.outputs: dict[str, str] = {}
        self.values: dict[str, ValueType] = {}
        self.fixed: dict[str, tuple[float, int]] = {}

    # Building

    def add_input(self, name: str, type: ValueType) -> str:
        self._claim(name)
        self.inputs[name] = type
        return name

    def add_constant(
        self, name: str, array: np.ndarray[Any, Any], dtype: str | None = None, integers: Integers | None = None
    ) -> str:
        self._claim(name)
        constant = Constant.of(array, dtype)
        self.constants[name] = Constant(constant.type, constant.array, integers)
        return name

    def add(self, op: str, *inputs: str, name: str, layer: int = -1, **attrs: Any) -> str:
        """Appends a node with one output, which is named like the node, and returns that name."""
        return self.append(Node(op, list(inputs), [name], attrs, name, layer))[0]

    def append(self, node: Node) -> list[str]:
        """Appends a node, infers the types of its outputs, and returns their names."""
        for output in node.outputs:
            self._claim(output)
        types = self.infer(node)
        self.nodes.append(node)
        self.values.update(zip(node.outputs, types, strict=True))
        return node.outputs

    def _claim(self, name: str) -> None:
        if not name or name in self.inputs or name in self.constants or name in self.values:
            raise GraphError(f"the name {name!r} is empty or already taken")

    # Asking

    def type_of(self, name: str) -> ValueType:
        for table in (self.values, self.inputs):
            if name in table:
                return table[name]
        if name in self.constants:
            return self.constants[name].type
        raise GraphError(f"no value, constant or input is named {name!r}")

    def infer(self, node: Node) -> list[ValueType]:
        """The output types of a node by the op table; raises ``GraphError`` naming node and operand."""
        op = OPS.get(node.op)
        if op is None:
            raise GraphError(f"node {node.name!r}: no op is named {node.op!r}; the table has {sorted(OPS)}")
        if len(node.inputs) > len(op.inputs):
            raise GraphError(f"node {node.name!r}: {len(node.inputs)} operands, {node.op} takes {op.inputs}")
        padded = node.inputs + [""] * (len(op.inputs) - len(node.inputs))
        for operand, spec in zip(padded, op.inputs, strict=True):
            if not operand and not spec.endswith("?"):
                raise GraphError(f"node {node.name!r}: operand {spec!r} of {node.op} is absent")
        if set(node.attrs) != set(op.attrs):
            raise GraphError(f"node {node.name!r}: attributes {sorted(node.attrs)}, {node.op} has {sorted(op.attrs)}")
        for key, accepts in op.attrs.items():
            if not accepts(node.attrs[key]):
                raise GraphError(f"node {node.name!r}: attribute {key}={node.attrs[key]!r} is not acceptable")
        try:
            types = op.infer([self.type_of(name) if name else None for name in padded], node.attrs)
        except GraphError as error:
            raise GraphError(f"node {node.name!r} ({node.op}): {error}") from None
        if len(types) != len(node.outputs):
            raise GraphError(f"node {node.name!r}: {len(node.outputs)} outputs, {node.op} makes {len(types)}")
        return types

    def producer(self, value: str) -> Node | None:
        """The node that makes a value; None for inputs and constants."""
        for node in self.nodes:
            if value in node.outputs:
                return node
        return None

    def users(self, value: str) -> list[Node]:
        """The nodes that read a value, in order."""
        return [node for node in self.nodes if value in node.inputs]

    def is_output(self, value: str) -> bool:
        return value in self.outputs.values()

    # Changing (more in ``passes/patch.py``)

    def drop_unused(self) -> list[str]:
        """Removes nodes, constants and inputs that no output needs; returns the names of what went."""
        needed = set(self.outputs.values())
        kept: list[Node] = []
        for node in reversed(self.nodes):
            if needed.intersection(node.outputs):
                needed.update(name for name in node.inputs if name)
                kept.append(node)
        gone = [node.name for node in self.nodes if not needed.intersection(node.outputs)]
        gone += [name for name in (*self.constants, *self.inputs) if name not in needed and name != "token_ids"]
        self.nodes = kept[::-1]
        self.constants = {name: value for name, value in self.constants.items() if name in needed}
        self.inputs = {name: type for name, type in self.inputs.items() if name in needed or name == "token_ids"}
        produced = {output for node in self.nodes for output in node.outputs}
        self.values = {name: type for name, type in self.values.items() if name in produced}
        return gone

    def copy(self) -> Graph:
        """A graph that can be changed without touching this one; arrays are shared."""
        other = Graph()
        other.inputs, other.constants = dict(self.inputs), dict(self.constants)
        other.outputs, other.meta, other.values = dict(self.outputs), self.meta, dict(self.values)
        other.fixed = dict(self.fixed)
        other.nodes = [Node(n.op, list(n.inputs), list(n.outputs), dict(n.attrs), n.name, n.layer) for n in self.nodes]
        return other

    # Showing and storing

    def lines(self) -> Iterator[str]:
        """The readable form, a line a value."""
        for name, type in self.inputs.items():
            yield f"input {name}: {type}"
        for node in self.nodes:
            made = ", ".join(f"{output}: {self.values[output]}" for output in node.outputs)
            attrs = "".join(f" {key}={value}" for key, value in sorted(node.attrs.items()))
            read = ", ".join(name or "-" for name in node.inputs)
            yield f"{made} = {node.op}({read}){attrs}"
        for public, value in self.outputs.items():
            yield f"output {public} = {value}"

    def __str__(self) -> str:
        return "\n".join(self.lines()) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Everything but the arrays of the constants, as plain JSON data."""
        return {
            "inputs": {name: str(type) for name, type in self.inputs.items()},
            "constants": {name: str(constant.type) for name, constant in self.constants.items()},
            "nodes": [
                {
                    "op": node.op,
                    "inputs": node.inputs,
                    "outputs": node.outputs,
                    "attrs": node.attrs,
                    "name": node.name,
                    "layer": node.layer,
                }
                for node in self.nodes
            ],
            "outputs": self.outputs,
            "meta": self.meta.to_json(),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]) -> Graph:
        """The inverse of ``to_json``, with the constants' arrays by name; raises ``GraphError``.

        Constants absent from ``arrays`` (an artifact holds packed weights, not arrays) get an empty
        array that must not be read.
        """
        graph = Graph()
        try:
            for name, text in data["inputs"].items():
                graph.add_input(name, parse_type(text))
            for name, text in data["constants"].items():
                graph._claim(name)
                array = arrays[name] if name in arrays else np.empty(0, np.float32)
                graph.constants[name] = Constant(parse_type(text), array)
            for item in data["nodes"]:
                node = Node(
                    str(item["op"]),
                    [str(name) for name in item["inputs"]],
                    [str(name) for name in item["outputs"]],
                    dict(item["attrs"]),
                    str(item["name"]),
                    int(item["layer"]),
                )
                graph.append(node)
            for public, value in data["outputs"].items():
                graph.type_of(value)
                graph.outputs[public] = value
            graph.meta = GraphMeta.from_json(data["meta"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise GraphError(f"the graph is malformed: {type(error).__name__}: {error}") from None
        return graph


def parse_type(text: str) -> ValueType:
    """The inverse of ``str(ValueType)``; raises ``GraphError``."""
    from encast.ir.types import DTYPES, ROW_SYMBOLS

    dtype, bracket, rest = text.partition("[")
    dims = [dim.strip() for dim in rest[:-1].split(",")] if bracket and rest.endswith("]") else []
    shape: list[int | str] = []
    for dim in dims:
        if dim in ROW_SYMBOLS:
            shape.append(dim)
        elif dim.isdecimal() and 0 < int(dim) < 1 << 40:
            shape.append(int(dim))
        else:
            raise GraphError(f"{text!r} is no type: dimension {dim!r}")
    if dtype not in DTYPES or not shape:
        raise GraphError(f"{text!r} is no type; write dtype[dim, ...] with a dtype of {DTYPES}")
    return ValueType(dtype, tuple(shape))
