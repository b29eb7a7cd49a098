"""JinaBERT v2: ALiBi, what its configs say, and what is refused. ``numpy_encoders`` gives the answers of its cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_build_graph import build, made, with_config, with_tensors

from encast.archs import need_transformers
from encast.archs.jina_bert import alibi_slopes
from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers import open_checkpoint
from encast.passes import optimise
from encast.quant import QuantSpec

JINA = "jina_bert"


def test_slopes_are_those_of_the_paper() -> None:
    """Press et al. 2022, section 3: 1/2 to 1/256 for 8 heads, and for 16 the geometric means between them too."""
    np.testing.assert_array_equal(alibi_slopes(8), [0.5**power for power in range(1, 9)])
    np.testing.assert_allclose(alibi_slopes(16), [0.5 ** (power / 2) for power in range(1, 17)], rtol=1e-7)
    # jina-embeddings-v2-base has 12: those of 8, then every second one of 16.
    np.testing.assert_allclose(alibi_slopes(12)[8:], [0.5**power for power in (0.5, 1.5, 2.5, 3.5)], rtol=1e-7)
    np.testing.assert_array_equal(alibi_slopes(1), [2.0**-8])
    assert all(len(set(alibi_slopes(heads))) == heads for heads in range(1, 65))


def test_distances_cost_alike_to_both_sides(tmp_path: Path) -> None:
    graph, _ = optimise(build(made(tmp_path, JINA, heads=2, positions=5)), QuantSpec("f32"), strict=True)
    (attention,) = [node for node in graph.nodes if node.op == "attention"]
    table = graph.constants[attention.inputs[1]].array
    distances = np.abs(np.arange(-4, 5))
    np.testing.assert_array_equal(table, [-distances / 16, -distances / 256])


def test_a_published_config(tmp_path: Path) -> None:
    """That of jina-embeddings-v2-base-en, with all of its fields but for sizes."""
    code = "jinaai/jina-bert-implementation--"
    published = {
        "attention_probs_dropout_prob": 0.0, "attn_implementation": None,
        "auto_map": {
            "AutoConfig": f"{code}configuration_bert.JinaBertConfig",
            "AutoModel": f"{code}modeling_bert.JinaBertModel",
            "AutoModelForMaskedLM": f"{code}modeling_bert.JinaBertForMaskedLM",
            "AutoModelForSequenceClassification": f"{code}modeling_bert.JinaBertForSequenceClassification",
        },
        "classifier_dropout": None, "emb_pooler": "mean", "feed_forward_type": "geglu", "gradient_checkpointing": False,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "initializer_range": 0.02, "layer_norm_eps": 1e-12,
        "max_position_embeddings": 8192, "model_max_length": 8192, "model_type": "bert", "pad_token_id": 0,
        "position_embedding_type": "alibi", "torch_dtype": "float32", "type_vocab_size": 2, "use_cache": True,
    }  # fmt: skip
    graph = build(with_config(made(tmp_path, JINA, hidden=24, heads=12), **published))
    assert graph.meta.max_len == 8192
    slopes = graph.constants["alibi.slopes"].array[[0, 7, 8, 11]]
    np.testing.assert_array_equal(slopes, np.exp2([-1, -8, -0.5, -3.5]).astype(np.float32))
    changed = {"AutoModelForSequenceClassification": "modeling_bert.JinaBertForSequenceClassification"}
    with pytest.raises(UnsupportedModelError, match="12 heads, no power of two, and auto_map names code"):
        build(with_config(tmp_path / "checkpoint", auto_map=changed))


CONFIGS = [
    ({"feed_forward_type": "original"}, UnsupportedModelError, "feed_forward_type is 'original'"),
    ({"feed_forward_type": None}, UnsupportedModelError, "feed_forward_type is None"),
    ({"hidden_act": "mish"}, UnsupportedModelError, "hidden_act is 'mish'"),
    ({"auto_map": {"AutoModel": "bert_layers.BertForMaskedLM"}}, UnsupportedModelError, "auto_map is "),
    ({"max_position_embeddings": 1 << 18}, CheckpointError, "max_position_embeddings is 262144; an integer from 1"),
    ({"max_position_embeddings": 0}, CheckpointError, "max_position_embeddings is 0; an integer from 1"),
    ({"type_vocab_size": 0}, CheckpointError, "type_vocab_size is 0; an integer from 1"),
    ({"num_attention_heads": 3}, CheckpointError, "hidden size is 8 and the number of attention heads 3"),
]


@pytest.mark.parametrize(("changes", "error", "message"), CONFIGS, ids=[message for *_, message in CONFIGS])
def test_configs_of_jina_bert(changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        build(with_config(made(tmp_path, JINA), **changes))


def test_a_table_of_distances_has_a_limit(tmp_path: Path) -> None:
    folder = made(tmp_path, JINA, hidden=64, heads=64)
    with pytest.raises(UnsupportedModelError, match=r"64 heads and max_position_embeddings 131072.*lower"):
        build(with_config(folder, max_position_embeddings=1 << 17))


def test_bert_with_positions_of_its_own_is_no_jina_bert(tmp_path: Path) -> None:
    folder = made(tmp_path, JINA)
    with pytest.raises(CheckpointError, match=r"position_embeddings\.weight' is missing"):
        build(with_config(folder, position_embedding_type="absolute", auto_map=...))
    with pytest.raises(UnsupportedModelError, match="auto_map is "):
        build(with_config(folder, position_embedding_type="absolute", auto_map={"AutoModel": "m.JinaBertModel"}))


def test_norms_of_queries_are_refused_by_name(tmp_path: Path) -> None:
    """jina-embeddings-v2-base-code."""
    name = "encoder.layer.0.attention.self.layer_norm_q.weight"
    folder = with_tensors(made(tmp_path, JINA), lambda tensors: tensors.update({name: np.ones(8, np.float32)}))
    with pytest.raises(UnsupportedModelError, match=r"layer_norm_q\.weight', a layer norm of queries"):
        build(folder)


@pytest.mark.parametrize(("kind", "gate"), [("geglu", "gelu"), ("reglu", "relu")])
@pytest.mark.parametrize("said", ["gelu", "relu"])
def test_the_gate_is_what_feed_forward_type_says(kind: str, gate: str, said: str, tmp_path: Path) -> None:
    folder = made(tmp_path, JINA, "fill_mask", activation=said, config={"feed_forward_type": kind})
    nodes = build(folder).nodes
    assert [node.attrs["kind"] for node in nodes if node.op == "gated_activation"] == [gate]
    assert [node.attrs["kind"] for node in nodes if node.op == "activation"] == [said]


def test_training_is_refused(tmp_path: Path) -> None:
    """transformers would open it as BERT, without ALiBi and without a word."""
    with pytest.raises(UnsupportedModelError, match=r"training needs a model of transformers, and .* does not run"):
        need_transformers(open_checkpoint(made(tmp_path, JINA)), "training")
