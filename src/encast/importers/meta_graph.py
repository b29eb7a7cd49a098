"""What a TensorFlow graph says of the model that it computes: ``saved_model.pb`` and ``PREFIX.meta``.

Nothing is executed; of the graph only the list of its ops and the signatures are read. Schema: ``saved_model.proto``
and ``meta_graph.proto`` (``tensorflow/core/protobuf``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers.files import MappedFile
from encast.importers.protobuf import MALFORMED, Bytes, fields, message, text
from encast.importers.tensor_bundle import shape_dims

__all__ = ["MetaGraph", "Signature", "read_meta_graph", "read_saved_model"]

_SERVE = "serve"
_MOST_NAMES = 10_000
"""Ops, signatures, tensors of a signature: each has some hundred at most."""
_MAX_RANK = 32

Shape = tuple[int | None, ...] | None


@dataclass(frozen=True)
class Signature:
    """Names of inputs and outputs → shape: None for an unknown size, or instead of a shape of unknown rank."""

    inputs: Mapping[str, Shape]
    outputs: Mapping[str, Shape]


@dataclass(frozen=True)
class MetaGraph:
    """``ops``: the names of the ops that the graph has; ``signatures`` by name; ``tags`` by which it is chosen."""

    tags: frozenset[str]
    ops: frozenset[str]
    signatures: Mapping[str, Signature]


def read_saved_model(file: MappedFile) -> MetaGraph:
    """The graph for serving of a ``saved_model.pb``, or the only one. Raises ``CheckpointError`` for a damaged file and
    ``UnsupportedModelError`` when none is for serving."""
    try:
        parts = _bounded(memoryview(file.bytes))
        graphs = [_meta_graph(message(value)) for number, value in parts if number == 2]
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
        return _meta_graph(memoryview(file.bytes))
    except MALFORMED as error:
        raise CheckpointError(
            f"{file.path}: not a graph of TensorFlow, or a damaged one ({error}); fetch it again, or remove it: the "
            "weights do without"
        ) from None


def _meta_graph(data: Bytes) -> MetaGraph:
    tags: set[str] = set()
    ops: set[str] = set()
    signatures: dict[str, Signature] = {}
    for number, value in _bounded(data):
        if number == 1:
            for inner, info in _bounded(message(value)):
                if inner == 2:
                    ops.update(_op(message(op)) for list_number, op in _bounded(message(info)) if list_number == 1)
                elif inner == 4:
                    tags.add(text(info))
        elif number == 5:
            name, signature = _pair(message(value))
            signatures[name] = _signature(signature)
    return MetaGraph(frozenset(tags), frozenset(ops), signatures)


def _op(data: Bytes) -> str:
    return next((text(value) for number, value in fields(data) if number == 1), "")


def _signature(data: Bytes) -> Signature:
    tensors: tuple[dict[str, Shape], dict[str, Shape]] = ({}, {})
    for number, value in _bounded(data):
        if number in (1, 2):
            name, info = _pair(message(value))
            tensors[number - 1][name] = next((_shape(shape) for inner, shape in fields(info) if inner == 3), None)
    return Signature(*tensors)


def _shape(shape: int | Bytes) -> Shape:
    if any(number == 3 and value for number, value in fields(message(shape))):
        return None
    sizes = tuple(itertools.islice(shape_dims(shape), _MAX_RANK + 1))
    if len(sizes) > _MAX_RANK:
        raise ValueError(f"a shape of more than {_MAX_RANK} dimensions")
    return tuple(size if size < 1 << 63 else None for size in sizes)


def _pair(data: Bytes) -> tuple[str, Bytes]:
    """An entry of a map from strings to messages."""
    key = ""
    content: Bytes = b""
    for number, value in fields(data):
        if number == 1:
            key = text(value)
        elif number == 2:
            content = message(value)
    return key, content


def _bounded(data: Bytes) -> Iterator[tuple[int, int | Bytes]]:
    for index, pair in enumerate(fields(data)):
        if index == _MOST_NAMES:
            raise ValueError(f"more than {_MOST_NAMES} parts")
        yield pair
