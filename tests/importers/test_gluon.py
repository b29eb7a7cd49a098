"""GluonNLP's files give the same artifacts as the same weights in the Hugging Face layout."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint
from gluon_files import SCHEMES, V2, params_bytes, vocabulary, without_rows, write_gluon
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
    ("roberta", "answer"),
    ("roberta", "fill_mask"),
    ("distilbert", "features"),
    ("distilbert", "answer"),
]


def pair(folder: Path, arch: str, head: str, scheme: str = "attributes", **options: Any) -> tuple[Path, Path]:
    """A checkpoint in the Hugging Face layout and the same as GluonNLP's files."""
    hugging_face = make_checkpoint(folder / "net", arch, head, layers=2, hidden=32, tokenizer_json=False, **options)
    if arch == "roberta":
        without_rows(hugging_face)
    return hugging_face, write_gluon(hugging_face, folder / "gluon", arch, head, scheme)


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


def sparse_file(path: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """A file of zeros that takes no room on the disk."""
    with path.open("wb") as file:
        file.write(struct.pack("<QQQ", 0x112, 0, len(shapes)))
        for shape in shapes.values():
            file.write(struct.pack(f"<Iii{len(shape)}qiii", V2, 0, len(shape), *shape, 1, 0, 0))
            file.seek(4 * int(np.prod(shape)), os.SEEK_CUR)
        file.write(struct.pack("<Q", len(shapes)))
        for name in shapes:
            file.write(struct.pack("<Q", len(name)) + name.encode())
    return path


def encoder_shapes(
    layers: int, hidden: int, inner: int, *, positions: int = 512, types: bool = True
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"word_embed.0.weight": (1000, hidden)}
    if types:
        shapes["token_type_embed.0.weight"] = (2, hidden)
    shapes["encoder.position_weight"] = (positions, hidden)
    shapes |= dict.fromkeys(("encoder.layer_norm.gamma", "encoder.layer_norm.beta"), (hidden,))
    for layer in range(layers):
        at = f"encoder.transformer_cells.{layer}."
        for part, rows, columns in (
            *((f"attention_cell.proj_{role}", hidden, hidden) for role in ("query", "key", "value")),
            ("proj", hidden, hidden),
            ("ffn.ffn_1", inner, hidden),
            ("ffn.ffn_2", hidden, inner),
        ):
            shapes |= {f"{at}{part}.weight": (rows, columns), f"{at}{part}.bias": (rows,)}
        for part in ("layer_norm", "ffn.layer_norm"):
            shapes |= {f"{at}{part}.gamma": (hidden,), f"{at}{part}.beta": (hidden,)}
    return shapes


def small_bert(folder: Path, name: str = "net") -> Path:
    (folder / "config.json").write_text('{"num_attention_heads": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12}')
    return sparse_file(folder / f"{name}.params", encoder_shapes(1, 8, 16))


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


@pytest.mark.parametrize(("arch", "head"), [("bert", "classify"), ("roberta", "fill_mask"), ("distilbert", "answer")])
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
        ("encoder.layer_norm.gamma", "encoder.batch_norm.gamma", "1 parameters belong to no model of GluonNLP"),
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


def test_a_classifier_of_distilbert_is_refused(tmp_path: Path) -> None:
    _, gluon = pair(tmp_path, "distilbert", "answer")
    rewritten(gluon, lambda name: name.replace("span_classifier", "classifier.0"))
    with pytest.raises(
        UnsupportedModelError, match=r"is distilbert, and has out\.bias, out\.weight; GluonNLP has none"
    ):
        open_checkpoint(gluon)


# Vocabularies


def bert(tmp_path: Path, tokens: list[str], name: str = "net", **special: Any) -> Any:
    """The tokenizer of a BERT with that vocabulary."""
    path = small_bert(tmp_path, name)
    roles = {"padding_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    (tmp_path / "vocab.json").write_bytes(vocabulary([*SPECIAL, *tokens], **{**roles, **special}))
    return open_checkpoint(path).tokenizer


SPECIAL = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]


def lowers(tokenizer: Any) -> bool:
    return bool(json.loads(tokenizer.json)["normalizer"]["lowercase"])


@pytest.mark.parametrize(
    ("tokens", "name", "expected"),
    [
        (["hello", "##s"], "net", True),
        (["hello", "Hello", "##s"], "net", False),
        (["Hello", "##s"], "bert_12_768_12_book_corpus_wiki_en_uncased-75cc780f", True),
        (["hello", "##s"], "bert_12_768_12_wiki_cn_cased-885ebb9a", False),
    ],
)
def test_lowering(tmp_path: Path, tokens: list[str], name: str, expected: bool) -> None:
    assert lowers(bert(tmp_path, tokens, name)) is expected


def test_lowering_is_asked_for_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match='"do_lower_case": true'):
        bert(tmp_path, ["\u4e2d", "##\u6587"])
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert lowers(bert(tmp_path, ["\u4e2d", "##\u6587"])) is False


