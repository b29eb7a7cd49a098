"""Exports with several outputs: which head becomes the artifact's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from onnx_files import node_bytes
from onnx_writer import HIDDEN, VOCAB, Writer

from encast.archs import build_graph
from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers import open_checkpoint

INTENT, SLOT = 3, 5


class Headed(Writer):
    """An encoder whose outputs are named by what stands on it."""

    def write_heads(self, path: Path, *names: str) -> Path:
        hidden = self.encoder()
        pooled = self.add("Tanh", self.linear(self.add("Gather", hidden, "scalar", axis=1), HIDDEN, HIDDEN))
        self.weights["scalar"] = self.weights["first"].reshape(())
        made = {"hidden": hidden, "pooler": pooled}
        made |= {"start": self.embedded} if "start" in names else {}
        for name in names:
            if name.startswith("intent"):
                made[name] = self.linear(pooled, HIDDEN, INTENT + ("2" in name))
            elif name == "slot":
                made[name] = self.linear(hidden, HIDDEN, SLOT)
            elif name == "spans":
                made[name] = self.linear(hidden, HIDDEN, 2)
            elif name == "words":
                inner = self.play(self.act, self.linear(hidden, HIDDEN, HIDDEN))
                made[name] = self.linear(self.layer_norm(inner), HIDDEN, VOCAB)
        self.nodes += [node_bytes("Identity", [made[name]], [name]) for name in names]
        return self.finish(path, outputs=names)

    def embeddings(self) -> str:
        self.embedded = super().embeddings()
        return self.embedded


def headed(tmp_path: Path, *names: str, architecture: str = "", **config: object) -> Path:
    if architecture:
        config |= {"architectures": [architecture]}
    if config:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", **config}))
    return Headed().write_heads(tmp_path / "net.onnx", *names)


def test_several_heads_are_no_guess(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(headed(tmp_path, "slot", "intent"))
    with pytest.raises(UnsupportedModelError, match=r"'intent' \(classify\), 'slot' \(tag\).*--task\) 'classify' or '"):
        build_graph(checkpoint)
    for task, labels in (("tag", SLOT), ("classify", INTENT)):
        meta = build_graph(checkpoint, task).meta
        assert (meta.task, meta.labels and len(meta.labels)) == (task, labels)
    for task in ("features", "embed"):
        assert build_graph(checkpoint, task).meta.task == task


@pytest.mark.parametrize(
    ("architecture", "outputs", "task"),
    [
        ("BertForTokenClassification", ("intent", "slot"), "tag"),
        ("BertForSequenceClassification", ("slot", "intent"), "classify"),
        ("BertForPreTraining", ("words", "intent"), "fill_mask"),
        ("BertForQuestionAnswering", ("spans",), "answer"),
        ("BertForTokenClassification", ("spans",), "tag"),
        ("BertModel", ("slot",), "tag"),
    ],
)
@pytest.mark.parametrize("model_type", ["bert", None])
def test_architectures_says_which_head(
    tmp_path: Path, architecture: str, outputs: tuple[str, ...], task: str, model_type: str | None
) -> None:
    path = headed(tmp_path, *outputs, architecture=architecture, model_type=model_type)
    assert build_graph(open_checkpoint(path)).meta.task == task


def test_the_task_that_is_asked_for_counts_more(tmp_path: Path) -> None:
    path = headed(tmp_path, "words", "intent", architecture="BertForPreTraining")
    assert build_graph(open_checkpoint(path), "classify").meta.task == "classify"


def test_an_encoder_has_no_head_of_its_own(tmp_path: Path) -> None:
    path = headed(tmp_path, "slot", "intent", architecture="BertModel")
    with pytest.raises(UnsupportedModelError, match="several outputs are heads"):
        build_graph(open_checkpoint(path))


def test_two_heads_of_a_task(tmp_path: Path) -> None:
    path = headed(tmp_path, "intent", "intent2")
    for task in (None, "classify"):
        with pytest.raises(UnsupportedModelError, match="export the model with one of these outputs"):
            build_graph(open_checkpoint(path), task)
    labels = {str(index): f"l{index}" for index in range(INTENT + 1)}
    found = build_graph(open_checkpoint(headed(tmp_path, "intent", "intent2", id2label=labels)))
    assert found.meta.labels == tuple(labels.values())
    with pytest.raises(CheckpointError, match="has 1 labels"):
        build_graph(open_checkpoint(headed(tmp_path, "intent", "intent2", "hidden", id2label={"0": "a"})))


def test_companions_are_no_heads(tmp_path: Path) -> None:
    path = headed(tmp_path, "start", "hidden", "pooler", "slot")
    assert build_graph(open_checkpoint(path)).meta.task == "tag"


def test_a_head_that_is_not_there_is_said_of_the_graph(tmp_path: Path) -> None:
    path = headed(tmp_path, "slot", architecture="BertForSequenceClassification")
    with pytest.raises(
        UnsupportedModelError, match=r"'classify' needs a head that no output .*\['embed', 'features', "
    ):
        build_graph(open_checkpoint(path), "classify")
