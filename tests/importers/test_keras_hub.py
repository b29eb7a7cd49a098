"""KerasHub's presets: the bits of the same weights in safetensors, and KerasHub's own answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from keras_files import SMALL, as_preset, checkpoint_of, registered
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

import encast
from encast.archs import build_graph
from encast.artifact import open as open_artifact
from encast.backends.cpu import CpuRunnable
from encast.batch import Batch
from encast.errors import CheckpointError, EncastError, InputError, UnsupportedModelError
from encast.importers import open_checkpoint
from encast.importers.hub import choose_files
from encast.sparsity import Pattern, prune_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden" / "keras_hub"
ARCHS = ("bert", "distilbert", "roberta")


def pair(folder: Path, arch: str = "bert", head: str = "classify", **options: Any) -> tuple[Path, Path]:
    activation = "gelu_new" if arch == "bert" else "gelu"
    given = {**SMALL, "layers": 2, "activation": activation, "tokenizer_json": False}
    source = checkpoint_of(folder, arch, head, **given)
    config = json.loads((source / "config.json").read_text())
    labels = len(config.pop("id2label", ()))
    config.pop("label2id", None)
    (source / "config.json").write_text(json.dumps({**config, **({"num_labels": labels} if labels else {})}))
    if arch == "roberta":
        tensors = load_file(source / "model.safetensors")
        for name, tensor in tensors.items():
            if name.endswith("position_embeddings.weight"):
                tensor[:2] = 0
            if name.endswith("token_type_embeddings.weight"):
                tensor[:] = 0
        save_file(tensors, source / "model.safetensors")
    return source, as_preset(source, folder / "preset", **options)


def rewrite(path: Path, name: str | None = None, /, **fields: Any) -> None:
    stored = json.loads(path.read_text())
    stored["registered_name"] = f"keras_hub>{name}" if name else stored["registered_name"]
    stored["config"].update(fields)
    path.write_text(json.dumps(stored))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("head", ["features", "classify"])
@pytest.mark.parametrize("arch", ARCHS)
def test_artifacts_are_the_same_bits(tmp_path: Path, arch: str, head: str, nested: bool) -> None:
    source, preset = pair(tmp_path, arch, head, nested=nested)
    expected = encast.compile(source, tmp_path / "a.encast", dtype="f32")
    compiled = encast.compile(preset, tmp_path / "b.encast", dtype="f32")
    assert (expected / "weights.safetensors").read_bytes() == (compiled / "weights.safetensors").read_bytes()
    one, other = (json.loads((path / "graph.json").read_text()) for path in (expected, compiled))
    assert one == other


def test_the_backbone_of_the_head_counts(tmp_path: Path) -> None:
    """KerasNLP loads it last."""
    _, preset = pair(tmp_path, nested=True)
    with h5py.File(preset / "model.weights.h5", "r+") as file:
        file["layers/dense/vars/1"][0] = 77
    assert open_checkpoint(preset).tensors.f32("bert.pooler.dense.bias")[0] != 77


def test_a_classifier_that_keras_hub_wrote(tmp_path: Path) -> None:
    """``make_keras_hub_files.py`` made it: ids and answers of texts and pairs, with an accent that stays."""
    artifact = encast.compile(GOLDEN / "bert-classify", tmp_path / "a.encast", dtype="f32")
    tokenizer = Tokenizer.from_str((artifact / "tokenizer.json").read_text())
    tokenizer.no_padding()
    runnable = CpuRunnable(open_artifact(artifact))
    texts = ["the cat sat", "ab the, cat!", "caf\u00e9 THE \u4e2d Cat."]
    pairs = list(zip(["the cat", "ab"], ["sat the", "cat. c"], strict=True))
    with np.load(GOLDEN / "bert-classify" / "answers.npz") as answers:
        for name, given in (("texts", texts), ("pairs", pairs)):
            for encoding, ids, logits in zip(
                tokenizer.encode_batch(given), answers[f"{name}_ids"], answers[name], strict=True
            ):
                assert encoding.ids == [index for index in ids if index]
                found = runnable.run("logits", Batch.of([encoding.ids], [encoding.type_ids]))
                np.testing.assert_allclose(found[0], logits, rtol=0, atol=1e-5)
    runnable.close()
    assert json.loads((artifact / "graph.json").read_text())


def test_a_masked_lm_that_keras_hub_wrote(tmp_path: Path) -> None:
    artifact = encast.compile(GOLDEN / "roberta-fill_mask", tmp_path / "a.encast", dtype="f32")
    runnable = CpuRunnable(open_artifact(artifact))
    with np.load(GOLDEN / "roberta-fill_mask" / "answers.npz") as answers:
        for ids, logits in zip(answers["ids"], answers["logits"], strict=True):
            found = runnable.run("logits", Batch.of([ids.tolist()]), np.arange(len(ids), dtype=np.int32))
            np.testing.assert_allclose(found, logits, rtol=0, atol=1e-5)
    runnable.close()


def test_settings_of_the_tokenizer(tmp_path: Path) -> None:
    _, preset = pair(tmp_path)
    checkpoint = open_checkpoint(preset)
    normalizer = json.loads(checkpoint.tokenizer.json)["normalizer"]
    assert (normalizer["lowercase"], normalizer["strip_accents"]) == (True, False)
    assert checkpoint.tokenizer.max_length == 48
    (preset / "preprocessor.json").write_text(registered("BertTextClassifierPreprocessor", sequence_length=20))
    rewrite(preset / "tokenizer.json", lowercase=False, strip_accents=True)
    checkpoint = open_checkpoint(preset)
    normalizer = json.loads(checkpoint.tokenizer.json)["normalizer"]
    assert (normalizer["lowercase"], normalizer["strip_accents"]) == (False, True)
    assert checkpoint.tokenizer.max_length == 20
    assert list(checkpoint.provenance["files"]) == [
        "assets/tokenizer/vocabulary.txt", "config.json", "model.weights.h5", "preprocessor.json", "task.json",
        "task.weights.h5", "tokenizer.json",
    ]  # fmt: skip
    for field, value, shown in (("split", False, "true"), ("suffix_indicator", "@", '"##"'), ("oov_token", "?", "UNK")):
        rewrite(preset / "tokenizer.json", **{field: value})
        with pytest.raises(UnsupportedModelError, match=rf"tokenizer\.json: {field} is .*{shown}.* is read"):
            _ = open_checkpoint(preset).tokenizer
        rewrite(preset / "tokenizer.json", split=True, suffix_indicator="##", oov_token="[UNK]")
    rewrite(preset / "tokenizer.json", "AlbertTokenizer")
    with pytest.raises(UnsupportedModelError, match="is 'AlbertTokenizer'; BertTokenizer goes with BertBackbone"):
        _ = open_checkpoint(preset).tokenizer
    (preset / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"accepted are tokenizer\.json or, for this model, vocab\.txt"):
        _ = open_checkpoint(preset).tokenizer


def test_positions_of_roberta_begin_behind_the_padding(tmp_path: Path) -> None:
    _, preset = pair(tmp_path, "roberta")
    assert open_checkpoint(preset).tokenizer.vocab_size
    path = preset / "assets" / "tokenizer" / "vocabulary.json"
    vocab = json.loads(path.read_text())
    vocab["<pad>"], vocab["<s>"] = vocab["<s>"], vocab["<pad>"]
    path.write_text(json.dumps(vocab))
    with pytest.raises(UnsupportedModelError, match=r"vocabulary\.json: <pad> has id 0; RoBERTa's positions begin"):
        _ = open_checkpoint(preset).tokenizer


@pytest.mark.parametrize(
    ("file", "name", "fields", "message"),
    [
        ("config.json", "AlbertBackbone", {}, "is 'AlbertBackbone'; of KerasHub BertBackbone, DistilBertBackbone, Rob"),
        ("config.json", "Bert", {}, "is 'Bert'; of KerasHub"),
        ("config.json", None, {"num_heads": "2"}, "num_attention_heads"),
        ("config.json", None, {"num_layers": 3}, r"'bert\.encoder\.layer\.2.*' is missing"),
        ("config.json", None, {"num_layers": 1}, r"have no place .*'bert\.encoder\.layer\.1"),
        ("config.json", None, {"max_sequence_length": None}, "max_position_embeddings|position_embeddings"),
        ("task.json", "BertTextEmbedder", {}, "is 'BertTextEmbedder'; of BertBackbone the tasks BertTextClassifier, "),
        ("task.json", "RobertaTextClassifier", {}, "is 'RobertaTextClassifier'; of BertBackbone"),
        ("task.json", "BertMaskedLM", {}, r"BertMaskedLM is not read: its head computes GELU .* remove task\.json"),
        ("task.json", None, {"activation": "sigmoid"}, "activation is 'sigmoid'; linear and softmax are read"),
        ("task.json", None, {"hidden_dim": 99}, "hidden_dim of the head is 99 and that of the backbone 8"),
        ("task.json", None, {"num_classes": 4}, "classifier"),
    ],
)
def test_what_is_refused(tmp_path: Path, file: str, name: str | None, fields: dict[str, Any], message: str) -> None:
    _, preset = pair(tmp_path)
    rewrite(preset / file, name, **fields)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        build_graph(open_checkpoint(preset))


def test_files_that_are_missing_or_of_another_kind(tmp_path: Path) -> None:
    _, preset = pair(tmp_path)
    whole = (preset / "task.weights.h5").read_bytes()
    (preset / "task.weights.h5").unlink()
    with pytest.raises(CheckpointError, match=r"task\.json: there is no task\.weights\.h5 beside it"):
        open_checkpoint(preset)
    (preset / "task.weights.h5").write_bytes(whole)
    for path in ("layers/gate/vars/0", "layers/dense/vars/2", "vars/0", "layers/transformer_encoder/odd/vars/0"):
        with h5py.File(preset / "model.weights.h5", "r+") as file:
            file[path] = np.ones((2, 3), "f4")
        with pytest.raises(CheckpointError, match=rf"'{path}', F32\[2, 3\], has no place in the model"):
            open_checkpoint(preset)
        with h5py.File(preset / "model.weights.h5", "r+") as file:
            del file[path]
    with h5py.File(preset / "model.weights.h5", "r+") as file:
        del file["layers/dense/vars/0"]
        file["layers/dense/vars/0"] = np.ones((2, 2, 2, 2), "f4")
    with pytest.raises(CheckpointError, match="a kernel has two or three sizes"):
        open_checkpoint(preset)
    (preset / "model.weights.h5").rename(preset / "model.weights.json")
    with pytest.raises(UnsupportedModelError, match=r"the weights are in shards \(model\.weights\.json\)"):
        open_checkpoint(preset)
    (preset / "model.weights.json").rename(preset / "model.weights.h5")
    (preset / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(CheckpointError, match="registered_name is a value of type NoneType; a preset of KerasHub has"):
        open_checkpoint(preset)


@pytest.mark.parametrize("name", ["config.json", "task.json", "tokenizer.json", "preprocessor.json"])
@pytest.mark.parametrize("text", ["[]", "{}", '{"registered_name": "keras_hub>BertBackbone", "config": 3}', "{", "3"])
def test_broken_settings(tmp_path: Path, name: str, text: str) -> None:
    _, preset = pair(tmp_path)
    (preset / name).write_text(text)
    with pytest.raises(CheckpointError, match=name):
        _ = open_checkpoint(preset).tokenizer


@pytest.mark.parametrize(
    "fields",
    [{"max_sequence_length": -5}, {"hidden_dim": 2**70}, {"vocabulary_size": []}, {"num_layers": 10**9}],
    ids=str,
)
def test_sizes_that_lie(tmp_path: Path, fields: dict[str, Any]) -> None:
    for arch in ARCHS:
        _, preset = pair(tmp_path / arch, arch)
        rewrite(preset / "config.json", **fields)
        with pytest.raises(EncastError):
            build_graph(open_checkpoint(preset))


def test_weights_of_pytorch_come_first(tmp_path: Path) -> None:
    source, preset = pair(tmp_path)
    assert open_checkpoint(preset).keras
    shutil.copy(source / "model.safetensors", preset)
    shutil.copy(source / "config.json", preset)
    assert not open_checkpoint(preset).keras


def test_what_needs_weights_of_pytorch_says_so(tmp_path: Path) -> None:
    _, preset = pair(tmp_path)
    with pytest.raises(InputError, match=r"pruning needs a folder .*; this is a folder with weights of Keras"):
        prune_checkpoint(preset, tmp_path / "pruned", pattern=Pattern.parse("4x1"), sparsity=0.5)


def test_files_that_a_hub_repository_is_asked_for() -> None:
    names = [
        "README.md", "assets/tokenizer/vocabulary.txt", "config.json", "metadata.json", "model.weights.h5",
        "preprocessor.json", "task.json", "task.weights.h5", "tokenizer.json",
    ]  # fmt: skip
    assert choose_files(names) == [name for name in names if name not in ("README.md", "metadata.json")]
    assert choose_files([*names, "model.safetensors"]) == ["config.json", "model.safetensors", "tokenizer.json"]
