"""What ModernBERT's config says, field by field, and what is refused of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_build_graph import build, made, with_config

from encast.errors import CheckpointError, UnsupportedModelError
from encast.ir import Graph

MODERN = "modernbert"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_activation": "mish"}, UnsupportedModelError, "hidden_activation is 'mish'"),
        ({"rope_scaling": {"factor": 2.0}}, UnsupportedModelError, "rope_scaling is "),
        ({"head_dim": 4}, UnsupportedModelError, "head_dim is 4"),
        ({"position_embedding_type": "relative_key"}, UnsupportedModelError, "position_embedding_type is 'relative_k"),
        ({"layer_types": ["full_attention", "mamba"]}, UnsupportedModelError, "layer_types has 'mamba'"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}},
            UnsupportedModelError,
            "rope_parameters: full_attention: rope_type is 'yarn'",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}},
            UnsupportedModelError,
            "rope_parameters: sliding_attention: partial_rotary_factor is 0.5",
        ),
        ({"rope_parameters": {"rope_theta": 1e4}}, UnsupportedModelError, "rope_parameters: rope_theta is 10000.0"),
        ({"layer_types": ["full_attention"]}, CheckpointError, "layer_types has 1 entries and num_hidden_layers is 2"),
        ({"layer_types": "full_attention"}, CheckpointError, "layer_types is 'full_attention'; a list"),
        ({"rope_parameters": 7}, CheckpointError, "rope_parameters is 7; an object"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 0}}},
            CheckpointError,
            "full_attention: rope_theta is 0; a number above 0",
        ),
        ({"global_rope_theta": -1.0}, CheckpointError, "global_rope_theta is -1.0; a number above 0"),
        ({"local_rope_theta": None}, CheckpointError, "local_rope_theta is None; a number above 0"),
        ({"local_rope_theta": 1e31}, CheckpointError, r"local_rope_theta is 1e\+31; a number above 0"),
        ({"local_attention": 1}, CheckpointError, "local_attention is 1; an integer from 2"),
        ({"sliding_window": 0}, CheckpointError, "sliding_window is 0; an integer from 1"),
        ({"max_position_embeddings": 1 << 18}, CheckpointError, "max_position_embeddings is 262144; an integer from 1"),
        ({"global_attn_every_n_layers": 0}, CheckpointError, "global_attn_every_n_layers is 0; an integer from 1"),
        ({"norm_bias": "no"}, CheckpointError, "norm_bias is 'no'; true or false"),
        ({"norm_eps": 0.0}, CheckpointError, "norm_eps is 0.0; a number above 0"),
        ({"attention_bias": True}, CheckpointError, r"'layers\.0\.attn\.Wqkv\.bias' is missing"),
        ({"mlp_bias": True}, CheckpointError, r"'layers\.0\.mlp\.Wi\.bias' is missing"),
        ({"num_attention_heads": 8, "hidden_size": 8}, CheckpointError, "8 heads of 1 columns; rotary positions need"),
    ],
)
def test_configs_of_modernbert(changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        build(with_config(made(tmp_path, MODERN, layers=2, hidden=16), **changes))


def test_rotary_positions_of_all_columns_may_be_said(tmp_path: Path) -> None:
    def thetas(graph: Graph) -> list[object]:
        return [node.attrs["theta"] for node in graph.nodes if node.op == "rotary"]

    folder = made(tmp_path, MODERN, layers=2)
    silent = thetas(build(folder))
    rope = {kind: {"partial_rotary_factor": 1.0} for kind in ("full_attention", "sliding_attention")}
    assert thetas(build(with_config(folder, rope_parameters=rope))) == silent != []


def test_modernbert_classifier_pooling_is_read(tmp_path: Path) -> None:
    folder = made(tmp_path, MODERN, "classify")
    (pooling,) = [node for node in build(folder).nodes if node.op == "pooling"]
    assert pooling.attrs["modes"] == ["cls"]
    (pooling,) = [n for n in build(with_config(folder, classifier_pooling="mean")).nodes if n.op == "pooling"]
    assert pooling.attrs["modes"] == ["mean"]
    with pytest.raises(UnsupportedModelError, match="classifier_pooling is 'max'"):
        build(with_config(folder, classifier_pooling="max"))


def test_modernbert_defaults_are_those_of_its_config(tmp_path: Path) -> None:
    """What transformers takes where the config says nothing (ModernBertConfig)."""
    silent = ["local_attention", "global_rope_theta", "local_rope_theta", "norm_eps", "max_position_embeddings"]
    silent += ["hidden_activation", "classifier_activation", "tie_word_embeddings"]
    folder = with_config(made(tmp_path, MODERN, layers=5), **dict.fromkeys(silent, ...))
    graph = build(folder)
    assert graph.meta.max_len == 8192
    assert [node.attrs["theta"] for node in graph.nodes if node.op == "rotary"] == [
        *[160_000.0] * 2, *[10_000.0] * 4, *[160_000.0] * 2, *[10_000.0] * 2,
    ]  # fmt: skip
    assert [(node.layer, node.attrs["reach"]) for node in graph.nodes if node.op == "local_mask"] == [
        (1, 64), (2, 64), (4, 64),
    ]  # fmt: skip
    assert {node.attrs["eps"] for node in graph.nodes if node.op == "layer_norm"} == {1e-5}
    assert {node.attrs["kind"] for node in graph.nodes if node.op == "gated_activation"} == {"gelu"}


def test_modernbert_layer_types_win_over_the_number(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    folder = with_config(made(tmp_path, MODERN, layers=2), layer_types=kinds, global_attn_every_n_layers=1)
    assert [node.layer for node in build(folder).nodes if node.op == "local_mask"] == [0]


@pytest.mark.parametrize("kind", ["absolute", "rope", "sans_pos"])
def test_modernbert_is_rotary_whatever_an_unread_field_says(kind: str, tmp_path: Path) -> None:
    assert build(with_config(made(tmp_path, MODERN), position_embedding_type=kind)).meta.arch == MODERN


def test_modernbert_sliding_window_overrules_local_attention(tmp_path: Path) -> None:
    """As ModernBertConfig of transformers has it: the keys to each side."""
    folder = with_config(made(tmp_path, MODERN, layers=3), local_attention=6, sliding_window=2)
    assert {node.attrs["reach"] for node in build(folder).nodes if node.op == "local_mask"} == {2}
