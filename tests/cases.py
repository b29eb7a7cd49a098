"""The cases of ``checkpoints.CASES``, made, opened and built once a session, with their golden outputs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import CASES, Case, digest, inputs_of, make_case

from encast.archs import build_graph
from encast.backends.reference import Reference
from encast.batch import Batch
from encast.importers import open_checkpoint
from encast.ir import Graph
from encast.ir.meta import HEADS

__all__ = ["CASES", "GOLDEN", "Opened", "keys_of", "open_case", "task_of"]

GOLDEN = Path(__file__).parent / "golden"
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Opened:
    """A case: its checkpoint's folder, the plain graph built from it, and the request that its golden file answers."""

    case: Case
    folder: Path
    graph: Graph
    batch: Batch
    select: Array | None
    output: str

    def golden_array(self, name: str) -> Array:
        return _golden(self.case.name)[name]

    def golden(self, precision: str) -> Array:
        """What transformers answered, ``precision`` "f64" or "f32"; compare it with ``kept`` values."""
        return self.golden_array(f"{self.output}_{precision}")

    def kept(self, value: Array) -> Array:
        """The rows of an output that the golden file holds."""
        return value[self.golden_array("rows")] if self.output == "last_hidden_state" else value

    def evaluate(self, graph: Graph | None = None, **options: Any) -> Array:
        """The reference's output for this case, its kept rows."""
        graph = graph or self.graph
        name = graph.outputs[self.output]
        return self.kept(Reference(graph).values([name], self.batch, self.select, **options)[name])

    def values(self) -> dict[str, Any]:
        return Reference(self.graph).values([self.graph.outputs[self.output]], self.batch, self.select)


def keys_of(graph: Graph) -> list[str]:
    """The keys of every layer as its projection makes them, before their positions turn them."""
    names = [node.inputs[1] for node in graph.nodes if node.op == "attention_scores"]
    turned = {node.outputs[0]: node.inputs[0] for node in graph.nodes if node.op == "rotary"}
    return [turned.get(name, name) for name in names]


def task_of(case: Case) -> str | None:
    """What to ask ``build_graph`` for: a bare encoder says nothing of embeddings, a masked-LM of sparse ones."""
    return case.head if case.head in ("embed", "embed_sparse") else None


def open_case(name: str, factory: pytest.TempPathFactory) -> Opened:
    return _open(name, factory.getbasetemp())


@functools.cache
def _open(name: str, base: Path) -> Opened:
    case = CASES[name]
    folder = make_case(base / "checkpoints", case)
    if digest(folder) != str(_golden(name)["digest"]):
        pytest.fail(f"the maker no longer makes the checkpoint of tests/golden/{name}.npz; run tests/make_golden.py")
    graph = build_graph(open_checkpoint(folder), task_of(case))
    inputs = inputs_of(case)
    batch = Batch.of(inputs.token_ids, inputs.token_type_ids)
    select = np.array(inputs.select, np.int32) if case.head == "fill_mask" else None
    output = (HEADS[case.head] or ("last_hidden_state",))[0]
    return Opened(case, folder, graph, batch, select, output)


@functools.cache
def _golden(name: str) -> dict[str, Array]:
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return dict(arrays)
