"""GTE's two layouts, what its configs say, field by field, and what is refused of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_build_graph import build, made, with_config, with_tensors

from encast.archs import need_transformers
from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers import open_checkpoint
from encast.passes import optimise
from encast.quant import QuantSpec


def as_own_code_has_it(folder: Path, place: Path, *, packed: bool) -> Path:
    """A checkpoint of transformers' layout in that of new-impl, with the same numbers."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        "layers.": "encoder.layer.", "self_attn.": "attention.", "post_attention_layernorm": "attn_ln",
        "post_mlp_layernorm": "mlp_ln", "gte.": "new.",
    }  # fmt: skip
    other: dict[str, Any] = {}
    for name, array in tensors.items():
        new = name
        for old, word in renamed.items():
            new = new.replace(old, word)
        if "q_proj" in name and packed:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            other[new.replace("q_proj", "qkv_proj")] = np.concatenate(parts)
        elif "gate_proj" in name:
            both = [tensors[name.replace("gate", "up")], array]
            other[new.replace("gate_proj", "up_gate_proj")] = np.concatenate(both)
        elif "up_proj" not in name and not (packed and ("k_proj" in name or "v_proj" in name)):
            other[new] = array
    config |= {"model_type": "new", "rope_theta": 100.0, "pack_qkv": packed, "architectures": ["NewModel"]}
    config["position_embedding_type"] = "rope"
    del config["rope_parameters"]
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    save_file(other, place / "model.safetensors")
    return place


@pytest.mark.parametrize("packed", [True, False])
def test_both_layouts_of_one_model_give_the_same_bits(packed: bool, tmp_path: Path) -> None:
    first = made(tmp_path / "a", "gte", layers=2, hidden=32)
    second = as_own_code_has_it(first, tmp_path / "b", packed=packed)
    graphs = [optimise(build(folder), QuantSpec("f32"), strict=True)[0] for folder in (first, second)]
    assert [graph.meta.arch for graph in graphs] == ["gte", "new"]
    assert [(node.op, dict(node.attrs)) for node in graphs[0].nodes] == [
        (node.op, dict(node.attrs)) for node in graphs[1].nodes
    ]
    for one, other in zip(*(graph.nodes for graph in graphs), strict=True):
        for a, b in zip(one.inputs, other.inputs, strict=True):
            if a in graphs[0].constants:
                np.testing.assert_array_equal(graphs[0].constants[a].array, graphs[1].constants[b].array)


def test_a_published_config(tmp_path: Path) -> None:
    """That of gte-multilingual-reranker-base with all of its fields but for sizes."""
    published = {
        "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0, "hidden_dropout_prob": 0.1,
        "initializer_range": 0.02, "layer_norm_eps": 1e-12, "layer_norm_type": "layer_norm",
        "logn_attention_clip1": False, "logn_attention_scale": False, "max_position_embeddings": 8192,
        "pack_qkv": True, "pad_token_id": 1, "position_embedding_type": "rope",
        "rope_scaling": {"factor": 8.0, "type": "ntk"}, "rope_theta": 20000, "torch_dtype": "float16",
        "type_vocab_size": 1, "unpad_inputs": False, "use_memory_efficient_attention": False,
        "auto_map": {
            "AutoConfig": "Alibaba-NLP/new-impl--configuration.NewConfig",
            "AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel",
            "AutoModelForMaskedLM": "Alibaba-NLP/new-impl--modeling.NewForMaskedLM",
            "AutoModelForMultipleChoice": "Alibaba-NLP/new-impl--modeling.NewForMultipleChoice",
            "AutoModelForQuestionAnswering": "Alibaba-NLP/new-impl--modeling.NewForQuestionAnswering",
            "AutoModelForSequenceClassification": "Alibaba-NLP/new-impl--modeling.NewForSequenceClassification",
            "AutoModelForTokenClassification": "Alibaba-NLP/new-impl--modeling.NewForTokenClassification",
        },
    }  # fmt: skip
    folder = made(tmp_path, "new", "classify", hidden=128, heads=2, labels=1, type_vocab=1, config=published)
    graph = build(folder)
    assert (graph.meta.max_len, graph.meta.problem_type) == (8192, "regression")
    (angles,) = {(node.attrs["theta"], node.attrs["rate"]) for node in graph.nodes if node.op == "rotary"}
    assert angles == (160_000.0, 8.0 ** (-2 / 64))


def test_defaults_are_those_of_both_configs(tmp_path: Path) -> None:
    silent = ["max_position_embeddings", "hidden_act", "layer_norm_eps", "type_vocab_size", "rope_parameters"]
    graph = build(with_config(made(tmp_path / "a", "gte", type_vocab=1), **dict.fromkeys(silent, ...)))
    assert (graph.meta.max_len, graph.meta.type_vocab) == (8192, 1)
    assert {(node.attrs["theta"], node.attrs["rate"]) for node in graph.nodes if node.op == "rotary"} == {(160e3, 1.0)}
    silent = ["max_position_embeddings", "hidden_act", "layer_norm_eps", "type_vocab_size", "rope_theta"]
    silent += ["rope_scaling", "pack_qkv", "position_embedding_type", "layer_norm_type"]
    graph = build(with_config(made(tmp_path / "b", "new", type_vocab=1), **dict.fromkeys(silent, ...)))
    assert (graph.meta.max_len, graph.meta.type_vocab) == (2048, 1)
    assert {(node.attrs["theta"], node.attrs["rate"]) for node in graph.nodes if node.op == "rotary"} == {(1e4, 1.0)}
    assert {node.attrs["kind"] for node in graph.nodes if node.op == "gated_activation"} == {"gelu"}
    assert {node.attrs["eps"] for node in graph.nodes if node.op == "layer_norm"} == {1e-12}


