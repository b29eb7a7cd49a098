"""EuroBERT: what its config says, field by field, what is refused of it, and its heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_build_graph import build, made, with_config, with_tensors

from encast.archs import need_transformers
from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers import open_checkpoint
from encast.ir import Graph, Node
from encast.passes import optimise
from encast.quant import QuantSpec

EURO = "eurobert"


def nodes(graph: Graph, op: str) -> list[Node]:
    return [node for node in graph.nodes if node.op == op]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_key_value_heads": 3}, CheckpointError, "num_key_value_heads is 3, which does not divide the 4"),
        ({"num_key_value_heads": 8}, CheckpointError, "num_key_value_heads is 8; an integer from 1 to 4"),
        ({"num_key_value_heads": 4}, CheckpointError, r"k_proj\.weight' has shape \[8, 16\], the config promises"),
        ({"head_dim": 8}, UnsupportedModelError, "head_dim is 8"),
        ({"hidden_act": "mish"}, UnsupportedModelError, "hidden_act is 'mish'"),
        ({"pretraining_tp": 2}, UnsupportedModelError, "pretraining_tp is 2"),
        ({"sliding_window": 64}, UnsupportedModelError, "sliding_window is 64"),
        ({"is_decoder": True}, UnsupportedModelError, "is_decoder is True"),
        ({"position_embedding_type": "relative_key"}, UnsupportedModelError, "position_embedding_type is 'relative"),
        ({"rope_scaling": {"rope_type": "llama3"}}, UnsupportedModelError, "rope_scaling is "),
        ({"rope_parameters": {"rope_type": "linear"}}, UnsupportedModelError, "rope_parameters: rope_type is 'linear'"),
        ({"rope_parameters": {"factor": 2.0}}, UnsupportedModelError, "rope_parameters: factor is 2.0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, UnsupportedModelError, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"rope_theta": 0}}, CheckpointError, "rope_theta is 0; a number above 0"),
        ({"rope_parameters": None}, CheckpointError, "rope_theta is missing; add it"),
        ({"attention_bias": True}, CheckpointError, r"q_proj\.bias' is missing"),
        ({"mlp_bias": True}, CheckpointError, r"gate_proj\.bias' is missing"),
        ({"rms_norm_eps": 0}, CheckpointError, "rms_norm_eps is 0; a number above 0"),
        ({"num_attention_heads": 16}, CheckpointError, "16 heads of 1 columns; rotary positions need"),
        ({"max_position_embeddings": 1 << 18}, CheckpointError, "max_position_embeddings is 262144; an integer from 1"),
        ({"auto_map": {"AutoModel": "modeling_llama.LlamaModel"}}, UnsupportedModelError, "auto_map is "),
    ],
)
def test_configs_of_eurobert(changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        build(with_config(made(tmp_path, EURO, hidden=16, heads=4), **changes))


def test_a_published_config(tmp_path: Path) -> None:
    """The fields of EuroBERT-210m, but for sizes and the base of the angles, which is outside of rope_parameters."""
    published = {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token": "<|begin_of_text|>", "bos_token_id": 128000,
        "auto_map": {
            "AutoConfig": "configuration_eurobert.EuroBertConfig",
            "AutoModel": "modeling_eurobert.EuroBertModel",
            "AutoModelForMaskedLM": "modeling_eurobert.EuroBertForMaskedLM",
            "AutoModelForPreTraining": "modeling_eurobert.EuroBertPreTrainedModel",
            "AutoModelForSequenceClassification": "modeling_eurobert.EuroBertForSequenceClassification",
        },
        "clf_pooling": "late", "eos_token_id": 128001, "head_dim": 4, "hidden_act": "silu", "hidden_dropout": 0.0,
        "initializer_range": 0.02, "max_position_embeddings": 8192, "mlp_bias": False, "num_key_value_heads": 4,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_parameters": ..., "rope_scaling": None, "rope_theta": 250000,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": False,
    }  # fmt: skip
    config = {"num_key_value_heads": 4}
    folder = made(tmp_path, EURO, "fill_mask", hidden=16, heads=4, tied=False, config=config)
    graph = build(with_config(folder, **published))
    assert graph.meta.max_len == 8192
    assert {node.attrs["theta"] for node in nodes(graph, "rotary")} == {250000.0}
    assert graph.meta.task == "fill_mask"


def test_each_key_is_that_of_heads_side_by_side(tmp_path: Path) -> None:
    folder = made(tmp_path, EURO, hidden=24, heads=6, config={"num_key_value_heads": 2})
    graph = build(folder)
    tensors = open_checkpoint(folder).tensors
    for part in ("k", "v"):
        name = f"layers.0.self_attn.{part}_proj.weight"
        stored, used = tensors.f32(name).reshape(2, 4, 24), graph.constants[f"{name}[repeated]"].array
        np.testing.assert_array_equal(used.reshape(6, 4, 24), stored[[0, 0, 0, 1, 1, 1]])


def test_as_many_keys_as_heads_are_not_copied(tmp_path: Path) -> None:
    graph = build(made(tmp_path, EURO, hidden=16, heads=4, config={"num_key_value_heads": None}))
    assert not [name for name in graph.constants if "repeated" in name]


def test_all_that_a_layer_promises_is_fused(tmp_path: Path) -> None:
    """Norms write what int8 products read."""
    graph, report = optimise(build(made(tmp_path, EURO, layers=2, hidden=64)), QuantSpec("int8"), strict=True)
    assert not report.misses
    assert len(nodes(graph, "rms_norm_narrow")) == 4
    assert len(nodes(graph, "rms_norm")) == 1, "the last one, which no product reads"


@pytest.mark.parametrize(
    ("fields", "modes", "before"),
    [({}, ["mean"], False), ({"classifier_pooling": "late", "clf_pooling": "late"}, ["mean"], False),
     ({"classifier_pooling": "mean"}, ["mean"], True), ({"classifier_pooling": "bos"}, ["cls"], True)],
)  # fmt: skip
def test_the_classifier_pools_what_the_config_says(
    fields: dict[str, str], modes: list[str], before: bool, tmp_path: Path
) -> None:
    """Before the dense layer, or behind all."""
    graph = build(with_config(made(tmp_path, EURO, "classify"), **fields))
    (pooling,) = nodes(graph, "pooling")
    assert pooling.attrs["modes"] == modes
    assert (pooling.outputs[0] != graph.outputs["logits"]) == before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"classifier_pooling": "max"}, "classifier_pooling is 'max'.*'bos' or 'mean' or 'late'"),
        ({"clf_pooling": "mean"}, "clf_pooling is 'mean'.*'late'"),
        ({"classifier_pooling": "bos", "clf_pooling": "late"}, "clf_pooling is 'late'.*'bos'"),
    ],
)
def test_other_poolings_are_refused(fields: dict[str, str], message: str, tmp_path: Path) -> None:
    """``clf_pooling`` is the word of the model's own code, which transformers passes over."""
    with pytest.raises(UnsupportedModelError, match=message):
        build(with_config(made(tmp_path, EURO, "classify"), **fields))


