"""``tf_model.h5``: the same artifact, to the bit, as of the same weights in safetensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from checkpoints import Case, inputs_of
from keras_files import ARCHS, GOLDEN, HEADS, SMALL, WHOLE, as_tf_model, checkpoint_of, tf_names
from safetensors.numpy import load_file, save_file

import encast
from encast.archs import build_graph
from encast.artifact import open as open_artifact
from encast.backends.cpu import CpuRunnable
from encast.batch import Batch
from encast.errors import CheckpointError, InputError, UnsupportedModelError
from encast.importers import open_checkpoint
from encast.importers.hub import choose_files
from encast.importers.tensorflow_h5 import rename_tf
from encast.importers.weights import StoredTensor
from encast.sparsity import Pattern, prune_checkpoint

NAMES = tf_names()


def same_artifacts(one: Path, other: Path, *names: str) -> None:
    for name in names or ("graph.json", "weights.safetensors", "tokenizer.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def pair(folder: Path, arch: str = "bert", head: str = "classify", **options: Any) -> tuple[Path, Path]:
    source = checkpoint_of(folder, arch, head, **{**SMALL, "layers": 2, **options})
    return source, as_tf_model(source, folder / "keras", NAMES[f"{arch}-{head}"])


def add_to(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("arch", ARCHS)
def test_artifacts_are_the_same_bits(tmp_path: Path, arch: str, head: str) -> None:
    source, keras = pair(tmp_path, arch, head)
    if (arch, head) == ("albert", "fill_mask"):  # TensorFlow reads the bias under its second name
        tensors = load_file(source / "model.safetensors")
        save_file({**tensors, "predictions.decoder.bias": tensors["predictions.bias"]}, source / "model.safetensors")
    names = set(open_checkpoint(keras).tensors)
    unused = {"mpnet.pooler.dense.weight", "mpnet.pooler.dense.bias"}  # which only models of TensorFlow have
    assert names - unused == set(open_checkpoint(source).tensors) - unused
    expected = encast.compile(source, tmp_path / "a.encast", dtype="f32")
    same_artifacts(expected, encast.compile(keras, tmp_path / "b.encast", dtype="f32"))


@pytest.mark.parametrize("case", NAMES)
def test_every_name_that_tensorflow_wrote(case: str) -> None:
    def stored() -> StoredTensor:
        return StoredTensor("F32", (2, 3), "", lambda: np.arange(6, dtype="f4").reshape(2, 3))

    for path, name in NAMES[case].items():
        if not name:
            continue
        # What is beside it keeps a bare encoder's name from being taken off: that is for whole files.
        variables = {path.split("/", 2)[2]: stored(), "other/x/bias:0": stored()}
        tensors = rename_tf(variables, "")
        found = next(iter(tensors))
        assert found == name or (case.endswith("-features") and found.partition(".")[2] == name)
        assert tensors[found].shape == ((3, 2) if path.endswith("kernel:0") else (2, 3))


def test_keys_of_their_own_for_distances(tmp_path: Path) -> None:
    """Of a DeBERTa whose attention does not share keys, which ``tf_names.json`` has not."""
    options = {"share_att_key": False, "pos_att_type": ["c2p", "p2c"], "relative_attention": True}
    source = checkpoint_of(tmp_path, "deberta-v2", "fill_mask", **SMALL, config=options)
    at = "encoder/layer_._0/attention/self"
    names = dict(NAMES["deberta-v2-fill_mask"])
    stem = next(path for path in names if at in path).partition(at)[0]
    for written, name in (("pos_proj", "pos_key_proj"), ("pos_q_proj", "pos_query_proj")):
        for last, kind in (("kernel:0", "weight"), ("bias:0", "bias")):
            names[f"{stem}{at}/{written}/{last}"] = f"deberta.encoder.layer.0.attention.self.{name}.{kind}"
    stored = load_file(source / "model.safetensors")
    keras = as_tf_model(source, tmp_path / "keras", {path: name for path, name in names.items() if name in stored})
    expected = encast.compile(source, tmp_path / "a.encast", dtype="f32")
    same_artifacts(expected, encast.compile(keras, tmp_path / "b.encast", dtype="f32"))


@pytest.mark.parametrize("name", WHOLE)
def test_files_that_tensorflow_wrote(tmp_path: Path, name: str) -> None:
    """``make_keras_files.py`` made them and wrote down what TensorFlow answers."""
    arch, head, options, _ = WHOLE[name]
    source = checkpoint_of(tmp_path, arch, head, **options)
    keras = shutil.copytree(source, tmp_path / "keras")
    (keras / "model.safetensors").unlink()
    for path in (GOLDEN / name).iterdir():
        shutil.copy(path, keras)
    expected, found = load_file(source / "model.safetensors"), open_checkpoint(keras).tensors
    assert set(found) - set(expected) <= {"predictions.decoder.bias"}
    for tensor in expected:
        np.testing.assert_array_equal(found.f32(tensor), expected[tensor])
    artifact = encast.compile(keras, tmp_path / "b.encast", dtype="f32")
    if head == "classify":
        same_artifacts(encast.compile(source, tmp_path / "a.encast", dtype="f32"), artifact)
    inputs = inputs_of(Case(name, arch, head, options))
    runnable = CpuRunnable(open_artifact(artifact))
    with np.load(keras / "answers.npz") as answers:
        for index, ids in enumerate(inputs.token_ids):
            types = [inputs.token_type_ids[index]] if inputs.token_type_ids else None
            select = np.arange(len(ids), dtype=np.int32) if head == "fill_mask" else None
            logits = runnable.run("logits", Batch.of([ids], types), select)
            np.testing.assert_allclose(logits, answers[f"logits-{index}"].reshape(logits.shape), rtol=0, atol=1e-5)
    runnable.close()


def test_shards_and_provenance(tmp_path: Path) -> None:
    _, keras = pair(tmp_path)
    for path in (GOLDEN / "albert-fill_mask").iterdir():
        shutil.copy(path, keras)
    (keras / "tf_model.h5").unlink()
    checkpoint = open_checkpoint(keras)
    assert checkpoint.keras
    assert not checkpoint.tensorflow
    index = "tf_model.h5.index.json"
    shards = [f"tf_model-0000{number}-of-00002.h5" for number in (1, 2)]
    assert list(checkpoint.provenance["files"]) == ["config.json", *shards, index]
    text = (keras / index).read_text()
    (keras / index).write_text(text.replace(shards[1], shards[0]))
    with pytest.raises(
        CheckpointError, match=rf"the shard '{shards[0]}' lacks tensor 'tf_albert_for_masked_lm_1/.*:0'"
    ):
        open_checkpoint(keras)
    (keras / index).write_text(text.replace('"tf_albert', '"x/tf_albert', 1))
    with pytest.raises(CheckpointError, match="lacks tensor 'x/tf_albert_for_masked_lm_1/"):
        open_checkpoint(keras)
    listed = json.loads(text)
    first = next(iter(listed["weight_map"]))
    listed["weight_map"]["another/" + first.partition("/")[2]] = shards[0]
    (keras / index).write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match="weight_map names a tensor of two models"):
        open_checkpoint(keras)
    (keras / index).write_text(text)
    (keras / shards[1]).unlink()
    with pytest.raises(CheckpointError, match=rf"the shard '{shards[1]}' is missing"):
        open_checkpoint(keras)


def test_weights_of_pytorch_come_first(tmp_path: Path) -> None:
    source, keras = pair(tmp_path)
    assert open_checkpoint(keras).keras
    shutil.copy(source / "model.safetensors", keras)
    assert not open_checkpoint(keras).keras


def test_decoders_are_tied_whatever_the_config_says(tmp_path: Path) -> None:
    source, keras = pair(tmp_path, head="fill_mask")
    add_to(keras / "config.json", tie_word_embeddings=False)
    expected = encast.compile(source, tmp_path / "a.encast", dtype="f32")
    same_artifacts(expected, encast.compile(keras, tmp_path / "b.encast", dtype="f32"))


def test_fields_that_tensorflow_left_out_are_refused(tmp_path: Path) -> None:
    _, keras = pair(tmp_path, "roberta", "tag")
    config = keras / "config.json"
    add_to(config, pad_token_id=5)
    with pytest.raises(UnsupportedModelError, match=r"config\.json: pad_token_id is 5, and .* from 1 whatever it is"):
        open_checkpoint(keras)
    for value in ("x" * 10**6, [[3]]):
        add_to(config, pad_token_id=value)
        with pytest.raises(UnsupportedModelError, match=r"pad_token_id is ('x{120}'\.\.\.|a value of type list), and"):
            open_checkpoint(keras)
    add_to(config, pad_token_id=1, position_embedding_type="relative_key")
    with pytest.raises(UnsupportedModelError, match=r"position_embedding_type is 'relative_key'.* leave it out"):
        open_checkpoint(keras)


def test_a_variable_that_is_stored_twice(tmp_path: Path) -> None:
    _, keras = pair(tmp_path, head="fill_mask")
    with h5py.File(keras / "tf_model.h5", "r+") as file:
        words = next(path for path in NAMES["bert-fill_mask"] if path.startswith("mlm") and "word_emb" in path)
        file[words][3, 2] += 1
    tensors = open_checkpoint(keras).tensors
    with pytest.raises(CheckpointError, match=r"'bert/embeddings/word_embeddings/weight:0' is stored for two"):
        tensors.f32("bert.embeddings.word_embeddings.weight")
    with h5py.File(keras / "tf_model.h5", "r+") as file:
        del file[words]
        file[words] = np.ones((2, 2), "f4")
    with pytest.raises(CheckpointError, match=r"two layers, as F32\[.*\] and as F32\["):
        open_checkpoint(keras)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("kernel:0", "'kernel:0' belongs to no layer of a model"),
        ("bert/kernel:0", "'bert/kernel:0' belongs to no layer"),
        ("bert/m/bert_._pooler/dense/kernel:0", r"two variables would be 'bert\.pooler\.dense\.weight'"),
    ],
)
def test_other_paths_are_refused(tmp_path: Path, path: str, message: str) -> None:
    _, keras = pair(tmp_path)
    with h5py.File(keras / "tf_model.h5", "r+") as file:
        file[path] = np.ones((2, 2), "f4")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(keras)


def test_a_layer_that_no_architecture_has(tmp_path: Path) -> None:
    _, keras = pair(tmp_path)
    with h5py.File(keras / "tf_model.h5", "r+") as file:
        file["gate/m/gate/kernel:0"] = np.ones((2, 3), "f4")
    with pytest.raises(CheckpointError, match=r"1 tensors have no place .*'gate\.weight' \[3, 2\]"):
        build_graph(open_checkpoint(keras))


def test_what_needs_weights_of_pytorch_says_so(tmp_path: Path) -> None:
    _, keras = pair(tmp_path)
    with pytest.raises(InputError, match=r"this is a folder with weights of Keras .* and none of PyTorch"):
        prune_checkpoint(keras, tmp_path / "pruned", pattern=Pattern.parse("4x1"), sparsity=0.5)
    assert not (tmp_path / "pruned").exists()


def test_files_that_a_hub_repository_is_asked_for() -> None:
    small = ["config.json", "vocab.txt"]
    whole = "tf_model.h5"
    assert choose_files([*small, whole, "README.md", "flax_model.msgpack"]) == ["config.json", whole, "vocab.txt"]
    assert choose_files([*small, whole, "pytorch_model.bin"]) == ["config.json", "pytorch_model.bin", "vocab.txt"]
    shards = [f"tf_model-0000{number}-of-00002.h5" for number in (1, 2)]
    index = "tf_model.h5.index.json"
    others = ["pytorch_model-00001-of-00001.bin", "model-00001-of-00001.safetensors"]
    assert choose_files([*small, *shards, index, *others]) == ["config.json", *shards, index, "vocab.txt"]
