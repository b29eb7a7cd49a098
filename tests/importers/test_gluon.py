"""GluonNLP's files give the same artifacts as the same weights in the Hugging Face layout."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gluon_files import SCHEMES, encoder_shapes, pair, params_bytes, small_bert, sparse_file
from safetensors.numpy import load_file

from encast.archs import build_graph
from encast.compile import compile
from encast.errors import CheckpointError, EncastError, InputError, UnsupportedModelError
from encast.importers import checkpoint_name, open_checkpoint
from encast.sparsity import Pattern, prune_checkpoint

MODELS = [
    ("bert", "features"),
    ("bert", "embed"),
    ("bert", "classify"),
    ("bert", "tag"),
    ("bert", "answer"),
    ("bert", "fill_mask"),
    ("roberta", "features"),
    ("roberta", "classify"),
    ("roberta", "fill_mask"),
    ("distilbert", "features"),
]


@pytest.mark.parametrize(("arch", "head"), MODELS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_artifact_is_the_same_bits(tmp_path: Path, arch: str, head: str, scheme: str) -> None:
    hugging_face, gluon = pair(tmp_path, arch, head, scheme)
    # The same limits and classes of tokenizers; without this file RoBERTa's pairs have GluonNLP's form.
    shutil.copy(hugging_face / "tokenizer_config.json", gluon.parent)
    made = [compile(source, tmp_path / f"{i}.encast", task=head) for i, source in enumerate((hugging_face, gluon))]
    for name in ("graph.json", "weights.safetensors", "tokenizer.json"):
        assert (made[0] / name).read_bytes() == (made[1] / name).read_bytes(), name


def test_the_head_says_the_task(tmp_path: Path) -> None:
    for number, (arch, head) in enumerate(MODELS):
        folder = tmp_path / str(number)
        folder.mkdir()
        graph = build_graph(open_checkpoint(pair(folder, arch, head)[1]))
        assert graph.meta.task == ("features" if head == "embed" else head)


@pytest.mark.parametrize("rows", [1, 3])
def test_labels_follow_from_the_head(tmp_path: Path, rows: int) -> None:
    _, gluon = pair(tmp_path, "bert", "classify", labels=rows)
    config = json.loads((gluon.parent / "config.json").read_text())
    del config["id2label"]
    (gluon.parent / "config.json").write_text(json.dumps(config))
    meta = build_graph(open_checkpoint(gluon)).meta
    assert meta.labels == tuple(f"LABEL_{row}" for row in range(rows))
    assert meta.problem_type == ("regression" if rows == 1 else "single_label")


def test_a_regression_is_a_classifier_of_one_number(tmp_path: Path) -> None:
    _, gluon = pair(tmp_path, "bert", "classify", labels=1)
    rewritten(gluon, lambda name: name.replace("classifier.1", "regression.1"))
    assert build_graph(open_checkpoint(gluon)).meta.problem_type == "regression"


def test_a_shared_table_that_was_saved_once(tmp_path: Path) -> None:
    """save_parameters(deduplicate=True) keeps one of the two names, which may be the decoder's."""
    _, gluon = pair(tmp_path, "bert", "fill_mask")
    whole = compile(gluon, tmp_path / "whole.encast")
    rewritten(gluon, lambda name: None if name == "word_embed.0.weight" else name)
    once = compile(gluon, tmp_path / "once.encast")
    assert (whole / "weights.safetensors").read_bytes() == (once / "weights.safetensors").read_bytes()


def test_a_bert_without_token_types_has_rows_of_zeros(tmp_path: Path) -> None:
    _, gluon = pair(tmp_path, "bert", "classify")
    rewritten(gluon, lambda name: None if "token_type" in name else name)
    graph = build_graph(open_checkpoint(gluon))
    assert not graph.constants["embeddings.token_type_embeddings.weight"].array.any()
    assert graph.meta.type_vocab == 2


