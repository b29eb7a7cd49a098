"""An export in the form of a checkpoint: what ``build_graph`` reads of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from encast.archs.heads import SentenceModules
from encast.archs.weights import Float32
from encast.errors import CheckpointError
from encast.ir import Constant, Graph, Integers

__all__ = ["Arrays", "Dense", "Pooled", "Shown", "Stored"]


@dataclass(frozen=True)
class Stored:
    """What a quantised export says besides numbers, by the names of the architecture.

    ``integers``: of weights. ``fixed``: by the value that products read, scale and zero point of its unsigned bytes.
    """

    integers: Mapping[str, Integers]
    fixed: Mapping[str, tuple[float, int]]

    def attach(self, graph: Graph) -> None:
        """Gives them to a graph of the architecture."""
        for name, integers in self.integers.items():
            constant = graph.constants.get(name)
            if constant is not None and constant.type.shape == integers.values.shape:
                graph.constants[name] = Constant(constant.type, constant.array, integers)
        graph.fixed = {value: fixed for value, fixed in self.fixed.items() if value in graph.values}


@dataclass(frozen=True)
class Arrays:
    """Tensors by the names of the architecture."""

    arrays: Mapping[str, Float32]

    def __contains__(self, name: object, /) -> bool:
        return name in self.arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def shape(self, name: str, /) -> Sequence[int]:
        return tuple(self.arrays[name].shape)

    def f32(self, name: str, /) -> Float32:
        array = np.ascontiguousarray(self.arrays[name])
        if array.size and not (np.isfinite(array.min()) and np.isfinite(array.max())):
            raise CheckpointError(f"the weight {name!r} of the export has values that are no finite numbers")
        return array


@dataclass(frozen=True)
class Dense:
    """A dense layer behind a pooling."""

    weight: Float32
    bias: Float32 | None
    activation: str


@dataclass(frozen=True)
class Pooled:
    """What of ``SentenceModules`` stands in the graph itself."""

    pooling_modes: tuple[str, ...]
    dense: Sequence[Dense]
    normalize: bool
    similarity: str | None = None
    splade: None = None
    late: None = None


@dataclass(frozen=True)
class Shown:
    """A checkpoint, as ``build_graph`` takes it."""

    path: Path
    config: Mapping[str, Any]
    config_file: str
    architecture: str
    tensors: Arrays
    modules: SentenceModules | None
    stored: Stored
    export: None = None
    token_form: None = None
    m3: None = None
