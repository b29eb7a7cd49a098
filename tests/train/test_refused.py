"""What cannot be trained is refused before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="make test-train installs torch and transformers")
pytest.importorskip("transformers", reason="make test-train installs torch and transformers")

from checkpoints import make_checkpoint
from small_rows import classes
from small_runs import RECIPE, train

from encast.compress.pipeline import compress
from encast.compress.recipe import parse_recipe
from encast.data.datasets import Dataset, Labelled
from encast.data.datasets.base import Pair
from encast.errors import CheckpointError, InputError, UnsupportedModelError

Rows = list[dict[str, Any]]


@pytest.mark.parametrize(
    ("rows", "task", "said"),
    [
        ([{"text": "the", "label": "a"}] * 3, "classify", "at least two"),
        ([{"text": "the", "score": 1.0}] * 3, "embed", "of one score"),
        ([{"question": "the", "context": "of", "answers": ""}] * 2, "answer", "no question has an answer"),
        ([{"text": "the", "score": score} for score in (-1e25, 1e25)], "classify", r"1e\+25.*scale them"),
        ([{"text": "the", "pair": "of", "score": score} for score in (-1e308, 1e308)], "embed", "scale them"),
        ([{"text": "the", "label": "a"}, {"text": "of", "label": "b"}], "tag", "nothing is trained for 'tag'"),
        ([{"text": "the", "label": "a"}, {"text": "of", "label": "b"}], "fill_mask", "known are"),
    ],
)
def test_data_that_teach_nothing(
    tmp_path: Path, encoder: Path, write_rows: Callable[..., Path], rows: Rows, task: str, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        train(encoder, write_rows("data", rows, rows), tmp_path / "out", task)


@pytest.mark.parametrize("task", ["classify", "embed"])
def test_training_rows_of_one_score(tmp_path: Path, encoder: Path, write_rows: Callable[..., Path], task: str) -> None:
    def scored(*scores: float) -> Rows:
        return [{"text": "the", "pair": "of", "score": score} for score in scores]

    data = write_rows("data", scored(0.5, 0.5, 0.5), scored(0.0, 1.0))
    with pytest.raises(InputError, match=r"train\.jsonl: all 3 scores are 0\.5; give at least two"):
        train(encoder, data, tmp_path / "out", task)
    assert not (tmp_path / "out").exists()


TAGGED: Rows = [{"words": ["the", "of"], "labels": ["B-x", "O"]}] * 2


@pytest.mark.parametrize(
    ("train_labels", "dev_labels", "said"),
    [
        (["DET", "NOUN"], ["DET", "NOUN"], r"train\.jsonl: the word 'in' of sentence 3 has the label 'DET'.*O, B-TYPE"),
        (["O", "B-x"], ["O", "S-x"], r"dev\.jsonl: the word 'is' of sentence 3 has the label 'S-x'"),
        (["O", "B-x"], None, r"dev\.jsonl has no entity"),
    ],
)
def test_labels_without_entities_are_not_trained_for(
    tmp_path: Path, encoder: Path, write_rows: Callable[..., Path], train_labels: list[str],
    dev_labels: list[str] | None, said: str,
) -> None:  # fmt: skip
    """Their F1 would be 0 for ever, and the first weights kept."""
    rows, dev = (
        [{"words": ["of"], "labels": ["O"]}] if labels is None else [*TAGGED, {"words": ["in", "is"], "labels": labels}]
        for labels in (train_labels, dev_labels)
    )
    with pytest.raises(InputError, match=said):
        train(encoder, write_rows("data", rows, dev), tmp_path / "out", "tag")
    assert not (tmp_path / "out").exists()


def test_a_class_that_no_training_row_has(tmp_path: Path, encoder: Path, write_rows: Callable[..., Path]) -> None:
    data = write_rows("data", classes(20, 1), [*classes(5, 2), {"text": "the", "label": "never"}])
    with pytest.raises(InputError, match=r"class 'never'.*early, late"):
        train(encoder, data, tmp_path / "out", "classify")
    assert not (tmp_path / "out").exists()


PAIRS: Rows = [{"text": text, "pair": "of", "label": label} for text, label in (("the", "x"), ("in", "y"))]


SCORES: Rows = [{"text": text, "pair": "of", "score": score} for text, score in (("the", 0.0), ("in", 1.0))]


@pytest.mark.parametrize(
    ("task", "rows", "dev", "said"),
    [
        ("classify", PAIRS, [{"text": "the", "label": "x"}], r"train\.jsonl has pairs, .*dev\.jsonl single texts"),
        (
            "classify",
            [{"text": "the", "score": 1.0}, {"text": "of", "score": 2.0}],
            SCORES,
            r"single texts, .*l pairs;",
        ),
        (
            "embed",
            SCORES,
            [{"text": "the", "score": 0.0}, {"text": "in", "score": 1.0}],
            r"has pairs, .*dev\.jsonl single texts",
        ),
        (
            "embed",
            [{"anchor": "the", "positive": "of"}, {"anchor": "in", "positive": "is"}],
            [{"anchor": "the", "positive": "of"}, {"anchor": "in", "positive": "of"}],
            r"dev\.jsonl has a single positive",
        ),
    ],
)
def test_dev_rows_that_cannot_be_measured_are_refused_first(
    tmp_path: Path, encoder: Path, write_rows: Callable[..., Path], task: str, rows: Rows, dev: Rows, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        train(encoder, write_rows("data", rows, dev), tmp_path / "out", task)
    assert not (tmp_path / "out").exists()


def test_pairs_do_not_accumulate(tmp_path: Path, encoder: Path) -> None:
    data = Dataset("here", "pairs", [Pair("the", "of"), Pair("in", "is")])
    recipe = parse_recipe("stages: [{fine-tune: {batch-size: 2, accumulate: 2}}]", "here")
    with pytest.raises(InputError, match="leave it 1"):
        compress(encoder, tmp_path / "out", task="embed", recipe=recipe, train=data, device="cpu")


@pytest.mark.parametrize(
    ("rows", "batch", "said"),
    [
        ([Pair("the", "of"), Pair("in", "is")], 1, "batch-size is 1; give 2 or more"),
        ([Pair("the", "of"), Pair("in", "of")], 2, "here: all 2 rows have one positive"),
    ],
)
def test_pairs_need_others(tmp_path: Path, encoder: Path, rows: list[Pair], batch: int, said: str) -> None:
    recipe = parse_recipe(f"stages: [{{fine-tune: {{batch-size: {batch}}}}}]", "here")
    with pytest.raises(InputError, match=said):
        compress(
            encoder, tmp_path / "out", task="embed", recipe=recipe, train=Dataset("here", "pairs", rows), device="cpu"
        )
    assert not (tmp_path / "out").exists()


def test_a_place_inside_of_the_checkpoint(encoder: Path) -> None:
    data = Dataset("here", "pairs", [Pair("the", "of"), Pair("in", "is")])
    with pytest.raises(InputError, match="lies in the checkpoint itself"):
        compress(encoder, encoder / "out", task="embed", recipe=parse_recipe(RECIPE, "here"), train=data)
    # Before anything that takes long: not even the metric is looked at.
    with pytest.raises(InputError, match="lies in the checkpoint itself"):
        compress(encoder, encoder / "out", task="none", recipe=parse_recipe(RECIPE, "here"), train=data, metric="none")


@pytest.mark.parametrize("name", ["x" * 249, "x" * 242 + ".params"], ids=["plain", "params"])
def test_a_name_that_is_too_long_for_its_artifact(tmp_path: Path, encoder: Path, name: str) -> None:
    data = Dataset("here", "pairs", [Pair("the", "of"), Pair("in", "is")])
    recipe = parse_recipe("stages: [{fine-tune: {epochs: 0}}, quantise]", "here")
    with pytest.raises(InputError, match="255 bytes at most"):
        compress(encoder, tmp_path / name, task="embed", recipe=recipe, train=data, device="cpu", threads=1)
    assert not (tmp_path / name).exists()


def test_a_name_that_is_too_long_for_an_artifact_that_is_not_made(tmp_path: Path, encoder: Path) -> None:
    data = Dataset("here", "pairs", [Pair("the", "of"), Pair("in", "is")])
    recipe = parse_recipe("stages: [{fine-tune: {epochs: 0}}]", "here")
    result = compress(
        encoder, tmp_path / ("x" * 255), task="embed", recipe=recipe, train=data, device="cpu", threads=1
    )  # fmt: skip
    assert result.checkpoint.is_dir()


def test_a_loss_that_is_not_finite(tmp_path: Path, encoder: Path, write_rows: Callable[..., Path]) -> None:
    data = write_rows("data", classes(64, 1), classes(20, 2))
    recipe = "stages: [{fine-tune: {epochs: 20, learning-rate: 1.0e+30, warmup: 0, clip: 0, evaluations: 0}}]"
    with pytest.raises(InputError, match="diverged; lower learning-rate"):
        train(encoder, data, tmp_path / "out", "classify", recipe)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"pad_token_id": -1}, "pad_token_id is -1; the model has tokens 0 to 199"),
        ({"pad_token_id": 200}, "transformers cannot open it"),
        ({"pad_token_id": "none"}, "transformers cannot open it"),
        ({"id2label": {"x": "early", "y": "late"}}, "id2label or num_labels of config.json"),
        ({"id2label": None, "num_labels": "two"}, "id2label or num_labels of config.json"),
        ({"id2label": ["early", "late"]}, "transformers cannot open it"),
    ],
)
def test_fields_of_a_config_that_cannot_be(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    source = make_checkpoint(
        tmp_path / "bert", "bert", "classify", layers=1, hidden=32, heads=2, labels=2, config=fields
    )  # fmt: skip
    data = Dataset("here", "classes", [Labelled("the", "early"), Labelled("of", "late")])
    with pytest.raises(CheckpointError, match=said):
        compress(source, tmp_path / "out", task="classify", recipe=parse_recipe(RECIPE, "here"), train=data)


def test_a_token_that_the_model_does_not_have(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "bert", "bert", "features", layers=1, hidden=32, heads=2)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    tokenizer["added_tokens"].append({"id": 200, "content": "[NEW]", **flags})
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    data = Dataset("here", "classes", [Labelled("the", "early"), Labelled("of [NEW]", "late")])
    with pytest.raises(CheckpointError, match="a training row the token 200, the model has tokens 0 to 199"):
        compress(source, tmp_path / "out", task="classify", recipe=parse_recipe(RECIPE, "here"), train=data)


@pytest.mark.parametrize("price", [0.0, -1.0, float("nan"), float("inf")])
def test_a_price_that_is_none(tmp_path: Path, encoder: Path, price: float) -> None:
    """Not after hours of training, when the first artifact is measured."""
    data = Dataset("here", "pairs", [Pair("the", "of"), Pair("in", "is")])
    recipe = parse_recipe(RECIPE, "here")
    with pytest.raises(InputError, match="usd_per_hour is"):
        compress(encoder, tmp_path / "out", task="embed", recipe=recipe, train=data, device="cpu", usd_per_hour=price)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("quantise", [True, False])
def test_a_price_of_nothing(tmp_path: Path, encoder: Path, quantise: bool) -> None:
    data = Dataset("here", "classes", [Labelled("the", "early"), Labelled("of", "late")])
    recipe = parse_recipe(f"stages: [{{fine-tune: {{}}}}{', {quantise: {}}' if quantise else ''}]", "here")
    dev = None if quantise else data
    with pytest.raises(InputError, match="a stage quantise and a dev set"):
        compress(
            encoder, tmp_path / "out", task="classify", recipe=recipe, train=data, dev=dev, device="cpu", usd_per_hour=1
        )
    assert not (tmp_path / "out").exists()


def test_sparse_embeddings_are_not_trained(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "bert", "bert", "embed_sparse", layers=1, hidden=32, heads=2, splade="relu")
    data = Dataset("here", "pairs", [Pair("the", "of"), Pair("in", "is")])
    with pytest.raises(UnsupportedModelError, match="describes sparse embeddings"):
        compress(source, tmp_path / "out", task="embed", recipe=parse_recipe(RECIPE, "here"), train=data)
    assert not (tmp_path / "out").exists()