def test_provenance_names_the_files(tmp_path: Path) -> None:
    _, gluon = pair(tmp_path, "roberta", "features")
    card = json.loads((compile(gluon, tmp_path / "net.encast") / "card.json").read_text())
    names = ["config.json", "merges.txt", "net.params", "net.vocab"]
    files = {name: hashlib.sha256((gluon.parent / name).read_bytes()).hexdigest() for name in names}
    assert card["source"] == {"source": str(gluon), "revision": None, "files": files}


def test_other_files_of_the_folder_do_not_count(tmp_path: Path) -> None:
    _, gluon = pair(tmp_path, "bert", "features")
    for name in ("modules.json", "sentence_bert_config.json", "model.safetensors"):
        (gluon.parent / name).write_text("nonsense")
    checkpoint = open_checkpoint(gluon)
    assert checkpoint.modules is None
    assert checkpoint.tokenizer.vocab_size


def test_names_and_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkpoint_name("models/net.params") == "net"
    _, gluon = pair(tmp_path, "bert", "features")
    (tmp_path / "folder.params").mkdir()
    assert checkpoint_name(tmp_path / "folder.params") == "folder.params"
    monkeypatch.chdir(gluon.parent)
    assert open_checkpoint("net.params").architecture == "BertModel"
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint("other.params")
    (gluon.parent / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"give the parameter file itself, 'net\.params'"):
        open_checkpoint(gluon.parent)


def test_what_needs_a_folder_says_so(tmp_path: Path) -> None:
    _, gluon = pair(tmp_path, "bert", "features")
    with pytest.raises(InputError, match="pruning needs a folder in the Hugging Face layout"):
        prune_checkpoint(gluon, tmp_path / "pruned", pattern=Pattern(4, 1), sparsity=0.5)


# What shapes do not tell


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (encoder_shapes(12, 768, 3072), ("bert", 12, "gelu", 1e-12)),
        (encoder_shapes(24, 1024, 4096), ("bert", 16, "gelu", 1e-12)),
        (encoder_shapes(12, 768, 3072, positions=513), ("bert", 12, "relu", 1e-5)),
        (encoder_shapes(12, 768, 3072, types=False), ("roberta", 12, "gelu", 1e-5)),
        (encoder_shapes(24, 1024, 4096, types=False), ("roberta", 16, "gelu", 1e-5)),
        (encoder_shapes(6, 768, 3072, types=False), ("distilbert", 12, "gelu", 1e-5)),
    ],
)
def test_published_sizes(tmp_path: Path, shapes: Any, expected: tuple[Any, ...]) -> None:
    config = open_checkpoint(sparse_file(tmp_path / "net.params", shapes)).config
    fields = ("n_heads", "activation", "gluon_layer_norm_eps")
    if expected[0] != "distilbert":
        fields = ("num_attention_heads", "hidden_act", "layer_norm_eps")
    assert (config["model_type"], *(config[field] for field in fields)) == expected
    assert config["max_position_embeddings"] == shapes["encoder.position_weight"][0] + 2 * (expected[0] == "roberta")


def test_other_sizes_are_asked_for_by_name(tmp_path: Path) -> None:
    path = sparse_file(tmp_path / "net.params", encoder_shapes(2, 8, 16))
    with pytest.raises(CheckpointError, match="do not tell num_attention_heads, hidden_act, layer_norm_eps; write a"):
        open_checkpoint(path)
    (tmp_path / "config.json").write_text('{"num_attention_heads": 2, "hidden_act": "relu"}')
    with pytest.raises(CheckpointError, match="do not tell layer_norm_eps; write a"):
        open_checkpoint(path)
    (tmp_path / "config.json").write_text('{"num_attention_heads": 2, "hidden_act": "relu", "layer_norm_eps": 1e-6}')
    graph = build_graph(open_checkpoint(path))
    assert graph.meta.heads == 2


def test_what_beside_the_file_wins(tmp_path: Path) -> None:
    path = sparse_file(tmp_path / "net.params", encoder_shapes(12, 768, 3072))
    (tmp_path / "config.json").write_text('{"layer_norm_eps": 0.5}')
    config = open_checkpoint(path).config
    assert config["layer_norm_eps"] == 0.5
    assert config["num_attention_heads"] == 12


