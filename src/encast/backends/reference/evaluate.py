"""Runs a graph through the evaluators of its ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from encast.backends.base import Float32, check_request
from encast.backends.reference.ops import EVALUATORS, Context, Float64
from encast.batch import Batch, Int32
from encast.errors import GraphError
from encast.ir import OPS, Graph, Node, verify
from encast.ir.types import ValueType

__all__ = ["Reference", "constant_value", "needed_nodes"]


class Reference:
    """Evaluates a graph whose constants hold their arrays, in float64.

    Values of dtype f32 and bf16 are float64 arrays (bf16 ones hold bf16 numbers exactly), i32 are int arrays,
    q8 are ``Quantized``. ``quantize`` and ``cast_bf16`` first round their operand to f32, as kernels see it.
    """

    def __init__(self, graph: Graph) -> None:
        """Raises ``GraphError`` for a broken graph and for one without arrays (an opened artifact)."""
        verify(graph)
        for name, constant in graph.constants.items():
            if constant.array.shape != constant.type.shape:
                raise GraphError(
                    f"constant {name!r} ({constant.type}) has no array; the reference needs a graph from a checkpoint, "
                    "not from an artifact"
                )
        self.graph = graph
        self._types = {public: graph.type_of(value) for public, value in graph.outputs.items()}

    def run(self, output: str, batch: Batch, select: Int32 | None = None) -> Float32:
        """See ``Runnable.run``."""
        return self.evaluate(output, batch, select).astype(np.float32)

    def close(self) -> None:
        """See ``Runnable.close``: the arrays go with the object."""

    def evaluate(self, output: str, batch: Batch, select: Int32 | None = None) -> Float64:
        """As ``run``, without the final rounding to f32."""
        check_request(self.graph.meta, self._types, output, batch, select)
        value = self.graph.outputs[output]
        result: Float64 = self.values([value], batch, select)[value]
        return result

    def values(
        self,
        names: Iterable[str],
        batch: Batch,
        select: Int32 | None = None,
        evaluators: dict[str, Callable[..., Any]] | None = None,
    ) -> dict[str, Any]:
        """All values that were computed on the way to ``names``, by name; constants and inputs included.

        ``evaluators`` replaces the table of op evaluators, which lets tests break one on purpose.
        """
        table = evaluators or EVALUATORS
        context = Context(batch.cu_seqlens)
        made: dict[str, Any] = {"token_ids": batch.token_ids, "select": select}
        made["token_type_ids"] = (
            np.zeros_like(batch.token_ids) if batch.token_type_ids is None else batch.token_type_ids
        )
        for node in needed_nodes(self.graph, names):
            for name in node.inputs:
                if name in self.graph.constants and name not in made:
                    constant = self.graph.constants[name]
                    made[name] = constant_value(constant.type, constant.array)
            operands = [made[name] if name else None for name in node.inputs]
            operands += [None] * (len(OPS[node.op].inputs) - len(operands))
            results = table[node.op](context, *operands, **node.attrs)
            made.update(zip(node.outputs, results if isinstance(results, tuple) else (results,), strict=True))
        return made

    def watch(
        self, names: Iterable[str], batch: Batch, select: Int32 | None, see: Callable[[str, Float64], None]
    ) -> None:
        """Calls ``see(name, value)`` for each of ``names`` once it is computed; no value is kept after its last reader.

        ``names`` are made by nodes. Nothing of the request is checked.
        """
        names = frozenset(names)
        nodes = needed_nodes(self.graph, names)
        last = {name: index for index, node in enumerate(nodes) for name in node.inputs}
        context = Context(batch.cu_seqlens)
        types = np.zeros_like(batch.token_ids) if batch.token_type_ids is None else batch.token_type_ids
        made: dict[str, Any] = {"token_ids": batch.token_ids, "token_type_ids": types, "select": select, "": None}
        for index, node in enumerate(nodes):
            inputs = node.inputs + [""] * (len(OPS[node.op].inputs) - len(node.inputs))
            constants = {
                name: constant_value(constant.type, constant.array)
                for name in inputs
                if (constant := self.graph.constants.get(name)) is not None
            }
            results = EVALUATORS[node.op](context, *({**made, **constants}[name] for name in inputs), **node.attrs)
            made.update(zip(node.outputs, results if isinstance(results, tuple) else (results,), strict=True))
            for name in names.intersection(node.outputs):
                see(name, made[name])
            for name in node.inputs:
                if last[name] == index and name:
                    made.pop(name, None)


def needed_nodes(graph: Graph, names: Iterable[str]) -> list[Node]:
    """The nodes that ``names`` depend on, in order; so ``last_hidden_state`` never asks for ``select``."""
    needed = set(names)
    kept = []
    for node in reversed(graph.nodes):
        if needed.intersection(node.outputs):
            needed.update(node.inputs)
            kept.append(node)
    return kept[::-1]


def constant_value(type: ValueType, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A constant as the evaluators take it: float64 for f32 and bf16 (stored as uint16 bits), else as it is."""
    if type.dtype == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64) if type.dtype == "f32" else array
