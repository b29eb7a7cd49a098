"""Opens an artifact: everything that a run will trust is checked first, and refused with a reason."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from encast.artifact.card import GRAPH, TOKENIZER, WEIGHTS, checksum, hexadecimal, read_card, read_small
from encast.artifact.facts import check_card, check_graph
from encast.artifact.pack import NUMPY_DTYPES, stored_specs, unpack
from encast.artifact.safetensors import PAD, StoredTensor, header_size, parse_header
from encast.artifact.strict_json import parse_json
from encast.errors import ArtifactError, GraphError
from encast.ir import Constant, Graph, verify

__all__ = ["Artifact", "open"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Artifact:
    """An opened artifact. Its graph's constants have types but no arrays; the bytes stay in ``weights_path``.

    ``tensors`` are those of the file, in its order, padding (``__pad.N``) included; ``card`` is the whole
    ``card.json``.
    """

    path: Path
    graph: Graph
    card: dict[str, Any]
    tokenizer_json: str
    weights_path: Path
    tensors: Mapping[str, StoredTensor]

    @property
    def max_length(self) -> int:
        """Tokens, special ones included, after which texts are cut: what the tokenizer and the positions allow."""
        return self.graph.meta.longest_text((self.card.get("tokenizer") or {}).get("max_length"))

    def verify(self) -> None:
        """Reads every tensor and compares its checksum; raises ``ArtifactError`` naming the first damaged one.

        Running backends do this natively when they map the weights; this is for tools that do not run.
        """
        with self._mapped() as mapped:
            for name, tensor in self.tensors.items():
                # A view that outlives the loop would keep the file mapped.
                with memoryview(mapped)[tensor.offset : tensor.offset + tensor.nbytes] as data:
                    if checksum(data) != tensor.xxh64:
                        raise ArtifactError(
                            f"{self.weights_path}: tensor {name!r} ({tensor.nbytes} bytes from byte {tensor.offset}) "
                            "does not match its checksum: the file is damaged; compile again"
                        )

    def load_graph(self) -> Graph:
        """The graph with its constants unpacked into memory, as the reference backend needs it."""
        graph = self.graph.copy()
        specs = {spec.constant: spec for spec in stored_specs(graph) if spec.form != "colsum"}
        raw = np.memmap(self.weights_path, np.uint8, "r")
        for name, constant in self.graph.constants.items():
            spec, tensor = specs[name], self.tensors[name]
            data = raw[tensor.offset : tensor.offset + tensor.nbytes].view(NUMPY_DTYPES[spec.dtype])
            array = np.array(unpack(spec, data.reshape(spec.shape), constant.type))
            graph.constants[name] = Constant(constant.type, array)
        return graph

    def _mapped(self) -> mmap.mmap:
        try:
            with self.weights_path.open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{self.weights_path} cannot be mapped: {error}") from None


def open(path: str | os.PathLike[str]) -> Artifact:
    """Opens the artifact folder ``path``.

    Checked are the card (version, checksum, what a run reads of it), the checksums of graph, tokenizer and weights
    header, the graph against the op table and its own facts, and that the weights file holds exactly the tensors
    that the graph's constants are stored as, aligned, without gaps or overlaps. The tensors' bytes are checked by
    ``Artifact.verify`` or by the backend that maps them. Raises ``ArtifactError``.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is no folder; an artifact is a folder that `encast compile` wrote")
    card = read_card(folder)
    check_card(card, folder)
    files, sums = _checksums(card, "files", folder), _checksums(card, "tensors", folder)
    graph_bytes = _checked(folder / GRAPH, files)
    tokenizer_bytes = _checked(folder / TOKENIZER, files)
    graph = _graph(graph_bytes, folder / GRAPH)
    weights = folder / WEIGHTS
    tensors = _tensors(weights, files, sums)
    _compare(graph, tensors, weights)
    try:
        tokenizer_json = tokenizer_bytes.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{folder / TOKENIZER} is not UTF-8: {error}") from None
    return Artifact(folder, graph, card, tokenizer_json, weights, tensors)


def _checksums(card: Mapping[str, Any], entry: str, folder: Path) -> dict[str, int]:
    """A table of the card: name to checksum."""
    table = card.get(entry)
    try:
        if not isinstance(table, dict):
            raise ValueError(f"it is {type(table).__name__}")
        return {name: int(value, 16) for name, value in table.items()}
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"{folder}: the card's table {entry!r} is malformed: {error}") from None


def _need_checksum(path: Path, entry: str, data: bytes, files: Mapping[str, int]) -> None:
    found = checksum(data)
    if files.get(entry) != found:
        wanted = hexadecimal(files[entry]) if entry in files else "nothing"
        raise ArtifactError(
            f"{path}: {entry} has checksum {hexadecimal(found)}, card.json lists {wanted}: "
            "it is damaged or was edited; compile again"
        )


def _checked(path: Path, files: Mapping[str, int]) -> bytes:
    data = read_small(path)
    _need_checksum(path, path.name, data, files)
    return data


def _graph(data: bytes, path: Path) -> Graph:
    stored = parse_json(data, str(path))
    try:
        if not isinstance(stored, dict):
            raise GraphError("it is no JSON object")
        graph = Graph.from_json(stored, {})
        verify(graph)
    except GraphError as error:
        raise ArtifactError(f"{path}: {error}; compile the checkpoint again with this version of encast") from None
    check_graph(graph, path)
    return graph


def _tensors(path: Path, files: Mapping[str, int], sums: Mapping[str, int]) -> dict[str, StoredTensor]:
    try:
        if not path.is_file():
            raise ArtifactError(f"{path} is missing: the artifact is incomplete; compile again")
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            header = start + file.read(header_size(start, size, str(path)) - 8)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}") from None
    _need_checksum(path, f"{WEIGHTS} header", header, files)
    return parse_header(header, size, sums, str(path))


def _compare(graph: Graph, tensors: Mapping[str, StoredTensor], path: Path) -> None:
    """Raises ``ArtifactError`` unless the file holds what the graph's constants are stored as, and nothing else."""
    try:
        wanted = {spec.name: (spec.dtype, spec.shape) for spec in stored_specs(graph)}
    except GraphError as error:
        raise ArtifactError(f"{path}: {error}") from None
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items() if not name.startswith(PAD)}
    for name, (dtype, shape) in wanted.items():
        if name not in found:
            raise ArtifactError(f"{path} lacks the tensor {name!r}: {dtype}{list(shape)}; compile again")
        if found[name] != (dtype, shape):
            stored, size = found[name]
            raise ArtifactError(
                f"{path}: tensor {name!r} is {stored}{list(size)}, the graph needs {dtype}{list(shape)}"
            )
    extra = sorted(set(found) - set(wanted))
    if extra:
        raise ArtifactError(f"{path} holds tensors that the graph does not know: {extra[:5]}; compile again")