def test_what_beside_the_file_must_fit(tmp_path: Path) -> None:
    path = small_bert(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(CheckpointError, match=r"'bert\.encoder\.layer\.1\.attention\.self\.query\.weight' is missing"):
        build_graph(open_checkpoint(path))


def test_a_family_is_asked_for_by_name(tmp_path: Path) -> None:
    shapes = encoder_shapes(2, 8, 16, types=False)
    path = sparse_file(tmp_path / "net.params", shapes)
    with pytest.raises(CheckpointError, match=r'write a config\.json beside it with "model_type"'):
        open_checkpoint(path)
    values = {"num_attention_heads": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(values))
    named = sparse_file(tmp_path / "my-RoBERTa.params", shapes)
    assert open_checkpoint(named).architecture == "RobertaModel"
    (tmp_path / "config.json").write_text(json.dumps({**values, "model_type": "electra"}))
    with pytest.raises(UnsupportedModelError, match="model_type is 'electra'; here it is one of"):
        open_checkpoint(path)


# Models that do not fit


def rewritten(path: Path, rename: Any, change: Any = lambda name, array: array) -> None:
    """Writes the file again under other names; None leaves a parameter out."""
    from encast.importers.files import MappedFile
    from encast.importers.mxnet_file import read_params

    arrays = {name: tensor.elements().copy() for name, tensor in read_params(MappedFile(path)).items()}
    path.write_bytes(params_bytes({rename(k): change(k, v) for k, v in arrays.items() if rename(k) is not None}))


@pytest.mark.parametrize(("arch", "head"), [("bert", "classify"), ("roberta", "fill_mask"), ("distilbert", "features")])
def test_every_missing_or_misshapen_parameter_is_told(tmp_path: Path, arch: str, head: str) -> None:
    _, gluon = pair(tmp_path, arch, head)
    whole = gluon.read_bytes()
    names = list(open_names(gluon))
    for gone in names:
        # Token types may be absent, the decoder's table is the embedding's, and a classifier is no part of the encoder.
        if "token_type" not in gone and gone not in ("decoder.3.weight", "word_embed.0.weight"):
            gluon.write_bytes(whole)
            rewritten(gluon, lambda name, gone=gone: None if name == gone else name)
            with pytest.raises(EncastError):
                build_graph(open_checkpoint(gluon), head)
        gluon.write_bytes(whole)
        rewritten(gluon, lambda name: name, lambda name, array, gone=gone: array[..., :-1] if name == gone else array)
        with pytest.raises(EncastError):
            build_graph(open_checkpoint(gluon), head)


def open_names(path: Path) -> list[str]:
    from encast.importers.files import MappedFile
    from encast.importers.mxnet_file import read_params

    return list(read_params(MappedFile(path)))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "encoder.layer_norm.gamma",
            "encoder.batch_norm.gamma",
            r"belong to no model of GluonNLP that encast has \('encoder\.batch_norm\.gamma'\)",
        ),
        ("token_type_embed.0.weight", "arg:bert.word_embed.0.weight", "are one parameter of a model"),
        ("encoder.transformer_cells.1.", "encoder.transformer_cells.3.", r"layers \['0', '3'\] are there"),
        ("encoder.transformer_cells.0.ffn.ffn_1.weight", "pooler.weight", "no parameter for 0.ffn_1"),
        ("encoder.transformer_cells.0.proj.bias", "pooler.weight", r"missing \(0\.proj\.bias\)"),
        ("encoder.transformer_cells.0.ffn.layer_norm.beta", "pooler.bias", r"missing \(0\.ffn_norm\.beta\)"),
        ("token_type_embed.0.weight", "classifier.0.weight", r"'classifier\.bias' is missing"),
    ],
)
def test_names_that_do_not_fit(tmp_path: Path, old: str, new: str, message: str) -> None:
    _, gluon = pair(tmp_path, "bert", "embed")
    rewritten(gluon, lambda name: name.replace(old, new) if name.startswith(old) and "pooler" not in name else
              (None if "pooler" in name and "pooler" in new else name))  # fmt: skip
    with pytest.raises(EncastError, match=message):
        build_graph(open_checkpoint(gluon), "classify" if "classifier" in new else None)


