"""How a SavedModel is run that was read: for a comparison with what was made of it, which another part does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from encast.importers.meta_graph import MetaGraph, Shape
from encast.importers.model_inputs import Inputs, meaning
from encast.importers.weights import StoredTensor

__all__ = ["SAVED_MODEL", "SavedModel", "describe"]

SAVED_MODEL = "saved_model.pb"
_USUAL = "serving_default"
_UNUSED = ("label_ids", "unique_ids", "is_real_example")
"""Inputs that google-research/bert's signatures have, and its predictions do not depend on."""


@dataclass(frozen=True)
class SavedModel:
    """``tags`` choose the graph, ``signature`` is the one that takes token ids, "" where none does. ``unused``: inputs
    of it that no answer depends on; ``unknown``: those that may mean anything. ``offered``: what the signatures take.
    ``arithmetic``: what it is computed in, ``f32``, or ``f16`` (bf16 too)."""

    folder: Path
    tags: tuple[str, ...]
    signature: str
    inputs: Inputs
    unused: tuple[str, ...]
    unknown: tuple[str, ...]
    offered: str
    arithmetic: str


def describe(folder: Path, graph: MetaGraph, variables: Iterable[StoredTensor]) -> SavedModel:
    narrow = any(one.dtype in ("F16", "BF16") for one in variables)
    able = [
        name
        for name, signature in graph.signatures.items()
        if "input_ids" in [meaning(one) for one in signature.inputs]
    ]
    chosen = min(able, key=lambda name: (name != _USUAL, name), default="")
    shapes = dict(graph.signatures[chosen].inputs) if chosen else {}
    names = {name: what for name in shapes if (what := meaning(name)) is not None}
    sizes = [_sizes(shapes[name]) for name in names]
    sequences, positions = (next((one[axis] for one in sizes if one[axis] is not None), None) for axis in (0, 1))
    others = [name for name in shapes if name not in names]
    offered = [f"{name} ({', '.join(signature.inputs)})" for name, signature in sorted(graph.signatures.items())]
    return SavedModel(
        folder=folder,
        tags=tuple(sorted(graph.tags)),
        signature=chosen,
        inputs=Inputs(names, sequences, positions),
        unused=tuple(name for name in others if name in _UNUSED),
        unknown=tuple(name for name in others if name not in _UNUSED),
        offered=", ".join(offered)[:200] or "nothing",
        arithmetic="f16" if narrow else "f32",
    )


def _sizes(shape: Shape) -> tuple[int | None, int | None]:
    return (shape[0], shape[1]) if shape is not None and len(shape) == 2 else (None, None)
