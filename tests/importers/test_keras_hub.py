"""KerasHub's presets: the bits of the same weights in safetensors, and KerasHub's own answers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from keras_files import HUB_GOLDEN, preset_pair, registered, rewrite
from tokenizers import Tokenizer

import encast
from encast.artifact import open as open_artifact
from encast.backends.cpu import CpuRunnable
from encast.batch import Batch
from encast.errors import CheckpointError, InputError, UnsupportedModelError
from encast.importers import open_checkpoint
from encast.importers.hub import choose_files
from encast.sparsity import Pattern, prune_checkpoint

ARCHS = ("bert", "distilbert", "roberta")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("head", ["features", "classify"])
@pytest.mark.parametrize("arch", ARCHS)
def test_artifacts_are_the_same_bits(tmp_path: Path, arch: str, head: str, nested: bool) -> None:
    source, preset = preset_pair(tmp_path, arch, head, nested=nested)
    expected = encast.compile(source, tmp_path / "a.encast", dtype="f32")
    compiled = encast.compile(preset, tmp_path / "b.encast", dtype="f32")
    assert (expected / "weights.safetensors").read_bytes() == (compiled / "weights.safetensors").read_bytes()
    one, other = (json.loads((path / "graph.json").read_text()) for path in (expected, compiled))
    assert one == other


def test_two_backbones_that_differ(tmp_path: Path) -> None:
    """KerasHub loads that of ``model.weights.h5`` last, other versions the other one."""
    _, preset = preset_pair(tmp_path, nested=True)
    name, bias = "bert.pooler.dense.bias", "layers/dense/vars/1"
    same = float(open_checkpoint(preset).tensors.f32(name)[0])
    with h5py.File(preset / "model.weights.h5", "r+") as file:
        file[bias][0] = 77
    with pytest.raises(CheckpointError, match=rf"model\.weights\.h5: '{bias}' has other values than in .*task\."):
        open_checkpoint(preset).tensors.f32(name)
    with h5py.File(preset / "task.weights.h5", "r+") as file:
        file[f"layers/bert_backbone/{bias}"][0] = 77
    assert open_checkpoint(preset).tensors.f32(name)[0] == 77
    assert same != 77
    with h5py.File(preset / "task.weights.h5", "r+") as file:
        del file[f"layers/bert_backbone/{bias}"]
        file[f"layers/bert_backbone/{bias}"] = np.ones(3, "f4")
    with pytest.raises(CheckpointError, match=rf"'{bias}' is F32\[3\], and model\.weights\.h5 has F32\[8\]; the files"):
        open_checkpoint(preset)
    with h5py.File(preset / "task.weights.h5", "r+") as file:
        del file[f"layers/bert_backbone/{bias}"]
        file["layers/bert_backbone/layers/odd/vars/0"] = np.ones(3, "f4")
    with pytest.raises(CheckpointError, match=r"'layers/odd/vars/0' is F32\[3\], and model\.weights\.h5 does not"):
        open_checkpoint(preset)


TEXTS = ["the cat sat", "ab the, cat!", "caf\u00e9 THE \u4e2d Cat."]
PAIRS = [("the cat", "sat the"), ("ab", "cat. c")]


@pytest.mark.parametrize("name", ["bert-classify", "bert-classify-nlp", "distilbert-classify"])
def test_classifiers_that_keras_wrote(tmp_path: Path, name: str) -> None:
    """``make_keras_hub_files.py`` made them: ids and answers of texts and pairs, with an accent."""
    artifact = encast.compile(HUB_GOLDEN / name, tmp_path / "a.encast", dtype="f32")
    tokenizer = Tokenizer.from_str((artifact / "tokenizer.json").read_text())
    tokenizer.no_padding()
    runnable = CpuRunnable(open_artifact(artifact))
    with np.load(HUB_GOLDEN / name / "answers.npz") as answers:
        for of, given in (("texts", TEXTS), ("pairs", PAIRS)):
            for encoding, ids, logits in zip(
                tokenizer.encode_batch(given), answers[f"{of}_ids"], answers[of], strict=True
            ):
                assert encoding.ids == [index for index in ids if index]
                types = None if name.startswith("distil") else [encoding.type_ids]
                found = runnable.run("logits", Batch.of([encoding.ids], types))
                np.testing.assert_allclose(found[0], logits, rtol=0, atol=1e-5)
    runnable.close()


def test_a_masked_lm_that_keras_hub_wrote(tmp_path: Path) -> None:
    artifact = encast.compile(HUB_GOLDEN / "roberta-fill_mask", tmp_path / "a.encast", dtype="f32")
    runnable = CpuRunnable(open_artifact(artifact))
    with np.load(HUB_GOLDEN / "roberta-fill_mask" / "answers.npz") as answers:
        for ids, logits in zip(answers["ids"], answers["logits"], strict=True):
            found = runnable.run("logits", Batch.of([ids.tolist()]), np.arange(len(ids), dtype=np.int32))
            np.testing.assert_allclose(found, logits, rtol=0, atol=1e-5)
    runnable.close()


def test_settings_of_the_tokenizer(tmp_path: Path) -> None:
    _, preset = preset_pair(tmp_path)
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
    rewrite(preset / "tokenizer.json", "AlbertTokenizer")
    with pytest.raises(UnsupportedModelError, match="is 'AlbertTokenizer'; BertTokenizer goes with BertBackbone"):
        _ = open_checkpoint(preset).tokenizer


def test_positions_of_roberta_begin_behind_the_padding(tmp_path: Path) -> None:
    _, preset = preset_pair(tmp_path, "roberta")
    assert open_checkpoint(preset).tokenizer.vocab_size
    path = preset / "assets" / "tokenizer" / "vocabulary.json"
    vocab = json.loads(path.read_text())
    vocab["<pad>"], vocab["<s>"] = vocab["<s>"], vocab["<pad>"]
    path.write_text(json.dumps(vocab))
    with pytest.raises(UnsupportedModelError, match=r"vocabulary\.json: <pad> has id 0; RoBERTa's positions begin"):
        _ = open_checkpoint(preset).tokenizer
    vocab["<pad>"], vocab["<s>"] = vocab["<s>"], vocab["<pad>"]
    vocab["odd"] = vocab.pop("<unk>")
    path.write_text(json.dumps(vocab))
    with pytest.raises(UnsupportedModelError, match=r"vocabulary\.json: lacks <unk>, which .*; KerasHub does without"):
        _ = open_checkpoint(preset).tokenizer


@pytest.mark.parametrize("gone", ["tokenizer.json", "assets", "assets/tokenizer/vocabulary.txt"])
def test_a_tokenizer_that_is_missing(tmp_path: Path, gone: str) -> None:
    """The names are those of a preset: what the Hugging Face layout calls so would not help."""
    _, preset = preset_pair(tmp_path)
    (preset / gone).rename(preset / "elsewhere")
    message = rf"no {gone if '/' in gone or '.' in gone else 'assets/tokenizer/vocabulary.txt'}; .* its tokenizer in"
    with pytest.raises(CheckpointError, match=message):
        _ = open_checkpoint(preset).tokenizer
    (preset / gone).write_text("x") if gone == "assets" else (preset / "vocab.txt").write_text("x")
    with pytest.raises(CheckpointError, match=message):
        _ = open_checkpoint(preset).tokenizer


def test_files_that_are_missing_or_of_another_kind(tmp_path: Path) -> None:
    _, preset = preset_pair(tmp_path)
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
    with pytest.raises(CheckpointError, match=r"'layers/dense/vars/0' has the shape \[2, 2, 2, 2\], .* = \[8, 8\];"):
        open_checkpoint(preset)
    (preset / "model.weights.h5").rename(preset / "model.weights.json")
    with pytest.raises(UnsupportedModelError, match=r"the weights are in shards \(model\.weights\.json\)"):
        open_checkpoint(preset)
    (preset / "model.weights.json").rename(preset / "model.weights.h5")
    rewrite(preset / "config.json")
    stored = json.loads((preset / "config.json").read_text())
    (preset / "config.json").write_text(json.dumps({**stored, "registered_name": None}))
    with pytest.raises(CheckpointError, match=r"config\.json: registered_name is null; a preset of KerasHub has"):
        open_checkpoint(preset)
    (preset / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(CheckpointError, match=r"no weights; .*model\.weights\.h5 \(Keras, which goes with a"):
        open_checkpoint(preset)


@pytest.mark.parametrize("heads", [1, 4, 8])
@pytest.mark.parametrize("arch", ARCHS)
def test_another_number_of_heads_than_is_stored(tmp_path: Path, arch: str, heads: int) -> None:
    """All of them make matrices of one shape in the Hugging Face layout, and other answers."""
    _, preset = preset_pair(tmp_path, arch, "features")
    rewrite(preset / "config.json", num_heads=heads)
    stored, wanted = r"\[8, 2, 4\]", rf"\[8, {heads}, {8 // heads}\]"
    with pytest.raises(CheckpointError, match=rf"y_dense/vars/0' has the shape {stored}, .*num_heads.* = {wanted};"):
        open_checkpoint(preset)


@pytest.mark.parametrize(
    ("file", "path", "shape"),
    [
        ("model", "layers/transformer_encoder/_self_attention_layer/query_dense/vars/0", (8, 8)),
        ("model", "layers/transformer_encoder/_self_attention_layer/value_dense/vars/1", (8,)),
        ("model", "layers/transformer_encoder_1/_self_attention_layer/output_dense/vars/0", (8, 2, 4)),
        ("model", "layers/transformer_encoder/_feedforward_intermediate_dense/vars/0", (8, 4, 4)),
        ("model", "layers/transformer_encoder/_feedforward_intermediate_dense/vars/1", (2, 8)),
        ("model", "layers/layer_normalization/vars/0", (2, 4)),
        ("model", "layers/position_embedding/vars/0", (8, 48)),
        ("model", "layers/dense/vars/1", (2, 2, 2)),
        ("task", "layers/dense/vars/0", (3, 8)),
        ("task", "layers/dense/vars/1", (3, 1)),
    ],
)
def test_other_shapes_than_the_settings_say(tmp_path: Path, file: str, path: str, shape: tuple[int, ...]) -> None:
    _, preset = preset_pair(tmp_path)
    with h5py.File(preset / f"{file}.weights.h5", "r+") as opened:
        was = opened[path].shape
        del opened[path]
        opened[path] = np.zeros(shape, "f4")
    sizes = [re.escape(str(list(each))) for each in (shape, was)]
    with pytest.raises(
        CheckpointError, match=rf"{file}\.weights\.h5: '{path}' has the shape {sizes[0]}, .* = {sizes[1]};"
    ):
        open_checkpoint(preset)


@pytest.mark.parametrize("shape", [(0, 2**40), (2**31, 0), (), (3,), (26, 8)], ids=str)
def test_positions_of_roberta_that_lie(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Rows are put before them, which must not be made of a shape that nobody has checked."""
    _, preset = preset_pair(tmp_path, "roberta", "features")
    path = "layers/token_and_position_embedding/position_embedding/vars/0"
    with h5py.File(preset / "model.weights.h5", "r+") as file:
        del file[path]
        file.create_dataset(path, shape, "f4")
        if 0 not in shape:
            file[path][...] = 1
    with pytest.raises(CheckpointError, match=r"position_embedding/vars/0' has the shape \["):
        open_checkpoint(preset)