CONFIGS = [
    ({"layer_norm_type": "rms_norm"}, UnsupportedModelError, "layer_norm_type is 'rms_norm'"),
    ({"logn_attention_scale": True}, UnsupportedModelError, "logn_attention_scale is True"),
    ({"position_embedding_type": "absolute"}, UnsupportedModelError, "position_embedding_type is 'absolute'"),
    ({"head_dim": 8}, UnsupportedModelError, "head_dim is 8"),
    ({"hidden_act": "mish"}, UnsupportedModelError, "hidden_act is 'mish'"),
    ({"auto_map": {"AutoModel": "modeling.NewerModel"}}, UnsupportedModelError, "auto_map is "),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, UnsupportedModelError, "rope_scaling: type is 'dynamic'"),
    ({"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.75}}, UnsupportedModelError, "mixed_b is 0.75"),
    ({"rope_scaling": {"type": "ntk"}}, CheckpointError, "rope_scaling: factor is missing"),
    ({"rope_scaling": {"type": "ntk", "factor": 0}}, CheckpointError, "rope_scaling: factor is 0; a number above 0"),
    ({"rope_scaling": {"type": "ntk", "factor": "8"}}, CheckpointError, "factor is '8'; a number above 0"),
    ({"rope_scaling": "ntk"}, CheckpointError, "rope_scaling is 'ntk'; an object"),
    ({"rope_theta": 0}, CheckpointError, "rope_theta is 0; a number above 0"),
    ({"max_position_embeddings": 1 << 18}, CheckpointError, "max_position_embeddings is 262144; an integer from 1"),
    ({"type_vocab_size": -1}, CheckpointError, "type_vocab_size is -1; an integer from 0"),
    ({"num_attention_heads": 8}, CheckpointError, "8 heads of 1 columns; rotary positions need pairs"),
    ({"pack_qkv": "yes"}, CheckpointError, "pack_qkv is 'yes'; true or false"),
    ({"pack_qkv": False}, CheckpointError, r"'encoder\.layer\.0\.attention\.q_proj\.weight' is missing"),
]


@pytest.mark.parametrize(("changes", "error", "message"), CONFIGS, ids=[message for *_, message in CONFIGS])
def test_configs_of_its_own_code(changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        build(with_config(made(tmp_path, "new"), **changes))


def test_a_copy_of_the_code_may_call_itself_gte(tmp_path: Path) -> None:
    """snowflake-arctic-embed-m-v2.0: the model_type of transformers, the config and tensors of new-impl."""
    code = {"AutoModel": "modeling_hf_alibaba_nlp_gte.GteModel"}
    folder = with_config(made(tmp_path, "new"), model_type="gte", architectures=["GteModel"], auto_map=code)
    graph = build(folder)
    assert graph.meta.arch == "gte"
    assert {node.attrs["theta"] for node in graph.nodes if node.op == "rotary"} == {160.0}


@pytest.mark.parametrize(("arch", "kind"), [("gte", "gelu"), ("new", "relu")])
def test_the_activation_of_the_masked_lm(arch: str, kind: str, tmp_path: Path) -> None:
    """transformers has gelu there, whatever the layers have; new-impl has what they have."""
    graph = build(made(tmp_path, arch, "fill_mask", activation="relu"))
    assert [node.attrs["kind"] for node in graph.nodes if node.op == "activation"] == [kind]


def test_every_missing_tensor_of_its_own_code_is_named(tmp_path: Path) -> None:
    folder = made(tmp_path, "new", "fill_mask")
    original = (folder / "model.safetensors").read_bytes()
    for name in load_file(folder / "model.safetensors"):
        (folder / "model.safetensors").write_bytes(original)
        with_tensors(folder, lambda tensors, name=name: tensors.pop(name))  # type: ignore[misc]
        with pytest.raises((CheckpointError, UnsupportedModelError), match=rf"tensor '{name}'"):
            build(folder)


def test_training_asks_for_the_layout_of_transformers(tmp_path: Path) -> None:
    advised = with_config(made(tmp_path / "a", "gte"), auto_map={"AutoModel": "modeling.GteModel"})
    need_transformers(open_checkpoint(advised), "training")
    with pytest.raises(UnsupportedModelError, match=r"training needs a model of transformers.*save_original_format"):
        need_transformers(open_checkpoint(made(tmp_path / "b", "gte", layout="saved")), "training")
    with pytest.raises(UnsupportedModelError, match=r"training needs a model of transformers.*does not run"):
        need_transformers(open_checkpoint(made(tmp_path / "c", "new")), "training")
