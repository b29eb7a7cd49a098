"""Artifacts whose checksums are right and whose facts are lies: refused when they are opened."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from late_checkpoints import make_late_checkpoint
from m3_checkpoints import make_m3_checkpoint
from made import edit_card, refresh

import encast
from encast.errors import ArtifactError, EncastError

Lie = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("facts")
    made = {}
    for task in ("embed", "classify", "answer", "embed_m3"):
        folder = root / task
        if task == "embed_m3":
            make_m3_checkpoint(folder, hidden=16)
        else:
            make_checkpoint(folder, "bert", task, layers=1, hidden=16, heads=2)
        made[task] = encast.compile(folder, root / f"{task}.encast", dtype="f32", task=task)
    return made


def meta(**facts: Any) -> Lie:
    return lambda graph: graph["meta"].update(facts)


def first_output(value: Callable[[dict[str, Any]], str]) -> Lie:
    return lambda graph: graph["outputs"].update(last_hidden_state=value(graph))


def output(**values: str) -> Lie:
    return lambda graph: graph["outputs"].update(values)


def chain(graph: dict[str, Any]) -> None:
    value = graph["outputs"]["last_hidden_state"]
    for index in range(40_000):
        node = {"op": "normalize", "inputs": [value], "outputs": [f"n{index}"], "attrs": {}, "name": "n", "layer": -1}
        graph["nodes"].append(node)
        value = f"n{index}"
    graph["outputs"]["last_hidden_state"] = value


GRAPHS: dict[str, tuple[str, Lie, str]] = {
    "a name of two words": ("embed", lambda graph: graph["nodes"][0].update(name="a b"), "the name 'a b'"),
    "a name that colours": ("embed", lambda graph: graph["nodes"][-1].update(name="\x1b[31mred"), "red"),
    "labels that are lists": ("classify", meta(labels=[["a"], "b", "c"]), "labels"),
    "labels that are numbers": ("classify", meta(labels=[1, 2, 3]), "labels"),
    "a label too few": ("classify", meta(labels=["a", "b"]), "not 2 columns"),
    "one kind of three too few": ("embed_m3", lambda graph: graph["outputs"].pop("token_embedding"), "embed_m3 has"),
    "weights of several columns": ("embed_m3", output(sparse_embedding="states"), "sparse_embedding has not 1 columns"),
    "weights of texts": ("embed_m3", output(sparse_embedding="normalize"), r"computed f32\[tokens, \.\.\.\] is needed"),
    "rows without their weight": ("embed_m3", output(m3_embedding="states"), "m3_embedding has not 33 columns"),
    "unknown problem": ("classify", meta(problem_type="guess"), "problem_type"),
    "unknown similarity": ("embed", meta(similarity="taste"), "similarity"),
    "a fact that nobody knows": ("embed", meta(colour="red"), r"meta\['colour'\] is a field that no .* have \['arch'"),
    "no list of fusions": ("embed", lambda graph: graph["meta"].pop("expected"), r"meta\['expected'\] is missing"),
    "fusions that are a number": ("embed", meta(expected={"qkv": 1}), r"meta\['expected'\] is \{'qkv': 1\}"),
    "fusions without layers": ("embed", meta(expected={"qkv": {"other": 1}}), "expected"),
    "fewer fusions than none": ("embed", meta(expected={"qkv": {"per_layer": -1, "other": 0}}), "expected"),
    "fusions and more": ("embed", meta(expected={"qkv": {"per_layer": 1, "other": 0, "x": 0}}), "expected"),
    "unknown math": ("embed", meta(math="new"), "math"),
    "unknown task": ("embed", meta(task="sing"), "task"),
    "task of another head": ("embed", meta(task="classify"), "has the outputs"),
    "task of other rows": ("classify", meta(task="tag"), "tokens"),
    "answers of three columns": ("classify", meta(task="answer"), "tokens"),
    "hidden size below zero": ("embed", meta(hidden=-1), "hidden"),
    "hidden size that lies": ("embed", meta(hidden=32), "as meta says"),
    "no vocabulary": ("embed", meta(vocab=0), "vocab"),
    "true for a number": ("embed", meta(heads=True), "heads"),
    "longest text of nothing": ("embed", meta(max_len=0), "max_len"),
    "longest text without end": ("embed", meta(max_len=10**12), "max_len"),
    "an input as output": ("embed", first_output(lambda graph: "token_ids"), "computed f32"),
    "a weight as output": ("embed", first_output(lambda graph: next(iter(graph["constants"]))), "computed f32"),
    "an output missing": ("embed", lambda graph: graph["outputs"].pop("embedding"), "has the outputs"),
    "an output too many": (
        "embed",
        lambda graph: graph["outputs"].update(more=graph["outputs"]["embedding"]),
        "has the outputs",
    ),
    "more nodes than anything has": ("embed", chain, "nodes"),
}


@pytest.mark.parametrize("kind", GRAPHS)
def test_lies_of_a_graph(kind: str, artifacts: dict[str, Path], tmp_path: Path) -> None:
    task, lie, reason = GRAPHS[kind]
    copy = Path(shutil.copytree(artifacts[task], tmp_path / "copy.encast"))
    graph = json.loads((copy / "graph.json").read_bytes())
    lie(graph)
    refresh(copy, "graph.json", json.dumps(graph).encode())
    with pytest.raises(ArtifactError, match=reason):
        encast.load(copy, threads=1)


CARDS: dict[str, tuple[Lie, str]] = {
    "tokenizer is a list": (lambda card: card.update(tokenizer=[1]), "tokenizer"),
    "length is text": (lambda card: card.update(tokenizer={"max_length": "long"}), "max_length"),
    "length below zero": (lambda card: card.update(tokenizer={"max_length": -5}), "max_length"),
    "no such side": (lambda card: card.update(tokenizer={"truncation_side": "up"}), "truncation_side"),
    "mask is a number": (lambda card: card.update(tokenizer={"mask_token": 7}), "mask_token"),
    "prompts are a list": (lambda card: card.update(prompts=["query: "]), "prompts"),
    "prompt is a number": (lambda card: card.update(prompts={"query": 1}), "prompts"),
    "default prompt is a list": (lambda card: card.update(default_prompt=["query"]), "default_prompt"),
    "default prompt of another": (lambda card: card.update(default_prompt="zz"), "not among its prompts"),
    "sizes are texts": (lambda card: card.update(sizes={"graph.json": "big"}), "sizes"),
    "accuracy is a number": (lambda card: card.update(accuracy=3), "accuracy"),
}


@pytest.mark.parametrize("kind", CARDS)
def test_lies_of_a_card(kind: str, artifacts: dict[str, Path], tmp_path: Path) -> None:
    lie, reason = CARDS[kind]
    copy = Path(shutil.copytree(artifacts["embed"], tmp_path / "copy.encast"))
    edit_card(copy, lie)
    with pytest.raises(ArtifactError, match=reason):
        encast.load(copy, threads=1)


STEPS: dict[str, tuple[str, Callable[[str, str], list[str]], dict[str, Any], str]] = {
    "computes on a weight": ("normalize", lambda value, weight: [weight], {}, "no step before it makes"),
    "a computed weight": ("linear", lambda value, weight: [value, value], {"activation": "none"}, "is a constant"),
}


@pytest.mark.parametrize("kind", STEPS)
def test_operands_of_the_wrong_kind(kind: str, artifacts: dict[str, Path], tmp_path: Path) -> None:
    op, operands, attrs, reason = STEPS[kind]
    copy = Path(shutil.copytree(artifacts["embed"], tmp_path / "copy.encast"))
    graph = json.loads((copy / "graph.json").read_bytes())
    weight = next(name for name in graph["constants"] if "word" in name)
    inputs = operands(graph["outputs"]["last_hidden_state"], weight)
    graph["nodes"].append({"op": op, "inputs": inputs, "outputs": ["z"], "attrs": attrs, "name": "z", "layer": -1})
    refresh(copy, "graph.json", json.dumps(graph).encode())
    with pytest.raises(EncastError, match=reason):
        encast.load(copy, threads=1)


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token embeddings of a model with a global and a local attention, of reach 9, that hide nine masks."""
    root = tmp_path_factory.mktemp("late")
    folder = make_late_checkpoint(root / "late", "modernbert", config={"local_attention": 18})
    return encast.compile(folder, root / "late.encast", dtype="f32")


