"""Graph to steps: a function for each node, its constants on the device, and when each value is dropped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from encast.backends.gpu.packed import Packed
from encast.backends.gpu.steps.attention import with_margins
from encast.backends.gpu.steps.context import Context, Step
from encast.backends.gpu.steps.narrow import f8_rows
from encast.backends.gpu.steps.products import Int8Weight
from encast.errors import UnsupportedModelError
from encast.ir.graph import Graph, Node
from encast.ir.ops import OPS
from encast.ir.relative import unpack_distances
from encast.ir.types import ValueType

__all__ = ["Program", "Signature", "build"]

Array = np.ndarray[Any, Any]

_HANDING = threading.Lock()
"""Held while a program hands its steps to a card: in what products are summed is a setting of the process, which one
with sums in f16 changes (``half_product``). CUDA graphs keep what was set when they were captured."""

_PRODUCTS = ("linear", "linear_bf16")
_TABLES = {("embedding", 1), ("embed_layer_norm", 2), ("embed_layer_norm", 3), ("embed_layer_norm", 4)}


@dataclass(frozen=True)
class Signature:
    """What a step computes: the op of the node ``name``, its attributes, the types of its operands (None for an absent
    one) and results. ``fixed``: which operands are constants. ``maker``: whose step it is, "Triton" or "PyTorch"."""

    name: str
    op: str
    attrs: Mapping[str, Any]
    operands: tuple[ValueType | None, ...]
    results: tuple[ValueType, ...]
    fixed: frozenset[int]
    maker: str


@dataclass(frozen=True)
class _Call:
    """A step with its constants: ``run(context, *values)``. ``reads``: "" for a value that is absent."""

    signature: Signature
    run: Callable[..., Any]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    frees: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """The steps to one output. ``by_length``: whether any of them goes by the lengths of the batch on the host;
    ``selects``: whether any reads ``select``; ``half_sums``: see ``Context``."""

    calls: tuple[_Call, ...]
    output: str
    stored: torch.dtype
    by_length: bool
    selects: bool
    half_sums: bool

    @property
    def signatures(self) -> list[Signature]:
        """Of the steps, in order."""
        return [call.signature for call in self.calls]

    def run(self, batch: Packed, after: Callable[[], None] = lambda: None) -> torch.Tensor:
        """The output on the device, in the dtype that values are stored in. Waits for nothing but the lengths' copy.

        ``after`` is called when a step was given to the device.
        """
        if self.by_length:
            batch.groups()  # waits for this card, which no other card's program need do
        with _HANDING if batch.token_ids.is_cuda else nullcontext():
            return self._run(batch, after)

    def _run(self, batch: Packed, after: Callable[[], None]) -> torch.Tensor:
        context = Context(batch, self.stored, self.half_sums)
        values: dict[str, Any] = {
            "": None,
            "token_ids": batch.token_ids,
            "token_type_ids": batch.token_type_ids,
            "select": batch.select,
        }
        for call in self.calls:
            made = call.run(context, *(values[name] for name in call.reads))
            values.update(zip(call.writes, made if isinstance(made, tuple) else (made,), strict=True))
            for name in call.frees:
                del values[name]
            after()
        made = values[self.output]
        assert isinstance(made, torch.Tensor)
        return made


def build(
    graph: Graph, steps: Mapping[str, Step], stored: torch.dtype, device: torch.device, *, half_sums: bool = False
) -> tuple[dict[str, Program], dict[str, str]]:
    """For every public output its program, and for every op of the graph whose step it is, "Triton" or "PyTorch".

    ``graph`` is adapted and has its arrays. Constants that several steps read in one form are on the device once.
    Raises ``UnsupportedModelError`` for an op without a step, before anything is on the device.
    """
    for node in graph.nodes:
        if node.op not in steps:
            raise UnsupportedModelError(
                f"node {node.name!r}: {node.op} has no step of its own on this device; it is computed only as part of "
                "a fusion, which did not match. See: encast inspect"
            )
    constants = _Constants(graph, stored, device)
    bound = {id(node): _bind(node, steps[node.op], constants) for node in graph.nodes}
    programs = {
        public: _program(graph, value, bound, steps, stored, half_sums) for public, value in graph.outputs.items()
    }
    return programs, {node.op: _maker(steps[node.op]) for node in graph.nodes}


def _maker(step: Step) -> str:
    return "Triton" if ".kernels." in step.__module__ else "PyTorch"


def _signature(graph: Graph, node: Node, step: Step) -> Signature:
    return Signature(
        node.name,
        node.op,
        dict(node.attrs),
        tuple(graph.type_of(name) if name else None for name in node.inputs),
        tuple(graph.type_of(name) for name in node.outputs),
        frozenset(place for place, name in enumerate(node.inputs) if name in graph.constants),
        _maker(step),
    )


def _bind(node: Node, step: Step, constants: _Constants) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """The step with constants and attributes in their places, and the values that it still takes."""
    names = [*node.inputs, *[""] * (len(OPS[node.op].inputs) - len(node.inputs))]
    fixed = {place: constants.of(node, place) for place, name in enumerate(names) if name in constants.graph.constants}
    reads = tuple(name for place, name in enumerate(names) if place not in fixed)
    return partial(_call, step, fixed, len(names), dict(node.attrs)), reads


def _call(
    step: Step, fixed: Mapping[int, Any], count: int, attrs: Mapping[str, Any], context: Context, *values: Any
) -> Any:
    left = iter(values)
    return step(context, *(fixed[place] if place in fixed else next(left) for place in range(count)), **attrs)


def _program(
    graph: Graph,
    output: str,
    bound: Mapping[int, tuple[Callable[..., Any], tuple[str, ...]]],
    steps: Mapping[str, Step],
    stored: torch.dtype,
    half_sums: bool,
) -> Program:
    needed, nodes = {output}, []
    for node in reversed(graph.nodes):
        if needed.intersection(node.outputs):
            needed.update(node.inputs)
            nodes.append(node)
    nodes.reverse()
    last = {name: index for index, node in enumerate(nodes) for name in (*node.outputs, *bound[id(node)][1])}
    frees: list[list[str]] = [[] for _ in nodes]
    for name, index in last.items():
        if name not in ("", output):
            frees[index].append(name)
    calls = tuple(
        _Call(_signature(graph, node, steps[node.op]), *bound[id(node)], tuple(node.outputs), tuple(done))
        for node, done in zip(nodes, frees, strict=True)
    )
    by_length = any(steps[node.op].by_length for node in nodes)
    return Program(calls, output, stored, by_length, "select" in needed, half_sums)


class _Constants:
    """The constants of a graph on the device, each in the form that its reader wants."""

    def __init__(self, graph: Graph, stored: torch.dtype, device: torch.device) -> None:
        self.graph, self.stored, self.device = graph, stored, device
        self._made: dict[tuple[str, str], Any] = {}

    def of(self, node: Node, place: int) -> Any:
        name, op = node.inputs[place], node.op.removesuffix("_narrow")
        form = self._form(node, op, place)
        if (name, form) not in self._made:
            self._made[name, form] = self._make(name, form)
        return self._made[name, form]

    def _form(self, node: Node, op: str, place: int) -> str:
        if op == "linear_int8" and place == 1:
            return "int8"
        if op == "linear_f8" and place == 1:
            return "f8"
        if op == "attention" and place == 1:
            return "bias"
        if op == "disentangled_attention":
            heads = node.attrs["heads"]
            columns = self.graph.type_of(node.inputs[0]).shape[1]
            assert isinstance(columns, int)
            return f"distances {1 if node.attrs['shared'] else heads} {columns // 3 // heads}"
        if op in _PRODUCTS and self.stored == torch.float32:
            return "wide" if op == "linear" or place == 2 else "bf16"
        return "stored" if op in _PRODUCTS or (op, place) in _TABLES else "wide"

    def _make(self, name: str, form: str) -> Any:
        constant = self.graph.constants[name]
        array = constant.array
        if form.startswith("distances"):
            heads, size = map(int, form.split()[1:])
            return self._tensor(unpack_distances(array, heads, size))
        tensor = self._tensor(array)
        if constant.type.dtype == "bf16":
            tensor = tensor.view(torch.bfloat16)
        if form == "int8":
            return Int8Weight(tensor)
        if form == "bias":
            return with_margins(tensor)
        if form == "f8":
            return f8_rows(tensor)
        dtypes = {"wide": torch.float32, "bf16": torch.bfloat16, "stored": self.stored}
        return tensor.to(dtypes[form]) if tensor.is_floating_point() else tensor

    def _tensor(self, array: Array) -> torch.Tensor:
        # uint16 are the bits of bf16, which PyTorch views signed integers as.
        array = array.view(np.int16) if array.dtype == np.uint16 else array
        return torch.from_numpy(np.require(array, requirements=["C", "W"])).to(self.device)
