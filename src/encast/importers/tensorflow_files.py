"""Where a TensorFlow model lies: a checkpoint's prefix, a folder with checkpoints, or a SavedModel."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from encast.errors import CheckpointError
from encast.importers.files import Folder, MappedFile, quote
from encast.importers.google_bert import GOOGLE_CONFIG, complete_config, rename
from encast.importers.meta_graph import MetaGraph, read_meta_graph, read_saved_model
from encast.importers.model_files import PYTORCH_FILES, ModelFiles
from encast.importers.saved_model import SAVED_MODEL, describe
from encast.importers.table_file import is_table
from encast.importers.tensor_bundle import DATA_FILE, read_bundle
from encast.importers.weights import TensorSource

__all__ = ["find_prefix", "read_tensorflow", "refuse_table_file", "split_prefix"]

_STATE = "checkpoint"
_ASSETS = ("assets", "assets.extra")
_CONFIGS = (GOOGLE_CONFIG, "config.json")
_LATEST = re.compile(r'\s*model_checkpoint_path:\s*("(?:[^"\\]|\\.)*")\s*')
_OLD_FORM = (
    "a checkpoint in one file (V1), which TensorFlow wrote before 0.12; load it there and save it again with "
    "tf.compat.v1.train.Saver()"
)


def split_prefix(source: str) -> tuple[Path, str] | None:
    """Folder and name of a checkpoint's prefix, such as ``FOLDER/bert_model.ckpt``; None when it is none."""
    path = Path(source)
    return (path.parent, path.name) if path.name and os.path.lexists(f"{path}.index") else None


def refuse_table_file(path: Path) -> None:
    """Raises ``CheckpointError`` for a file of a TensorFlow checkpoint where its prefix is needed."""
    if not is_table(MappedFile(path).bytes[-8:]):
        return
    if path.suffix == ".index":
        raise CheckpointError(f"{path}: a file of a TensorFlow checkpoint; give its prefix, {path.with_suffix('')}")
    raise CheckpointError(f"{path}: {_OLD_FORM}")


def find_prefix(folder: Folder) -> str | None:
    """The checkpoint of a folder without weights of PyTorch, or what a SavedModel's file is called; None when there is
    nothing of TensorFlow. Raises ``CheckpointError`` when there are several and none is named.
    """
    if folder.pick(PYTORCH_FILES) is not None:
        return None
    if folder.has(SAVED_MODEL):
        return SAVED_MODEL
    # A list of shards is called .index.json.
    prefixes = sorted(name.removesuffix(".index") for name in folder.names if name.endswith(".index"))
    if folder.has("config.json"):  # a folder for transformers may have files of these names for other purposes
        data = {match[1] for name in folder.names if (match := DATA_FILE.fullmatch(name))}
        prefixes = [prefix for prefix in prefixes if prefix in data]
        if not prefixes:
            return None
    if folder.has(_STATE) and os.path.isfile(folder.path(_STATE)):
        return _latest(folder)
    if len(prefixes) > 1:
        raise CheckpointError(
            f"{folder.root}: {len(prefixes)} checkpoints and no file `checkpoint` that says which is the latest; give "
            f"one's prefix, such as {folder.path(prefixes[-1])}"
        )
    return prefixes[0] if prefixes else None


def _latest(folder: Folder) -> str:
    """What ``checkpoint`` (a ``CheckpointState`` as text) names, by its last part: folders are moved and renamed."""
    where = str(folder.path(_STATE))
    lines = folder.read(_STATE).decode("utf-8", "replace").split("\n")
    found = [match[1] for line in lines if (match := _LATEST.fullmatch(line))]
    try:
        path = str(json.loads(found[0])) if len(found) == 1 else ""
    except ValueError:  # an escape that JSON does not have
        path = ""
    name = re.split(r"[/\\]", path)[-1]
    if not name or "\0" in name:
        raise CheckpointError(
            f'{where}: must have one line model_checkpoint_path: "NAME"; correct it, or give a checkpoint\'s prefix'
        )
    if not folder.has(f"{name}.index"):
        what = f"which is {_OLD_FORM}" if folder.has(name) else "which is not here; give another checkpoint's prefix"
        raise CheckpointError(f"{where}: names {quote(name)}, {what}")
    return name


def read_tensorflow(folder: Folder, prefix: str) -> ModelFiles:
    """The model of ``find_prefix``; raises ``CheckpointError`` and ``UnsupportedModelError``."""
    graph: MetaGraph | None = None
    places = [folder]
    bundle = folder
    runnable = prefix == SAVED_MODEL  # a .meta is the graph of a training, which answers nothing
    if runnable:
        graph = read_saved_model(folder.map(prefix))
        places += [folder.child(name, str(folder.root)) for name in _ASSETS if os.path.isdir(folder.path(name))]
        if not os.path.isdir(folder.path("variables")):
            raise CheckpointError(f"{folder.root}: no folder variables beside {SAVED_MODEL}; the copy is incomplete")
        bundle, prefix = folder.child("variables", str(folder.root)), "variables"
    elif folder.has(f"{prefix}.meta"):
        graph = read_meta_graph(folder.map(f"{prefix}.meta"))
    home, config_file = next(((place, name) for place in places if (name := place.pick(_CONFIGS))), (None, None))
    if home is None or config_file is None:
        raise CheckpointError(
            f"{', '.join(str(place.root) for place in places)}: no {GOOGLE_CONFIG}, which gives the sizes of the model "
            "and the number of its heads; put it there, from the archive that the weights were trained from"
        )
    where = str(bundle.path(prefix))
    tensors = rename(read_bundle(bundle, prefix), where)
    config = complete_config(home, config_file, tensors, graph)
    vocabulary = next((place for place in places if place.pick(("tokenizer.json", "vocab.txt"))), home)
    saved = describe(folder.root, graph, tensors.values()) if graph is not None and runnable else None
    return ModelFiles(home, config_file, config, TensorSource(tensors, where), vocabulary, saved=saved)