def test_ids_are_those_of_the_vocabulary(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(bert(tmp_path, ["hello", "##s"]).json)
    assert tokenizer.encode("hellos HELLO?").ids == [2, 5, 6, 5, 0, 3]
    assert tokenizer.encode("hello", "hello").type_ids == [0, 0, 0, 1, 1]


def test_special_tokens_of_releases_before_0_9(tmp_path: Path) -> None:
    path = small_bert(tmp_path)
    content = {"idx_to_token": ["<u>", "<p>", "<c>", "<s>", "a", "##b"], "unknown_token": "<u>"}
    content |= {"padding_token": "<p>", "cls_token": "<c>", "sep_token": "<s>", "bos_token": None}
    (tmp_path / "only.vocab").write_text(json.dumps(content))
    special = open_checkpoint(path).tokenizer.special_tokens
    assert {role: special.get(role) for role in ("unk", "pad", "cls", "sep")} == {
        "unk": "<u>", "pad": "<p>", "cls": "<c>", "sep": "<s>"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "idx_to_token must be a list of tokens"),
        ({"idx_to_token": {}}, "idx_to_token must be a list of tokens"),
        ({"idx_to_token": []}, "a list of strings"),
        ({"idx_to_token": ["a", ""]}, "none of them empty"),
        ({"idx_to_token": ["a", 1]}, "a list of strings"),
        ({"idx_to_token": ["a", "\ud800"]}, "half of a surrogate pair"),
        ({"idx_to_token": ["a", "b", "a"]}, "'a' stands twice"),
        ({"idx_to_token": ["a"], "token_to_idx": {"a": 1}}, "say different ids"),
        ({"idx_to_token": ["a"], "identifiers_to_tokens": 1}, "must be an object"),
        ({"idx_to_token": ["a"], "unknown_token": "b"}, "special token for unk, 'b', is none"),
        ({"idx_to_token": ["a"], "mask_token": {}}, "special token for mask, a value of type dict, is none"),
        ({"idx_to_token": ["a\n##b", "##c"]}, "ends in white space"),
        ({"idx_to_token": ["\u2581a", "\u2581b"]}, "pieces of a sentencepiece model"),
        ({"idx_to_token": ["a", "##b"]}, r"unknown token '\[UNK\]'"),
    ],
)
def test_damaged_vocabularies(tmp_path: Path, content: Any, message: str) -> None:
    path = small_bert(tmp_path)
    (tmp_path / "net.vocab").write_text(json.dumps(content))
    with pytest.raises(EncastError, match=message):
        _ = open_checkpoint(path).tokenizer


def test_which_vocabulary(tmp_path: Path) -> None:
    path = small_bert(tmp_path)
    checkpoint = open_checkpoint(path)
    with pytest.raises(
        CheckpointError, match=r"no vocabulary for net\.params; accepted are net\.vocab, net\.vocab\.json"
    ):
        _ = checkpoint.tokenizer
    for name in ("a.vocab", "b.vocab"):
        (tmp_path / name).write_bytes(vocabulary(SPECIAL))
    with pytest.raises(CheckpointError, match=r"there are 'a\.vocab', 'b\.vocab': rename the right one"):
        _ = open_checkpoint(path).tokenizer


# RoBERTa's


def test_pairs_of_roberta_have_one_separator(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    hugging_face, gluon = pair(tmp_path, "roberta", "classify")
    ours = Tokenizer.from_str(open_checkpoint(gluon).tokenizer.json)
    theirs = Tokenizer.from_str(open_checkpoint(hugging_face).tokenizer.json)
    first, last = ours.token_to_id("<s>"), ours.token_to_id("</s>")
    a, b = theirs.encode("the cat", add_special_tokens=False), theirs.encode("sat", add_special_tokens=False)
    assert ours.encode("the cat", "sat").ids == [first, *a.ids, last, *b.ids, last]
    assert ours.encode("the cat").ids == theirs.encode("the cat").ids
    assert ours.encode("the cat").offsets == theirs.encode("the cat").offsets
    assert set(ours.encode("the cat", "sat").type_ids) == {0}


def test_merges_of_roberta(tmp_path: Path) -> None:
    _, gluon = pair(tmp_path, "roberta", "features")
    ranks = gluon.parent / "openai_webtext_bpe_ranks-396d4d8e.json"
    expected = open_checkpoint(gluon).tokenizer.json
    (gluon.parent / "merges.txt").rename(ranks)
    assert open_checkpoint(gluon).tokenizer.json == expected
    ranks.unlink()
    with pytest.raises(CheckpointError, match=r"no merges; .*openai_webtext_bpe_ranks-396d4d8e\.json"):
        _ = open_checkpoint(gluon).tokenizer


def test_a_tokenizer_json_takes_the_place_of_a_vocabulary(tmp_path: Path) -> None:
    _, gluon = pair(tmp_path, "roberta", "features")
    (gluon.parent / "tokenizer.json").write_text(open_checkpoint(gluon).tokenizer.json)
    for name in ("merges.txt", "net.vocab"):
        (gluon.parent / name).unlink()
    checkpoint = open_checkpoint(gluon)
    assert checkpoint.tokenizer.special_tokens["mask"] == "<mask>"
    assert sorted(checkpoint.provenance["files"]) == ["config.json", "net.params", "tokenizer.json"]


def test_a_padding_token_elsewhere_is_refused(tmp_path: Path) -> None:
    _, gluon = pair(tmp_path, "roberta", "features")
    vocab = json.loads((gluon.parent / "net.vocab").read_text())["idx_to_token"]
    (gluon.parent / "net.vocab").write_bytes(vocabulary(["<a>", *vocab], unknown_token="<unk>"))
    with pytest.raises(CheckpointError, match="token 1 must be <pad>"):
        _ = open_checkpoint(gluon).tokenizer


def test_float16_parameters(tmp_path: Path) -> None:
    hugging_face, gluon = pair(tmp_path, "roberta", "features")
    rewritten(gluon, lambda name: name, lambda name, array: array.astype(np.float16))
    tensors = open_checkpoint(gluon).tensors
    rows = load_file(hugging_face / "model.safetensors")["embeddings.position_embeddings.weight"]
    np.testing.assert_array_equal(tensors.f32("roberta.embeddings.position_embeddings.weight"), rows.astype(np.float16))