def test_quantised_weights(tmp_path: Path) -> None:
    _, preset = preset_pair(tmp_path)
    path = "layers/transformer_encoder/_feedforward_output_dense/vars/0"
    with h5py.File(preset / "model.weights.h5", "r+") as file:
        shape = file[path].shape
        del file[path]
        file[path] = np.zeros(shape, "i1")
    with pytest.raises(UnsupportedModelError, match=rf"'{path}' is stored as I8; .* quantize\(\) was called, save"):
        open_checkpoint(preset)


def test_weights_of_pytorch_come_first(tmp_path: Path) -> None:
    source, preset = preset_pair(tmp_path)
    assert open_checkpoint(preset).keras
    shutil.copy(source / "model.safetensors", preset)
    shutil.copy(source / "config.json", preset)
    assert not open_checkpoint(preset).keras


def test_what_needs_weights_of_pytorch_says_so(tmp_path: Path) -> None:
    _, preset = preset_pair(tmp_path)
    with pytest.raises(InputError, match=r"layout; this is a preset of KerasHub\. `encast compile` takes"):
        prune_checkpoint(preset, tmp_path / "pruned", pattern=Pattern.parse("4x1"), sparsity=0.5)


def test_files_that_a_hub_repository_is_asked_for() -> None:
    names = [
        "README.md", "assets/tokenizer/vocabulary.txt", "config.json", "metadata.json", "model.weights.h5",
        "preprocessor.json", "task.json", "task.weights.h5", "tokenizer.json",
    ]  # fmt: skip
    assert choose_files(names) == [name for name in names if name not in ("README.md", "metadata.json")]
    assert choose_files([*names, "model.safetensors"]) == ["config.json", "model.safetensors", "tokenizer.json"]
    # The message about shards needs no shard.
    shards = ["config.json", "model.weights.json", "model_00000.weights.h5", "tokenizer.json"]
    assert choose_files(shards) == ["config.json", "model.weights.json", "tokenizer.json"]
