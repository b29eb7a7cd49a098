"""TensorFlow's BERT: the same artifact, to the bit, as of the same weights in the Hugging Face layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundle_files import as_bundle, masked_crc, meta_graph, saved_model, variables_of, write_bundle
from checkpoints import make_checkpoint

import encast
from encast.archs import build_graph
from encast.errors import CheckpointError, InputError, UnsupportedModelError
from encast.importers import open_checkpoint
from encast.importers.crc32c import crc32c, unmask
from encast.importers.google_bert import rename
from encast.importers.hub import choose_files
from encast.importers.table_file import read_table
from encast.importers.weights import StoredTensor
from encast.sparsity import Pattern, prune_checkpoint

IDS = {name: [-1, 16] for name in ("input_ids", "input_mask", "segment_ids")} | {"label_ids": [-1]}


def made(folder: Path, head: str = "features", **options: Any) -> Path:
    """A small BERT for transformers, whose config says no more of its head than bert_config.json can."""
    options = {"layers": 2, "hidden": 16, "heads": 2, "vocab": 60, "tokenizer_json": False, **options}
    path = make_checkpoint(folder / "huggingface", "bert", head, **options)
    config = json.loads((path / "config.json").read_text())
    labels = len(config.pop("id2label", ()))
    config.pop("label2id", None)
    (path / "config.json").write_text(json.dumps({**config, **({"num_labels": labels} if labels else {})}))
    (path / "tokenizer_config.json").unlink()  # which bert_config.json comes without
    return path


def add_to(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def same_artifacts(one: Path, other: Path) -> None:
    for name in ("graph.json", "weights.safetensors", "tokenizer.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.parametrize(
    ("head", "task"),
    [("features", None), ("features", "embed"), ("classify", None), ("classify", "embed"), ("answer", None),
     ("fill_mask", None)],
)  # fmt: skip
def test_artifacts_are_the_same_bits(tmp_path: Path, head: str, task: str | None) -> None:
    source = made(tmp_path, head)
    google = as_bundle(source, tmp_path / "google", shards=2, block_size=300)
    expected = encast.compile(source, tmp_path / "a.encast", dtype="f32", task=task)
    same_artifacts(expected, encast.compile(google, tmp_path / "b.encast", dtype="f32", task=task))
    prefix = google / "bert_model.ckpt"
    same_artifacts(expected, encast.compile(prefix, tmp_path / "c.encast", dtype="f32", task=task))


def test_the_index_of_the_tests_has_blocks_and_shared_keys(tmp_path: Path) -> None:
    """The round trips above go through what they are meant to: many blocks, restarts within, keys in part."""
    google = as_bundle(made(tmp_path), tmp_path / "google", shards=2, block_size=300)
    data = (google / "bert_model.ckpt.index").read_bytes()
    assert len(read_table(data)) == 1 + 39
    assert data.count(b"bert/encoder/layer_0/attention/self/query") < 3
    assert data.count(b"bert/") > 10


def test_config_and_task_follow_from_the_variables(tmp_path: Path) -> None:
    google = as_bundle(made(tmp_path, "classify", labels=5), tmp_path / "google")
    checkpoint = open_checkpoint(google)
    assert checkpoint.tensorflow
    assert checkpoint.architecture == "BertForSequenceClassification"
    assert build_graph(checkpoint).meta.labels == tuple(f"LABEL_{index}" for index in range(5))


def test_fields_that_bert_config_leaves_out_are_those_of_its_reader(tmp_path: Path) -> None:
    google = as_bundle(made(tmp_path, type_vocab=16), tmp_path / "google")
    config = json.loads((google / "bert_config.json").read_text())
    del config["type_vocab_size"], config["hidden_act"]
    (google / "bert_config.json").write_text(json.dumps(config))
    assert build_graph(open_checkpoint(google)).meta.type_vocab == 16


def test_what_the_config_says_of_labels_and_head_counts(tmp_path: Path) -> None:
    google = as_bundle(made(tmp_path, "classify"), tmp_path / "google")
    config = json.loads((google / "bert_config.json").read_text())
    config.update(architectures=["BertForTokenClassification"], id2label={"0": "a", "1": "b", "2": "c"})
    (google / "bert_config.json").write_text(json.dumps(config))
    meta = build_graph(open_checkpoint(google)).meta
    assert (meta.task, meta.labels) == ("tag", ("a", "b", "c"))


def test_variables_of_training_are_left_out_and_others_are_named(tmp_path: Path) -> None:
    variables = variables_of(made(tmp_path))
    name = "bert/pooler/dense/kernel"
    slots = {f"{name}/adam_m": variables[name], f"{name}/adam_v": variables[name], f"{name}/Adam_1": variables[name]}
    slots |= {f"{name}/lamb_m": variables[name], f"{name}/LAMBOptimizer": variables[name]}
    slots |= {"loss_scale": np.float32([1]), "good_steps": np.int32([1]), "current_loss_scale": np.float32([1])}
    slots |= {"signal_early_stopping/STOP": np.int32([1])}
    counters = {"global_step": np.array(7), "beta1_power": np.float32([0.5]).reshape(())}
    google = as_bundle(tmp_path / "huggingface", tmp_path / "google")
    write_bundle(google, {**variables, **slots, **counters})
    assert len(open_checkpoint(google).tensors) == len(variables)
    write_bundle(google, {**variables, "gate/kernel": np.ones((2, 3), "f4")})
    with pytest.raises(CheckpointError, match=r"1 tensors have no place .*'gate/kernel' \[2, 3\]"):
        build_graph(open_checkpoint(google))
    write_bundle(google, {**variables, "bert.x.weight": np.ones((2, 3), "f4")})
    with pytest.raises(CheckpointError, match=r"'bert\.x\.weight' has dots in its name"):
        open_checkpoint(google)


def test_bf16_f16_and_views(tmp_path: Path) -> None:
    prefix = write_bundle(
        tmp_path,
        {
            "bert/pooler/dense/kernel": np.arange(6, dtype="f2").reshape(2, 3),
            "bert/pooler/dense/bias": np.array([0x3F80, 0x4000], "u2"),
            "bert/embeddings/word_embeddings": np.ones((2, 2), "f4"),
        },
    )
    (tmp_path / "bert_config.json").write_text('{"vocab_size": 2}')
    tensors = open_checkpoint(prefix).tensors
    np.testing.assert_array_equal(tensors.f32("bert.pooler.dense.weight"), [[0, 3], [1, 4], [2, 5]])
    np.testing.assert_array_equal(tensors.f32("bert.pooler.dense.bias"), [1, 2])
    assert tensors.dtype("bert.pooler.dense.bias") == "BF16"
    assert not tensors.f32("bert.embeddings.word_embeddings.weight").flags.owndata  # lies in the mapped file


LAYER = {
    "attention/self/query": "attention.self.query", "attention/self/key": "attention.self.key",
    "attention/self/value": "attention.self.value", "attention/output/dense": "attention.output.dense",
    "intermediate/dense": "intermediate.dense", "output/dense": "output.dense",
}  # fmt: skip
NAMES = {
    "bert/embeddings/word_embeddings": "bert.embeddings.word_embeddings.weight",
    "bert/embeddings/position_embeddings": "bert.embeddings.position_embeddings.weight",
    "bert/embeddings/token_type_embeddings": "bert.embeddings.token_type_embeddings.weight",
    "bert/embeddings/LayerNorm/gamma": "bert.embeddings.LayerNorm.weight",
    "bert/embeddings/LayerNorm/beta": "bert.embeddings.LayerNorm.bias",
    **{f"bert/encoder/layer_11/{of}/kernel": f"bert.encoder.layer.11.{to}.weight" for of, to in LAYER.items()},
    **{f"bert/encoder/layer_11/{of}/bias": f"bert.encoder.layer.11.{to}.bias" for of, to in LAYER.items()},
    "bert/encoder/layer_11/attention/output/LayerNorm/gamma": "bert.encoder.layer.11.attention.output.LayerNorm.weight",
    "bert/encoder/layer_11/output/LayerNorm/beta": "bert.encoder.layer.11.output.LayerNorm.bias",
    "bert/pooler/dense/kernel": "bert.pooler.dense.weight",
    "bert/pooler/dense/bias": "bert.pooler.dense.bias",
    "cls/predictions/transform/dense/kernel": "cls.predictions.transform.dense.weight",
    "cls/predictions/transform/LayerNorm/gamma": "cls.predictions.transform.LayerNorm.weight",
    "cls/predictions/output_bias": "cls.predictions.bias",
    "cls/seq_relationship/output_weights": "cls.seq_relationship.weight",
    "cls/seq_relationship/output_bias": "cls.seq_relationship.bias",
    "cls/squad/output_weights": "qa_outputs.weight",
    "cls/squad/output_bias": "qa_outputs.bias",
    "output_weights": "classifier.weight",
    "output_bias": "classifier.bias",
}
"""Of modeling.py, run_pretraining.py, run_squad.py and run_classifier.py, and BertForX of transformers."""


@pytest.mark.parametrize(("variable", "name"), NAMES.items())
def test_names(variable: str, name: str) -> None:
    def stored() -> StoredTensor:
        return StoredTensor("F32", (2, 3), "", lambda: np.arange(6, dtype="f4").reshape(2, 3))

    tensors = rename({each: stored() for each in {variable, "bert/pooler/dense/kernel"}}, "")
    expected = (3, 2) if variable.endswith("kernel") else (2, 3)
    assert tensors[name].shape == tensors[name].elements().shape == expected


def test_an_export_that_tensorflow_wrote(tmp_path: Path) -> None:
    """``make_tensorflow_export.py`` wrote it."""
    export = shutil.copytree(Path(__file__).parents[1] / "golden" / "tensorflow", tmp_path / "export")
    (export / "bert_config.json").write_text('{"hidden_act": "gelu", "vocab_size": 5}')
    checkpoint = open_checkpoint(export)
    assert checkpoint.config["hidden_act"] == "gelu_new"
    assert checkpoint.config["num_labels"] == 4
    assert checkpoint.architecture == "BertForSequenceClassification"
    tensors = checkpoint.tensors
    assert len(tensors) == 3
    np.testing.assert_array_equal(tensors.f32("bert.embeddings.word_embeddings.weight"), np.arange(10).reshape(5, 2))
    inner = tensors.f32("bert.encoder.layer.0.intermediate.dense.weight")
    np.testing.assert_array_equal(inner, [[0, 3], [1, 4], [2, 5]])
    np.testing.assert_array_equal(tensors.f32("classifier.weight"), np.arange(8).reshape(4, 2))


def test_heads_that_are_not_known_or_two(tmp_path: Path) -> None:
    variables = variables_of(made(tmp_path, "classify"))
    google = as_bundle(tmp_path / "huggingface", tmp_path / "google")
    write_bundle(google, {**variables, "cls/tagger/kernel": np.ones((16, 3), "f4")})
    with pytest.raises(CheckpointError, match=r"1 tensors have no place .*'cls/tagger/kernel' \[16, 3\]"):
        build_graph(open_checkpoint(google))
    squad = {"cls/squad/output_weights": np.ones((2, 16), "f4"), "cls/squad/output_bias": np.ones(2, "f4")}
    write_bundle(google, {**variables, **squad})
    with pytest.raises(CheckpointError, match=r"bert_config\.json: the checkpoint has two heads"):
        open_checkpoint(google)
    add_to(google / "bert_config.json", architectures=["BertForQuestionAnswering"])
    assert build_graph(open_checkpoint(google)).meta.task == "answer"


def test_a_head_for_tags_is_asked_for_by_architectures(tmp_path: Path) -> None:
    google = as_bundle(made(tmp_path, "classify"), tmp_path / "google")
    with pytest.raises(
        UnsupportedModelError, match=r"another one, say so by architectures in .*google/bert_config\.json"
    ):
        build_graph(open_checkpoint(google), "tag")
    add_to(google / "bert_config.json", architectures=["BertForTokenClassification"])
    assert build_graph(open_checkpoint(google), "tag").meta.task == "tag"


# Where a checkpoint is


def test_the_file_checkpoint_says_which_one_is_the_latest(tmp_path: Path) -> None:
    google = as_bundle(made(tmp_path), tmp_path / "google", "model.ckpt-10")
    write_bundle(google, {"bert/older": np.ones(1, "f4")}, "model.ckpt-9")
    with pytest.raises(CheckpointError, match=r"2 checkpoints and no file `checkpoint`.*model\.ckpt-9"):
        open_checkpoint(google)
    state = 'model_checkpoint_path: "/gone/model.ckpt-10"\nall_model_checkpoint_paths: "/gone/model.ckpt-9"\n'
    (google / "checkpoint").write_text(state)
    checkpoint = open_checkpoint(google)
    assert "bert.pooler.dense.weight" in checkpoint.tensors
    _ = checkpoint.tokenizer
    provenance = checkpoint.provenance
    names = ["bert_config.json", "checkpoint", "model.ckpt-10.data-00000-of-00001", "model.ckpt-10.index", "vocab.txt"]
    assert list(provenance["files"]) == names
    (google / "checkpoint").write_text('model_checkpoint_path: "C:\\\\m\\\\model.ckpt-10"')
    assert "bert.pooler.dense.weight" in open_checkpoint(google).tensors
    (google / "checkpoint").write_text(state.replace("-10", "-11"))
    with pytest.raises(CheckpointError, match=r"names 'model\.ckpt-11', which is not here"):
        open_checkpoint(google)
    (google / "checkpoint").write_text("nonsense")
    with pytest.raises(CheckpointError, match="must have one line model_checkpoint_path"):
        open_checkpoint(google)


@pytest.mark.parametrize("place", ["", "assets", "assets.extra"])
def test_saved_models(tmp_path: Path, place: str) -> None:
    source = made(tmp_path, "classify")
    google = as_bundle(source, tmp_path / "google")
    export = tmp_path / "export"
    write_bundle(export / "variables", variables_of(source), "variables", shards=2)
    graph = meta_graph(["Erf"], IDS, {"probabilities": [-1, 3]})
    (export / "saved_model.pb").write_bytes(saved_model(meta_graph(tags=["train"]), graph))
    with pytest.raises(CheckpointError, match=r"export: no bert_config\.json, which gives the sizes"):
        open_checkpoint(export)
    (export / place).mkdir(exist_ok=True)
    shutil.copy(google / "bert_config.json", export / place)
    with pytest.raises(CheckpointError, match=r"accepted are tokenizer\.json or, for this model, vocab\.txt"):
        _ = open_checkpoint(export).tokenizer
    shutil.copy(google / "vocab.txt", export / place)
    compiled = encast.compile(export, tmp_path / "a.encast", dtype="f32")
    same_artifacts(compiled, encast.compile(source, tmp_path / "b.encast", dtype="f32"))
    files = json.loads((compiled / "card.json").read_text())["source"]["files"]
    inside = f"{place}/" if place else ""
    assert {f"{inside}vocab.txt", f"{inside}bert_config.json", "saved_model.pb", "variables/variables.index"} < set(
        files
    )


def test_the_vocabulary_may_lie_elsewhere_than_the_config(tmp_path: Path) -> None:
    google = as_bundle(made(tmp_path), tmp_path / "google")
    write_bundle(google / "variables", variables_of(tmp_path / "huggingface"), "variables")
    (google / "saved_model.pb").write_bytes(saved_model(meta_graph()))
    (google / "assets").mkdir()
    (google / "vocab.txt").rename(google / "assets" / "vocab.txt")
    assert open_checkpoint(google).tokenizer.vocab_size == 60


def test_signatures_tell_tags_and_contradictions(tmp_path: Path) -> None:
    google = as_bundle(made(tmp_path, "classify"), tmp_path / "google")
    write_bundle(google / "variables", variables_of(tmp_path / "huggingface"), "variables")

    def task(outputs: Any, inputs: Any = IDS) -> str:
        (google / "saved_model.pb").write_bytes(saved_model(meta_graph(["Erf"], inputs, outputs)))
        return build_graph(open_checkpoint(google)).meta.task

    assert task({"probabilities": [-1, 3]}) == "classify"
    assert task({"probabilities": [-1, 16, 3]}) == "tag"
    assert task({"logits": [-1, -1], "other": [-1, 7]}) == "classify"
    assert task({"probabilities": [-1, 9]}, {"pixels": [-1, 5]}) == "classify"
    with pytest.raises(CheckpointError, match="output_weights is for 3 labels, the graph's signature gives 4"):
        task({"probabilities": [-1, 4]})


def test_graphs_without_the_tag_serve(tmp_path: Path) -> None:
    google = as_bundle(made(tmp_path), tmp_path / "google")
    write_bundle(google / "variables", variables_of(tmp_path / "huggingface"), "variables")
    (google / "saved_model.pb").write_bytes(saved_model(meta_graph(tags=["train"])))
    open_checkpoint(google)  # the only one
    (google / "saved_model.pb").write_bytes(saved_model(meta_graph(tags=["train"]), meta_graph(tags=[])))
    with pytest.raises(UnsupportedModelError, match="2 graphs, 0 of them with the tag 'serve'"):
        open_checkpoint(google)
    shutil.rmtree(google / "variables")
    (google / "saved_model.pb").write_bytes(saved_model(meta_graph()))
    with pytest.raises(CheckpointError, match="no folder variables"):
        open_checkpoint(google)


@pytest.mark.parametrize(
    ("ops", "said", "found"),
    [(["Erf"], "gelu", "gelu"), (["Tanh", "Pow"], "gelu", "gelu_new"), (["Tanh"], "GELU", "gelu_new"),
     (["Tanh"], "relu", "relu"), (None, "gelu", "gelu"), ([], "gelu_python", "gelu_python"), (["Erf"], "GELU", "gelu")],
)  # fmt: skip
def test_the_graph_beside_a_checkpoint_says_which_gelu(tmp_path: Path, ops: Any, said: str, found: str) -> None:
    google = as_bundle(made(tmp_path), tmp_path / "google")
    add_to(google / "bert_config.json", hidden_act=said)
    if ops is not None:
        (google / "bert_model.ckpt.meta").write_bytes(meta_graph(ops))
    assert open_checkpoint(google).config["hidden_act"] == found


@pytest.mark.parametrize(("ops", "found"), [([], "neither"), (["FusedGelu"], "neither"), (["Tanh", "Erf"], "both")])
def test_a_graph_that_does_not_say_which_gelu(tmp_path: Path, ops: list[str], found: str) -> None:
    """The pooler's Tanh and a schedule's Pow, which every graph of ``meta_graph`` has, are no evidence."""
    google = as_bundle(made(tmp_path), tmp_path / "google")
    (google / "bert_model.ckpt.meta").write_bytes(meta_graph(ops))
    with pytest.raises(CheckpointError, match=rf"the graph has {found} .*\"gelu_new\" for .*\"gelu_python\" for"):
        open_checkpoint(google)


def test_weights_in_the_hugging_face_layout_come_first(tmp_path: Path) -> None:
    source = made(tmp_path)
    as_bundle(source, source)
    checkpoint = open_checkpoint(source)
    assert not checkpoint.tensorflow
    assert checkpoint.config_file == "config.json"
    assert open_checkpoint(source / "bert_model.ckpt").tensorflow
    (source / "model.safetensors").unlink()
    assert open_checkpoint(source).tensorflow


def test_folders_for_transformers_may_have_files_of_these_names(tmp_path: Path) -> None:
    source = made(tmp_path)
    (source / "model.safetensors").unlink()
    (source / "faiss.index").write_bytes(b"index")
    (source / "checkpoint").write_text("epoch 3")
    with pytest.raises(CheckpointError, match="no weights; accepted are"):
        open_checkpoint(source)


def test_files_in_place_of_a_saved_model_s_folders(tmp_path: Path) -> None:
    google = as_bundle(made(tmp_path), tmp_path / "google")
    write_bundle(google / "variables", variables_of(tmp_path / "huggingface"), "variables")
    (google / "saved_model.pb").write_bytes(saved_model(meta_graph()))
    (google / "assets").write_text("")
    open_checkpoint(google)
    shutil.rmtree(google / "variables")
    (google / "variables").write_text("")
    with pytest.raises(CheckpointError, match="no folder variables"):
        open_checkpoint(google)


def test_a_config_in_either_form_and_its_name_in_errors(tmp_path: Path) -> None:
    source = made(tmp_path)
    google = as_bundle(source, tmp_path / "google")
    (google / "bert_config.json").rename(google / "config.json")
    assert build_graph(open_checkpoint(google)).meta.hidden == 16
    (google / "config.json").write_text('{"model_type": "albert"}')
    with pytest.raises(UnsupportedModelError, match="model_type is 'albert'; of TensorFlow's checkpoints, bert"):
        open_checkpoint(google)
    (google / "config.json").rename(google / "bert_config.json")
    (google / "bert_config.json").write_text('{"architectures": "Bert"}')
    with pytest.raises(CheckpointError, match=r"google/bert_config\.json: architectures must be a list of strings"):
        open_checkpoint(google)
    (google / "bert_config.json").write_text('{"vocab_size": -1}')
    with pytest.raises(CheckpointError, match=r"google/bert_config\.json: vocab_size is -1"):
        build_graph(open_checkpoint(google))


@pytest.mark.parametrize("token", ["##Ly", "한국", "é", "##й", "ガ"])
def test_vocabularies_that_lowering_changes_ask_whether_texts_are_lowered(tmp_path: Path, token: str) -> None:
    google = as_bundle(made(tmp_path), tmp_path / "google")
    assert json.loads(open_checkpoint(google).tokenizer.json)["normalizer"]["lowercase"] is True
    with (google / "vocab.txt").open("a", encoding="utf-8") as file:
        file.write(f"[Z]\n中\n{token}\n")
    with pytest.raises(
        CheckpointError, match=rf"\({token!r}\).*write .\"do_lower_case\": false. to .*tokenizer_config\.json"
    ):
        _ = open_checkpoint(google).tokenizer
    (google / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert json.loads(open_checkpoint(google).tokenizer.json)["normalizer"]["lowercase"] is False


def test_what_needs_the_hugging_face_layout_says_so(tmp_path: Path) -> None:
    google = as_bundle(made(tmp_path), tmp_path / "google")
    with pytest.raises(
        InputError,
        match="google: pruning needs a folder in the Hugging Face layout; this is a checkpoint of TensorFlow",
    ):
        prune_checkpoint(google, tmp_path / "pruned", pattern=Pattern.parse("4x1"), sparsity=0.5)
    assert not (tmp_path / "pruned").exists()


def test_files_that_a_hub_repository_is_asked_for() -> None:
    names = [
        "README.md", "bert_config.json", "vocab.txt", "model.ckpt.index", "model.ckpt.meta", "checkpoint",
        "model.ckpt.data-00000-of-00001", "variables/variables.index", "other.index", "assets/vocab.txt",
    ]  # fmt: skip
    assert set(names) - set(choose_files(names)) == {
        "README.md", "variables/variables.index", "other.index", "assets/vocab.txt"
    }  # fmt: skip
    names = ["saved_model.pb", "variables/variables.index", "variables/variables.data-00000-of-00001"]
    names += ["assets/vocab.txt", "assets.extra/bert_config.json"]
    assert set(choose_files([*names, "assets/film.mp4", "x.meta"])) == set(names)
    assert choose_files(["config.json", "faiss.index", "x.meta", "checkpoint", "assets/vocab.txt"]) == ["config.json"]
    names = ["bert_config.json", "vocab.txt", "model.ckpt.index", "model.ckpt.data-00000-of-00001"]
    assert choose_files([*names, "config.json", "model.safetensors"]) == [
        "config.json",
        "model.safetensors",
        "vocab.txt",
    ]


# CRC-32C


def test_published_checksums() -> None:
    """RFC 3720, appendix B.4, and the check value of the catalogue of CRC algorithms."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"") == 0


@pytest.mark.parametrize("size", [1, 255, 256, 257, 4097, (1 << 20) - 1, 1 << 20, (2 << 20) + 77])
def test_checksums_of_every_size(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    assert crc32c(data) == unmask(masked_crc(data))
