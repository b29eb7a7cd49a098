"""Finding a model's weights in a folder: one file or shards with an index, safetensors or torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from encast.errors import CheckpointError
from encast.importers.files import Folder, MappedFile, quote
from encast.importers.safetensors_file import read_safetensors
from encast.importers.torch_file import read_torch_file
from encast.importers.weights import StoredTensor, TensorSource

__all__ = ["WEIGHT_FILES", "ModelFiles", "read_tensors"]


@dataclass(frozen=True)
class ModelFiles:
    """``folder`` has the config, which is called ``config_file``; ``vocabulary`` is the folder with the tokenizer."""

    folder: Folder
    config_file: str
    config: dict[str, Any]
    tensors: TensorSource
    vocabulary: Folder


Reader = Callable[[MappedFile], dict[str, StoredTensor]]

WEIGHT_FILES: dict[str, Reader] = {
    "model.safetensors": read_safetensors,
    "model.safetensors.index.json": read_safetensors,
    "pytorch_model.bin": read_torch_file,
    "pytorch_model.bin.index.json": read_torch_file,
}
"""Accepted files, preferred first → how they, or the shards that they list, are read."""

_OTHER_WEIGHTS = {
    "tf_model.h5": "TensorFlow",
    "flax_model.msgpack": "Flax",
    "adapter_model.safetensors": "a PEFT adapter, which must be merged into its base model first",
    "adapter_model.bin": "a PEFT adapter, which must be merged into its base model first",
}


def read_tensors(folder: Folder) -> TensorSource:
    """The tensors of the folder's model; raises ``CheckpointError`` when there is none or it is damaged."""
    name = folder.pick(WEIGHT_FILES)
    if name is None:
        others = [f"{file} ({what})" for file, what in _OTHER_WEIGHTS.items() if folder.has(file)]
        found = f"; there is {', '.join(others)}, which is not read" if others else ""
        raise CheckpointError(f"{folder.root}: no weights; accepted are {', '.join(WEIGHT_FILES)}{found}")
    if name.endswith(".index.json"):
        return TensorSource(_read_shards(folder, name, WEIGHT_FILES[name]), str(folder.path(name)))
    return TensorSource(WEIGHT_FILES[name](folder.map(name)), str(folder.path(name)))


def _read_shards(folder: Folder, index_name: str, reader: Reader) -> dict[str, StoredTensor]:
    where = str(folder.path(index_name))
    weight_map = folder.object(index_name).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{where}: weight_map must be an object from tensor names to shard files")
    wanted: dict[str, list[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or shard in (".", "..") or any(c in shard for c in "/\\\0"):
            raise CheckpointError(
                f"{where}: tensor {quote(tensor)} is said to lie in {quote(shard)}; "
                "the name of a file in the same folder is needed"
            )
        wanted.setdefault(shard, []).append(tensor)
    tensors: dict[str, StoredTensor] = {}
    for shard, names in wanted.items():
        if not folder.has(shard):
            raise CheckpointError(f"{where}: the shard {quote(shard)} is missing; the download did not finish")
        stored = reader(folder.map(shard))
        for tensor in names:
            if tensor not in stored:
                raise CheckpointError(f"{where}: the shard {quote(shard)} lacks tensor {quote(tensor)}")
        if len(stored) != len(names):
            extra = next(tensor for tensor in stored if weight_map.get(tensor) != shard)
            raise CheckpointError(
                f"{where}: the shard {quote(shard)} holds tensor {quote(extra)}, which the index does not place "
                "there; shards and index are from different versions"
            )
        tensors.update(stored)
    return tensors
