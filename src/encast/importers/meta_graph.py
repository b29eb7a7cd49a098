"""What a TensorFlow graph says of the model that it computes: ``saved_model.pb`` and ``PREFIX.meta``.

Nothing is executed; of the graph only tags, signatures, and its nodes' names and ops are read. Schema:
``saved_model.proto`` and ``meta_graph.proto`` (``tensorflow/core/protobuf``), ``graph.proto`` and ``node_def.proto``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers.files import MappedFile, refuse_pointer
from encast.importers.protobuf import MALFORMED, Bytes, fields, message, text
from encast.importers.tensor_bundle import shape_dims

__all__ = ["MetaGraph", "Signature", "read_meta_graph", "read_saved_model"]

_SERVE = "serve"
_MOST_BYTES = 64 << 20
_MOST_PARTS = 1_000_000
"""Fields that are read of one file. BERT-large in training has some ten thousand nodes, of three fields each."""
_ACTIVATIONS = ("Tanh", "Erf")
_INNER_NODE = re.compile(r"(.*/)?intermediate(_\d+)?/dense(_\d+)?/[^/]+")
"""The nodes in which modeling.py computes the activation. Elsewhere the pooler has Tanh too, and a schedule Pow."""
_MAX_RANK = 32

Shape = tuple[int | None, ...] | None


@dataclass(frozen=True)
class Signature:
    """Names of inputs and outputs → shape: None for an unknown size, or instead of a shape of unknown rank."""

    inputs: Mapping[str, Shape]
    outputs: Mapping[str, Shape]


@dataclass(frozen=True)
class MetaGraph:
    """``activations``: which of Tanh and Erf feed-forward layers compute; ``signatures`` by name; ``tags`` by which
    the graph is chosen."""

    tags: frozenset[str]
    activations: frozenset[str]
    signatures: Mapping[str, Signature]


def read_saved_model(file: MappedFile) -> MetaGraph:
    """The graph for serving of a ``saved_model.pb``, or the only one. Raises ``CheckpointError`` for a damaged file and
    ``UnsupportedModelError`` when none is for serving."""
    try:
        parts = _Parts()
        graphs = [_meta_graph(message(value), parts) for number, value in parts(_checked(file)) if number == 2]
    except MALFORMED as error:
        raise CheckpointError(f"{file.path}: not a SavedModel, or a damaged one ({error}); fetch it again") from None
    chosen = [graph for graph in graphs if _SERVE in graph.tags] or graphs
    if len(chosen) != 1:
        raise UnsupportedModelError(
            f"{file.path}: {len(graphs)} graphs, {len([g for g in graphs if _SERVE in g.tags])} of them with the tag "
            f"{_SERVE!r}; one with this tag is needed, as Estimator's export_saved_model writes it"
        )
    return chosen[0]


def read_meta_graph(file: MappedFile) -> MetaGraph:
    """Of a ``PREFIX.meta``; raises ``CheckpointError``."""
    try:
        return _meta_graph(_checked(file), _Parts())
    except MALFORMED as error:
        raise CheckpointError(
            f"{file.path}: not a graph of TensorFlow, or a damaged one ({error}); fetch it again, or remove it: the "
            "weights do without"
        ) from None


def _checked(file: MappedFile) -> memoryview:
    refuse_pointer(file.bytes[:32], str(file.path))
    if file.size > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    return memoryview(file.bytes)


class _Parts:
    """``fields`` that counts what it gave of one file."""

    def __init__(self) -> None:
        self._left = _MOST_PARTS

    def __call__(self, data: Bytes) -> Iterator[tuple[int, int | Bytes]]:
        for pair in fields(data):
            self._left -= 1
            if self._left < 0:
                raise ValueError(f"more than {_MOST_PARTS} parts")
            yield pair


def _meta_graph(data: Bytes, parts: _Parts) -> MetaGraph:
    tags: set[str] = set()
    activations: set[str] = set()
    signatures: dict[str, Signature] = {}
    for number, value in parts(data):
        if number == 1:
            tags.update(text(tag) for inner, tag in parts(message(value)) if inner == 4)
        elif number == 2:
            for inner, node in parts(message(value)):
                if inner == 1 and (op := _activation(message(node), parts)):
                    activations.add(op)
        elif number == 5:
            name, signature = _pair(message(value), parts)
            signatures[name] = _signature(signature, parts)
    return MetaGraph(frozenset(tags), frozenset(activations), signatures)


def _activation(node: Bytes, parts: _Parts) -> str | None:
    """The op of a ``NodeDef`` if it is one of ``_ACTIVATIONS`` at its place."""
    name = op = ""
    for number, value in parts(node):
        if number == 1:
            name = text(value)
        elif number == 2:
            op = text(value)
            break
    return op if op in _ACTIVATIONS and _INNER_NODE.fullmatch(name) else None


def _signature(data: Bytes, parts: _Parts) -> Signature:
    tensors: tuple[dict[str, Shape], dict[str, Shape]] = ({}, {})
    for number, value in parts(data):
        if number in (1, 2):
            name, info = _pair(message(value), parts)
            shapes = (_shape(message(shape), parts) for inner, shape in parts(info) if inner == 3)
            tensors[number - 1][name] = next(shapes, None)
    return Signature(*tensors)


def _shape(shape: Bytes, parts: _Parts) -> Shape:
    if any(number == 3 and value for number, value in parts(shape)):
        return None
    sizes = tuple(itertools.islice(shape_dims(shape), _MAX_RANK + 1))
    if len(sizes) > _MAX_RANK:
        raise ValueError(f"a shape of more than {_MAX_RANK} dimensions")
    return tuple(size if size < 1 << 63 else None for size in sizes)


def _pair(data: Bytes, parts: _Parts) -> tuple[str, Bytes]:
    """An entry of a map from strings to messages."""
    key = ""
    content: Bytes = b""
    for number, value in parts(data):
        if number == 1:
            key = text(value)
        elif number == 2:
            content = message(value)
    return key, content
