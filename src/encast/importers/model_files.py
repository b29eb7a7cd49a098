"""Finding a model's weights in a folder: one file or shards with an index, of safetensors, torch or Keras."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from encast.errors import CheckpointError
from encast.importers.files import Folder, MappedFile, quote
from encast.importers.hdf5_file import read_hdf5
from encast.importers.safetensors_file import read_safetensors
from encast.importers.saved_model import SavedModel
from encast.importers.tensorflow_h5 import read_tf_model, rename_tf, tf_config
from encast.importers.torch_file import read_torch_file
from encast.importers.weights import StoredTensor, TensorSource

__all__ = ["PYTORCH_FILES", "WEIGHT_FILES", "ModelFiles", "read_folder", "read_tensors"]


@dataclass(frozen=True)
class ModelFiles:
    """``folder`` has the config, which is called ``config_file``; ``vocabulary`` is the folder with the tokenizer.

    ``keras``: whether the weights are Keras's. ``saved``: how TensorFlow runs the folder, where it is a SavedModel.
    """

    folder: Folder
    config_file: str
    config: dict[str, Any]
    tensors: TensorSource
    vocabulary: Folder
    keras: bool = False
    saved: SavedModel | None = None


Reader = Callable[[MappedFile], dict[str, StoredTensor]]

WEIGHT_FILES: dict[str, Reader] = {
    "model.safetensors": read_safetensors,
    "model.safetensors.index.json": read_safetensors,
    "pytorch_model.bin": read_torch_file,
    "pytorch_model.bin.index.json": read_torch_file,
    "tf_model.h5": read_tf_model,
    "tf_model.h5.index.json": read_hdf5,
}
"""Accepted files, preferred first → how they, or the shards that they list, are read."""

_TF_WEIGHTS = ("tf_model.h5", "tf_model.h5.index.json")
PYTORCH_FILES = tuple(name for name in WEIGHT_FILES if name not in _TF_WEIGHTS)
"""Those that come before what else may lie in the folder: a checkpoint of TensorFlow, an ONNX file. The others come
after it."""
_OTHER_WEIGHTS = {
    "flax_model.msgpack": "Flax",
    "model.weights.h5": "Keras, which goes with a config.json of KerasHub",
    "adapter_model.safetensors": "a PEFT adapter, which must be merged into its base model first",
    "adapter_model.bin": "a PEFT adapter, which must be merged into its base model first",
}


def read_tensors(folder: Folder) -> TensorSource:
    """The tensors of the folder's model; raises ``CheckpointError`` when there is none or it is damaged."""
    name = folder.pick(WEIGHT_FILES)
    if name is None:
        others = [f"{file} ({what})" for file, what in _OTHER_WEIGHTS.items() if folder.has(file)]
        found = f"; there is {', '.join(others)}, which is not read" if others else ""
        exports = _exports(folder)
        hint = f"; there is {', '.join(exports)}: give that file, or one of them" if exports else ""
        raise CheckpointError(f"{folder.root}: no weights; accepted are {', '.join(WEIGHT_FILES)}{found}{hint}")
    where = str(folder.path(name))
    reader = WEIGHT_FILES[name]
    if not name.endswith(".index.json"):
        return TensorSource(reader(folder.map(name)), where)
    if name not in _TF_WEIGHTS:
        return TensorSource(_read_shards(folder, name, reader), where)
    # The index puts the model's name before that of a variable, and the shards do not.
    variables = _read_shards(folder, name, reader, lambda listed: listed.partition("/")[2])
    return TensorSource(rename_tf(variables, where), where)


def _exports(folder: Folder) -> list[str]:
    """ONNX files in the folder ``onnx``, where models of the hub have them; the first few."""
    if not folder.path("onnx").is_dir():
        return []
    names = folder.child("onnx", str(folder.root)).names
    return [quote(str(folder.path(f"onnx/{name}"))) for name in sorted(names) if name.endswith(".onnx")][:4]


def read_folder(folder: Folder) -> ModelFiles:
    """The model of a folder that has config.json; raises ``CheckpointError`` and ``UnsupportedModelError``."""
    tensors, config = read_tensors(folder), folder.object("config.json")
    keras = folder.pick(WEIGHT_FILES) in _TF_WEIGHTS
    if keras:
        config = tf_config(config, str(folder.path("config.json")))
    return ModelFiles(folder, "config.json", config, tensors, folder, keras)


def _read_shards(
    folder: Folder, index_name: str, reader: Reader, name_of: Callable[[str], str] = str
) -> dict[str, StoredTensor]:
    """The tensors of all shards; ``name_of``: what a tensor of the index is called in its shard."""
    where = str(folder.path(index_name))
    weight_map = folder.object(index_name).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{where}: weight_map must be an object from tensor names to shard files")
    places = {name_of(tensor): shard for tensor, shard in weight_map.items()}
    listed = {name_of(tensor): tensor for tensor in weight_map}
    if len(places) != len(weight_map):
        raise CheckpointError(f"{where}: weight_map names a tensor of two models; the index of one model is needed")
    wanted: dict[str, list[str]] = {}
    for tensor, shard in places.items():
        if not isinstance(shard, str) or not shard or shard in (".", "..") or any(c in shard for c in "/\\\0"):
            raise CheckpointError(
                f"{where}: tensor {quote(listed[tensor])} is said to lie in {quote(shard)}; "
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
                raise CheckpointError(f"{where}: the shard {quote(shard)} lacks tensor {quote(listed[tensor])}")
        if len(stored) != len(names):
            extra = next(tensor for tensor in stored if places.get(tensor) != shard)
            raise CheckpointError(
                f"{where}: the shard {quote(shard)} holds tensor {quote(extra)}, which the index does not place "
                "there; shards and index are from different versions"
            )
        tensors.update(stored)
    return tensors
