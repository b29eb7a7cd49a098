"""Which of a folder's files are read where Keras's lie beside others: those that were read without them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from bundle_files import as_bundle, meta_graph, saved_model, variables_of, write_bundle
from checkpoint_files import torch_zip
from keras_files import GOLDEN, HUB_GOLDEN, SMALL, checkpoint_of
from safetensors.numpy import load_file

from encast.archs import build_graph
from encast.errors import CheckpointError
from encast.importers import open_checkpoint
from encast.importers.hub import choose_files

ONNX = Path(__file__).parents[1] / "golden" / "onnx" / "bert-classify-savedmodel-13-anyx16.onnx"


def sharded_safetensors(folder: Path) -> Path:
    source = checkpoint_of(folder, "bert", "classify", **SMALL)
    names = dict.fromkeys(load_file(source / "model.safetensors"), "model-00001-of-00001.safetensors")
    (source / "model.safetensors").rename(source / "model-00001-of-00001.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return source


def sharded_torch(folder: Path) -> Path:
    source = checkpoint_of(folder, "bert", "classify", **SMALL)
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    (source / "pytorch_model-00001-of-00001.bin").write_bytes(torch_zip(tensors))
    names = dict.fromkeys(tensors, "pytorch_model-00001-of-00001.bin")
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    return source


def tf_model(folder: Path) -> Path:
    return shutil.copytree(GOLDEN / "bert-classify", folder / "made")


def onnx(folder: Path) -> Path:
    made = onnx_alone(folder)
    shutil.copy(GOLDEN / "bert-classify" / "config.json", made)
    return made


def onnx_alone(folder: Path) -> Path:
    made = folder / "made"
    made.mkdir(parents=True)
    shutil.copy(ONNX, made / "model.onnx")
    return made


def prefix(folder: Path) -> Path:
    source = checkpoint_of(folder, "bert", "classify", **SMALL)
    made = as_bundle(source, folder / "made")
    shutil.copy(source / "config.json", made)
    return made


def export(folder: Path) -> Path:
    source = checkpoint_of(folder, "bert", "classify", **SMALL)
    made = folder / "made"
    write_bundle(made / "variables", variables_of(source), "variables")
    ids = {name: [-1, 16] for name in ("input_ids", "input_mask", "segment_ids")}
    (made / "saved_model.pb").write_bytes(saved_model(meta_graph(["Erf"], ids, {"probabilities": [-1, 3]})))
    shutil.copy(source / "config.json", made)
    return made


def kind(path: Path) -> tuple[bool, str, bool]:
    checkpoint = open_checkpoint(path)
    if not checkpoint.onnx:
        build_graph(checkpoint)
    return checkpoint.keras, checkpoint.onnx, checkpoint.tensorflow


KINDS: dict[str, tuple[Callable[[Path], Path], tuple[bool, str, bool]]] = {
    "shards of safetensors": (sharded_safetensors, (False, "", False)),
    "shards of torch": (sharded_torch, (False, "", False)),
    "tf_model.h5": (tf_model, (True, "", False)),
    "an ONNX file and config.json": (onnx, (False, "model.onnx", False)),
    "an ONNX file": (onnx_alone, (False, "model.onnx", False)),
    "a checkpoint of google-research": (prefix, (False, "", True)),
    "a SavedModel": (export, (False, "", True)),
}


@pytest.mark.parametrize("case", KINDS)
def test_weights_of_keras_that_lie_there_too(tmp_path: Path, case: str) -> None:
    """``model.weights.h5`` is what ``save_weights`` writes of any model of Keras; alone it is no preset."""
    make, expected = KINDS[case]
    folder = make(tmp_path)
    assert kind(folder) == expected
    for name in ("model.weights.h5", "task.json", "task.weights.h5"):
        shutil.copy(HUB_GOLDEN / "bert-classify" / name, folder)
    assert kind(folder) == expected
    for name in ("model.weights.json", "tf_model.h5", "tf_model.h5.index.json"):
        if not (folder / name).exists():
            (folder / name).write_bytes(b"{}")
    assert kind(folder) == expected


def test_a_preset_that_has_files_of_another_kind_too(tmp_path: Path) -> None:
    preset = shutil.copytree(HUB_GOLDEN / "bert-classify", tmp_path / "preset")
    assert kind(preset) == (True, "", False)
    (preset / "tf_model.h5").write_bytes(bytes(64))
    with pytest.raises(CheckpointError, match=r"tf_model\.h5: does not begin as HDF5 does"):
        open_checkpoint(preset)
    shutil.copy(ONNX, preset / "model.onnx")
    assert open_checkpoint(preset).onnx == "model.onnx"


def test_files_that_a_hub_repository_is_asked_for() -> None:
    bert = [
        "bert_config.json",
        "bert_model.ckpt.data-00000-of-00001",
        "bert_model.ckpt.index",
        "config.json",
        "vocab.txt",
    ]
    assert choose_files([*bert, "tf_model.h5", "model.weights.h5"]) == bert
    assert choose_files([*bert, "tf_model.h5", "model.safetensors"]) == [
        "config.json",
        "model.safetensors",
        "vocab.txt",
    ]
    hub = ["config.json", "model.weights.h5", "task.json", "task.weights.h5"]
    assert choose_files([*hub, "tf_model.h5"]) == ["config.json", "tf_model.h5"]
    assert choose_files([*bert, "adapter_config.json"]) == ["adapter_config.json", *bert]  # which is then refused