def test_a_classifier_that_transformers_pools_otherwise_is_not_trained(tmp_path: Path) -> None:
    folder = made(tmp_path, EURO, "classify")
    need_transformers(open_checkpoint(with_config(folder, clf_pooling="late")), "training")
    checkpoint = open_checkpoint(with_config(folder, clf_pooling="mean"))
    with pytest.raises(UnsupportedModelError, match=r"training needs .* clf_pooling, which is 'mean', and pools by"):
        need_transformers(checkpoint, "training")


def test_a_tied_decoder_multiplies_by_the_words(tmp_path: Path) -> None:
    tied = nodes(build(made(tmp_path / "tied", EURO, "fill_mask", tied=True)), "linear")[-1]
    assert tied.inputs[1:] == ["embed_tokens.weight", ""]
    untied = nodes(build(made(tmp_path / "own", EURO, "fill_mask", tied=False)), "linear")[-1]
    assert untied.inputs[1:] == ["lm_head.weight", ""]


def test_an_encoder_alone_has_no_decoder(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="task 'fill_mask' needs a head"):
        build(made(tmp_path, EURO), "fill_mask")


def test_a_missing_decoder_is_named(tmp_path: Path) -> None:
    folder = with_tensors(made(tmp_path, EURO, "fill_mask", tied=False), lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' is missing"):
        build(folder)