@pytest.mark.parametrize(
    ("arch", "part", "name"),
    [
        ("distilbert", "out", "classifier.0"),
        ("distilbert", "answer", "span_classifier"),
        ("roberta", "answer", "span_classifier"),
        ("roberta", "tag", "tag_classifier"),
    ],
)
def test_heads_that_a_family_does_not_have(tmp_path: Path, arch: str, part: str, name: str) -> None:
    _, gluon = pair(tmp_path, arch, "answer")
    rewritten(gluon, lambda old: old.replace("span_classifier", name))
    with pytest.raises(UnsupportedModelError, match=rf"is {arch}, and has {part}\.bias, {part}\.weight; GluonNLP has"):
        open_checkpoint(gluon)


def test_two_heads_are_refused(tmp_path: Path) -> None:
    shapes = encoder_shapes(1, 8, 16) | {"classifier.1.weight": (3, 8), "classifier.1.bias": (3,)}
    for other in ("span_classifier", "tag_classifier"):
        small_bert(tmp_path)
        two = shapes | {f"{other}.weight": (2, 8), f"{other}.bias": (2,)}
        with pytest.raises(CheckpointError, match=r"has 2 heads, 'classifier\.weight', '.*'; save one model a file"):
            open_checkpoint(sparse_file(tmp_path / "net.params", two))


# Fields that GluonNLP's classes do not follow


def changed(gluon: Path, **fields: Any) -> Path:
    config = json.loads((gluon.parent / "config.json").read_text())
    (gluon.parent / "config.json").write_text(json.dumps({**config, **fields}))
    return gluon


def test_a_masked_lm_head_is_gelu(tmp_path: Path) -> None:
    """_get_decoder of BERTModel has GELU whatever the layers have."""
    (tmp_path / "bert").mkdir()
    (tmp_path / "roberta").mkdir()
    _, bert_file = pair(tmp_path / "bert", "bert", "fill_mask")
    open_checkpoint(changed(bert_file, hidden_act="gelu"))
    with pytest.raises(UnsupportedModelError, match=r"masked-LM head, which in GluonNLP is GELU, .* 'relu'"):
        open_checkpoint(changed(bert_file, hidden_act="relu"))
    _, roberta_file = pair(tmp_path / "roberta", "roberta", "fill_mask")
    build_graph(open_checkpoint(changed(roberta_file, hidden_act="relu")))


def test_a_masked_lm_head_of_ernie_is_refused(tmp_path: Path) -> None:
    shapes = encoder_shapes(12, 768, 3072, positions=513)
    shapes |= {"decoder.0.weight": (768, 768), "decoder.0.bias": (768,)}
    with pytest.raises(UnsupportedModelError, match="save the model with use_decoder=False"):
        open_checkpoint(sparse_file(tmp_path / "net.params", shapes))


def test_distilbert_has_an_epsilon_of_its_own(tmp_path: Path) -> None:
    _, gluon = pair(tmp_path, "distilbert", "features")
    with pytest.raises(CheckpointError, match=r"layer_norm_eps has no effect for DistilBERT; .* gluon_layer_norm_eps"):
        open_checkpoint(changed(gluon, layer_norm_eps=1e-12))


def test_positions_of_roberta_begin_behind_id_1(tmp_path: Path) -> None:
    _, gluon = pair(tmp_path, "roberta", "features")
    open_checkpoint(changed(gluon, pad_token_id=1))
    for value in (0, 3, None):
        with pytest.raises(CheckpointError, match=f"pad_token_id is '{value}'; GluonNLP's RoBERTa has 1"):
            open_checkpoint(changed(gluon, pad_token_id=value))


def test_float16_parameters(tmp_path: Path) -> None:
    hugging_face, gluon = pair(tmp_path, "roberta", "features")
    rewritten(gluon, lambda name: name, lambda name, array: array.astype(np.float16))
    tensors = open_checkpoint(gluon).tensors
    rows = load_file(hugging_face / "model.safetensors")["embeddings.position_embeddings.weight"]
    np.testing.assert_array_equal(tensors.f32("roberta.embeddings.position_embeddings.weight"), rows.astype(np.float16))