def form(**fields: Any) -> Lie:
    return lambda card: card["token_form"].update(fields)


FORMS: dict[str, tuple[Lie, str]] = {
    "none": (lambda card: card.pop("token_form"), "token_form is missing"),
    "a list": (lambda card: card.update(token_form=[]), "token_form is"),
    "a field too many": (form(more=1), "token_form is"),
    "a marker that is a text": (form(query_marker="[Q] "), "token_form is"),
    "no room for a text": (form(document_length=2), "token_form is"),
    "a token below zero": (form(skip=[3, -1]), "token_form is"),
    "no flag": (form(drop_first=0), "token_form is"),
    "fewer than none": (form(most_unseen=-1), "token_form is"),
    "tokens that are texts": (lambda card: card.update(unweighted=["<s>"]), "unweighted is"),
}


@pytest.mark.parametrize("kind", FORMS)
def test_lies_about_how_texts_are_read(kind: str, late: Path, tmp_path: Path) -> None:
    lie, reason = FORMS[kind]
    copy = Path(shutil.copytree(late, tmp_path / "copy.encast"))
    edit_card(copy, lie)
    with pytest.raises(ArtifactError, match=reason):
        encast.load(copy, threads=1)


def second(graph: dict[str, Any], **attrs: Any) -> None:
    """The last attention hides other keys than the ones before it."""
    (counted,) = (node for node in graph["nodes"] if node["op"] == "seen_tokens")
    other = {**counted, "outputs": ["other"], "name": "other", "attrs": {**counted["attrs"], **attrs}}
    graph["nodes"].insert(graph["nodes"].index(counted), other)
    node = [node for node in graph["nodes"] if "seen_tokens" in node["inputs"]][-1]
    node["inputs"] = ["other" if name == "seen_tokens" else name for name in node["inputs"]]


def hide(most: int) -> Lie:
    return lambda graph: next(n for n in graph["nodes"] if n["op"] == "seen_tokens")["attrs"].update(most=most)


HIDDEN: dict[str, tuple[Lie, str]] = {
    "more than are reached": (hide(10), "hides more keys than it reaches"),
    "no token": (lambda graph: second(graph, token=-1), "an id is needed"),
    "of another token": (lambda graph: second(graph, token=7), "hides other keys than the first attention"),
    "of another number": (lambda graph: second(graph, most=3), "hides other keys than the first attention"),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_lies_about_hidden_keys(kind: str, late: Path, tmp_path: Path) -> None:
    lie, reason = HIDDEN[kind]
    copy = Path(shutil.copytree(late, tmp_path / "copy.encast"))
    graph = json.loads((copy / "graph.json").read_bytes())
    lie(graph)
    refresh(copy, "graph.json", json.dumps(graph).encode())
    with pytest.raises(EncastError, match=reason):
        encast.load(copy, threads=1)
