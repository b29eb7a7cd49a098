"""Settings of KerasHub's presets: each that changes ids or answers is either followed or refused by its name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from keras_files import HUB_GOLDEN, preset_pair, registered, rewrite

from encast.archs import build_graph
from encast.errors import CheckpointError, EncastError, UnsupportedModelError
from encast.importers import open_checkpoint

ARCHS = ("bert", "distilbert", "roberta")
WHOLE = sorted(path.name for path in HUB_GOLDEN.iterdir())


def golden(folder: Path, name: str = "bert-classify") -> Path:
    return shutil.copytree(HUB_GOLDEN / name, folder / name)


def read(preset: Path) -> None:
    checkpoint = open_checkpoint(preset)
    build_graph(checkpoint)
    _ = checkpoint.tokenizer


@pytest.mark.parametrize(
    ("file", "name", "fields", "message"),
    [
        ("config.json", "AlbertBackbone", {}, "is 'AlbertBackbone'; of KerasHub BertBackbone, DistilBertBackbone, Rob"),
        ("config.json", "Bert", {}, "is 'Bert'; of KerasHub"),
        ("config.json", None, {"num_heads": "2"}, "num_heads is '2'; a positive integer is read"),
        ("config.json", None, {"num_heads": True}, "num_heads is true; a positive integer is read"),
        ("config.json", None, {"num_heads": 3}, "hidden_dim is 8 and num_heads 3, which must divide it"),
        ("config.json", None, {"num_layers": 3}, r"'bert\.encoder\.layer\.2.*' is missing"),
        ("config.json", None, {"num_layers": 1}, r"have no place .*'bert\.encoder\.layer\.1"),
        ("config.json", None, {"max_sequence_length": None}, "max_sequence_length is null; a positive integer is read"),
        ("config.json", None, {"max_sequence_length": 40}, r"\[max_sequence_length, hidden_dim\] = \[40, 8\]"),
        ("config.json", None, {"num_segments": 1}, r"the shape \[2, 8\], .*\[num_segments, hidden_dim\] = \[1, 8\]"),
        ("config.json", None, {"normalize_first": True}, "'normalize_first' is no setting that is known of KerasHub"),
        ("config.json", None, {"layer_norm_epsilon": 1e-12}, "'layer_norm_epsilon' is no setting that is known"),
        ("config.json", None, {"activation": "gelu"}, "'activation' is no setting that is known .*; known are name,"),
        ("config.json", None, {"dtype": {"class_name": "DTypePolicyMap", "config": {}}},
         r"dtype is a value of type dict; a policy of floating.*; quantize\(\) leaves another one, so save the preset"),
        ("config.json", None, {"dtype": {"class_name": "DTypePolicy", "config": {"name": "int8"}}}, "dtype is"),
        ("config.json", None, {"dtype": "int8"}, "dtype is 'int8'; a policy of floating-point numbers is read"),
        ("task.json", "BertTextEmbedder", {}, "is 'BertTextEmbedder'; of BertBackbone the tasks BertTextClassifier, "),
        ("task.json", "RobertaTextClassifier", {}, "is 'RobertaTextClassifier'; of BertBackbone"),
        ("task.json", "BertMaskedLM", {}, r"BertMaskedLM is not read: its head computes GELU .* remove task\.json"),
        ("task.json", None, {"activation": "sigmoid"}, r'is \'sigmoid\'; "linear" or "softmax" or null is read'),
        ("task.json", None, {"activation": {"class_name": "f"}}, "activation is a value of type dict"),
        ("task.json", None, {"hidden_dim": 99}, "hidden_dim of the head is 99 and that of the backbone 8"),
        ("task.json", None, {"hidden_dim": "x" * 10**6}, r"hidden_dim is 'x{120}'\.\.\.; a positive integer or null"),
        ("task.json", None, {"num_classes": 4}, r"has the shape \[8, 3\], .*\[hidden_dim, num_classes\] = \[8, 4\]"),
        ("task.json", None, {"num_classes": None}, "num_classes is null; a positive integer is read"),
        ("task.json", None, {"num_classes": 1, "activation": "softmax"}, "whose one score is always 1"),
        ("task.json", None, {"pooling": "mean"}, "'pooling' is no setting that is known"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, file: str, name: str | None, fields: dict[str, Any], message: str) -> None:
    _, preset = preset_pair(tmp_path)
    rewrite(preset / file, name, **fields)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message) as caught:
        build_graph(open_checkpoint(preset))
    assert len(str(caught.value)) < 1000


def test_a_size_that_is_missing(tmp_path: Path) -> None:
    _, preset = preset_pair(tmp_path)
    stored = json.loads((preset / "config.json").read_text())
    del stored["config"]["num_heads"]
    (preset / "config.json").write_text(json.dumps(stored))
    with pytest.raises(CheckpointError, match=r"config\.json: num_heads is missing; a positive integer is needed"):
        open_checkpoint(preset)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("bert", {"split": False}, "split is false; true is read"),
        ("bert", {"split": 1}, "split is 1; true is read"),
        ("bert", {"split_on_cjk": False}, "split_on_cjk is false; true is read"),
        ("bert", {"suffix_indicator": "@"}, "suffix_indicator is '@'; \"##\" is read"),
        ("bert", {"oov_token": "?"}, r'oov_token is \'\?\'; "\[UNK\]" is read'),
        ("bert", {"sequence_length": 4}, "sequence_length is 4; null is read"),
        ("bert", {"special_tokens": ["[X]"]}, "special_tokens is a value of type list; null is read"),
        ("bert", {"special_tokens_in_strings": True}, "special_tokens_in_strings is true; false is read"),
        ("bert", {"lowercase": None}, "lowercase is null; true or false is read"),
        ("bert", {"lowercase": 1}, "lowercase is 1; true or false is read"),
        ("bert", {"strip_accents": "no"}, "strip_accents is 'no'; true or false is read"),
        ("bert", {"vocabulary": ["a"]}, "vocabulary is a value of type list; null is read"),
        ("bert", {"config_file": "tokenizer_2.json"}, "config_file is 'tokenizer_2.json'"),
        ("bert", {"add_prefix_space": False}, "'add_prefix_space' is no setting that is known"),
        (
            "roberta",
            {"unsplittable_tokens": ["the cat"]},
            "unsplittable_tokens is a value of type list; null or a",
        ),
        ("roberta", {"unsplittable_tokens": []}, "unsplittable_tokens is a value of type list"),
        ("roberta", {"sequence_length": 4}, "sequence_length is 4; null is read"),
        ("roberta", {"add_prefix_space": "no"}, "add_prefix_space is 'no'; true or false is read"),
        ("roberta", {"lowercase": False}, "'lowercase' is no setting that is known"),
    ],
)
def test_tokenizers_that_are_refused(tmp_path: Path, name: str, fields: dict[str, Any], message: str) -> None:
    preset = golden(tmp_path, "roberta-fill_mask" if name == "roberta" else "bert-classify")
    for file, inside in TOKENIZER_PLACES:
        rewrite(preset / file, inside=inside, **fields)
    with pytest.raises(EncastError, match=rf"tokenizer\.json: {message}"):
        read(preset)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"truncate": "waterfall"}, "truncate is 'waterfall'; \"round_robin\" is read"),
        ({"sequence_length": None}, "sequence_length is null; a positive integer is read"),
        ({"sequence_length": -1}, "sequence_length is -1; a positive integer is read"),
        ({"sequence_length": 20.0}, "sequence_length is 20.0; a positive integer is read"),
        ({"add_start_token": True}, "'add_start_token' is no setting that is known"),
    ],
)
def test_preprocessors_that_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    preset = golden(tmp_path)
    rewrite(preset / "preprocessor.json", **fields)
    with pytest.raises(EncastError, match=rf"preprocessor\.json: {message}"):
        read(preset)
    (preset / "preprocessor.json").unlink()
    rewrite(preset / "task.json", inside=("preprocessor",), **fields)
    with pytest.raises(EncastError, match=rf"task\.json, preprocessor: {message}"):
        read(preset)


TOKENIZER_PLACES: list[tuple[str, tuple[str, ...]]] = [
    ("tokenizer.json", ()), ("preprocessor.json", ("tokenizer",)), ("task.json", ("preprocessor", "tokenizer")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "inside", "fields", "message"),
    [
        ("task.json", ("backbone",), {"num_heads": 4}, r"num_heads is 2 in .*config\.json and 4 in .*task\.json, back"),
        ("config.json", (), {"num_heads": 4}, r"num_heads is 4 in .*config\.json and 2 in .*task\.json, backbone"),
        ("task.json", ("backbone",), {"num_segments": 1}, r"num_segments is 2 in .* and 1 in"),
        ("task.json", ("preprocessor",), {"sequence_length": 9},
         r"sequence_length is 20 in .*preprocessor\.json and 9 in .*task\.json, preprocessor, .*same into both"),
        ("preprocessor.json", (), {"sequence_length": 9}, r"sequence_length is 9 in .*preprocessor\.json and 20 in"),
        ("tokenizer.json", (), {"lowercase": False}, r"is false in .*tokenizer\.json and true in .*json, tokenizer,"),
        ("preprocessor.json", ("tokenizer",), {"strip_accents": True}, r"is false in .*zer\.json and true in"),
        ("task.json", ("preprocessor", "tokenizer"), {"lowercase": False},
         r"lowercase is true in .*tokenizer\.json and false in .*task\.json, preprocessor\.tokenizer"),
    ],
)  # fmt: skip
def test_files_that_contradict_each_other(
    tmp_path: Path, file: str, inside: tuple[str, ...], fields: dict[str, Any], message: str
) -> None:
    """KerasHub takes one or the other, by whether the task or the backbone is loaded."""
    preset = golden(tmp_path)
    rewrite(preset / file, inside=inside, **fields)
    with pytest.raises(CheckpointError, match=message):
        read(preset)


@pytest.mark.parametrize("part", ["backbone", "preprocessor"])
def test_parts_of_another_class(tmp_path: Path, part: str) -> None:
    preset = golden(tmp_path)
    rewrite(preset / "task.json", "RobertaBackbone" if part == "backbone" else "BertOdd", inside=(part,))
    with pytest.raises(EncastError, match=rf"task\.json, {part}:? is '(RobertaBackbone|BertOdd)'[;,]"):
        read(preset)
    for file, inside in TOKENIZER_PLACES[1:]:
        preset = golden(tmp_path / file)
        rewrite(preset / file, "DistilBertTokenizer", inside=inside)
        with pytest.raises(
            CheckpointError, match=r"tokenizer is 'DistilBertTokenizer', and .*tokenizer\.json is 'Bert"
        ):
            read(preset)


def test_what_differs_without_a_meaning_is_read(tmp_path: Path) -> None:
    preset = golden(tmp_path)
    rewrite(preset / "task.json", inside=("backbone",), name="other", trainable=False, dropout=0.5, dtype="bfloat16")
    rewrite(preset / "task.json", inside=("preprocessor", "tokenizer"), name="other", dtype="string")
    read(preset)


def test_the_longest_text(tmp_path: Path) -> None:
    preset = golden(tmp_path)
    assert open_checkpoint(preset).tokenizer.max_length == 20
    (preset / "preprocessor.json").unlink()
    assert open_checkpoint(preset).tokenizer.max_length == 20
    rewrite(preset / "task.json", preprocessor=None)
    assert open_checkpoint(preset).tokenizer.max_length == 24


@pytest.mark.parametrize("name", WHOLE)
def test_everything_that_keras_writes_is_known(name: str) -> None:
    read(HUB_GOLDEN / name)


@pytest.mark.parametrize(
    "dtype", ["mixed_bfloat16", None, {"class_name": "FloatDTypePolicy", "config": {"name": "float16"}}]
)
def test_other_policies_of_floating_point_numbers(tmp_path: Path, dtype: Any) -> None:
    preset = golden(tmp_path)
    rewrite(preset / "config.json", dtype=dtype)
    read(preset)


def test_special_tokens_in_another_order(tmp_path: Path) -> None:
    preset = golden(tmp_path, "roberta-fill_mask")
    for value in (["<mask>", "<s>", "</s>", "<pad>"], None):
        rewrite(preset / "tokenizer.json", unsplittable_tokens=value)
        read(preset)
    rewrite(preset / "tokenizer.json", unsplittable_tokens=["<mask>", "<s>", "</s>"])
    with pytest.raises(UnsupportedModelError, match="null or a list of <s>, </s>, <pad>, <mask> is read"):
        read(preset)


@pytest.mark.parametrize("name", ["config.json", "task.json", "tokenizer.json", "preprocessor.json"])
@pytest.mark.parametrize("text", ["[]", "{}", '{"registered_name": "keras_hub>BertBackbone", "config": 3}', "{", "3"])
def test_broken_settings(tmp_path: Path, name: str, text: str) -> None:
    preset = golden(tmp_path)
    (preset / name).write_text(text)
    missing = name == "config.json" and text == "{}"  # which makes it no preset
    with pytest.raises(CheckpointError, match=r"no weights; .*model\.weights\.h5" if missing else name):
        read(preset)


@pytest.mark.parametrize(
    ("file", "field"),
    [("config.json", "num_layers"), ("config.json", "dtype"), ("task.json", "num_classes"), ("task.json", "hidden_dim"),
     ("task.json", "activation"), ("tokenizer.json", "suffix_indicator"), ("tokenizer.json", "lowercase"),
     ("preprocessor.json", "sequence_length"), ("preprocessor.json", "mask_token_rate"), ("preprocessor.json", "name")],
)  # fmt: skip
def test_values_that_are_nested_deeply(tmp_path: Path, file: str, field: str) -> None:
    """As deep as the reader of JSON goes, which then is too deep for a writer of JSON."""
    _, preset = preset_pair(tmp_path)
    (preset / "preprocessor.json").write_text(registered("BertPreprocessor"))
    rewrite(preset / file, **{field: "@"})
    text = (preset / file).read_text()
    for depth in (900, 940, 980, 3000):
        (preset / file).write_text(text.replace('"@"', "[" * depth + "]" * depth))
        try:
            read(preset)
        except EncastError as error:
            assert len(str(error)) < 1000  # noqa: PT017
        else:
            assert field in ("name", "mask_token_rate")


@pytest.mark.parametrize(
    "fields",
    [{"max_sequence_length": -5}, {"hidden_dim": 2**70}, {"vocabulary_size": []}, {"num_layers": 10**9}],
    ids=str,
)
def test_sizes_that_lie(tmp_path: Path, fields: dict[str, Any]) -> None:
    for arch in ARCHS:
        _, preset = preset_pair(tmp_path / arch, arch)
        rewrite(preset / "config.json", **fields)
        with pytest.raises(EncastError, match="layer|" + next(iter(fields))):
            build_graph(open_checkpoint(preset))
