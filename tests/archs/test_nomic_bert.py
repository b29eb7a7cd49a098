"""NomicBERT's two layouts, what its configs say, field by field, and what is refused of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint
from numpy_encoders import nomic_own
from safetensors.numpy import load_file, save_file
from test_build_graph import build, made, with_config, with_tensors

import encast
from encast.archs import need_transformers
from encast.backends.reference import Reference
from encast.batch import Batch
from encast.errors import CheckpointError, UnsupportedModelError
from encast.importers import open_checkpoint
from encast.passes import optimise
from encast.quant import QuantSpec

NOMIC = "nomic_bert"
TEXTS = [[7], [9, 11], [12, 40, 77, 31, 90, 8, 6, 55, 102, 17, 13]]
TYPES = [[0], [0, 1], [0] * 6 + [1] * 5]


def own(folder: Path, head: str = "features", **options: Any) -> Path:
    return made(folder, NOMIC, head, layout="own", **options)


@pytest.mark.parametrize(
    "config",
    [
        {"qkv_proj_bias": True},
        {"mlp_fc1_bias": True},
        {"mlp_fc2_bias": True},
        {"activation_function": "geglu", "rotary_emb_base": 1000},
        {"activation_function": "gelu"},
        {"activation_function": "gelu", "qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("types", [0, 2])
def test_its_own_code_in_numpy_answers_alike(config: dict[str, Any], types: int, tmp_path: Path) -> None:
    """transformers has neither the biases nor the other activations."""
    options = {"layers": 2, "hidden": 24, "heads": 3, "inner": 20, "vocab": 131, "type_vocab": types, "seed": 5}
    folder = own(tmp_path, **options, config=config)
    graph = build(folder)
    batch = Batch.of(TEXTS, TYPES if types else None)
    got = Reference(graph).run("last_hidden_state", batch)
    tensors = load_file(folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    wanted = np.concatenate([nomic_own(tensors, fields, *text) for text in zip(TEXTS, TYPES, strict=True)])
    assert np.abs(got - wanted).max() <= 1e-6 * np.abs(wanted).max()
    exact = Reference(graph).evaluate("last_hidden_state", batch)
    assert np.abs(exact - wanted).max() <= 1e-11 * np.abs(wanted).max()
    optimise(graph, QuantSpec("int8"), strict=True)


def as_own_code_has_it(folder: Path, place: Path) -> Path:
    """A checkpoint of transformers' layout in the other one, with the same numbers."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        "embeddings.LayerNorm": "emb_ln", "layers.": "encoder.layers.", "self_attn.o_proj": "attn.out_proj",
        "mlp.gate_proj": "mlp.fc12", "mlp.up_proj": "mlp.fc11", "mlp.down_proj": "mlp.fc2",
        "post_attention_layernorm": "norm1", "post_mlp_layernorm": "norm2", "nomic_bert.": "bert.",
    }  # fmt: skip
    other: dict[str, Any] = {}
    for name, array in tensors.items():
        new = name
        for old, word in renamed.items():
            new = new.replace(old, word)
        if "self_attn.q_proj" in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            other[new.replace("self_attn.q_proj", "attn.Wqkv")] = np.concatenate(parts)
        elif "self_attn.k_proj" not in name and "self_attn.v_proj" not in name:
            other[new] = array
    words = {
        "model_type": NOMIC, "architectures": config["architectures"], "vocab_size": config["vocab_size"],
        "type_vocab_size": 2, "n_embd": config["hidden_size"], "n_layer": config["num_hidden_layers"],
        "n_head": config["num_attention_heads"], "n_inner": config["intermediate_size"],
        "n_positions": config["max_position_embeddings"], "layer_norm_epsilon": config["layer_norm_eps"],
        "activation_function": "swiglu", "rotary_emb_base": 100, "rotary_emb_fraction": 1, "qkv_proj_bias": False,
        "mlp_fc1_bias": False, "mlp_fc2_bias": False,
    }  # fmt: skip
    place.mkdir()
    (place / "config.json").write_text(json.dumps(words))
    save_file(other, place / "model.safetensors")
    return place


def test_both_layouts_of_one_model_give_the_same_bits(tmp_path: Path) -> None:
    first = made(tmp_path / "a", NOMIC, layers=2, hidden=32, inner=256)
    second = as_own_code_has_it(first, tmp_path / "b")
    graphs = [optimise(build(folder), QuantSpec("f32"), strict=True)[0] for folder in (first, second)]
    assert [(node.op, dict(node.attrs)) for node in graphs[0].nodes] == [
        (node.op, dict(node.attrs)) for node in graphs[1].nodes
    ]
    for one, other in zip(*(graph.nodes for graph in graphs), strict=True):
        for a, b in zip(one.inputs, other.inputs, strict=True):
            if a in graphs[0].constants:
                np.testing.assert_array_equal(graphs[0].constants[a].array, graphs[1].constants[b].array)


def test_a_published_config(tmp_path: Path) -> None:
    """That of nomic-embed-text-v1, with all of its fields but for sizes: it compiles, and the scaled positions end."""
    published = {
        "attn_pdrop": 0.0, "bos_token_id": None, "dense_seq_output": True, "embd_pdrop": 0.0, "fused_bias_fc": True,
        "fused_dropout_add_ln": True, "initializer_range": 0.02, "max_trained_positions": 2048, "n_positions": 8192,
        "parallel_block": False, "parallel_block_tied_norm": False, "reorder_and_upcast_attn": False,
        "resid_pdrop": 0.0, "rotary_emb_base": 1000, "rotary_scaling_factor": 2, "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False, "summary_type": "cls_index", "torch_dtype": "float32",
        "use_cache": True, "use_flash_attn": True, "use_rms_norm": False, "use_xentropy": True,
        # Since transformers has the model, the files say sizes and angles a second time.
        "max_position_embeddings": 2048, "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
    }  # fmt: skip
    graph = build(own(tmp_path, config=published))
    assert graph.meta.max_len == 2048
    assert {(node.attrs["theta"], node.attrs["rate"]) for node in graph.nodes if node.op == "rotary"} == {(1000.0, 1.0)}
    folder = with_config(tmp_path / "checkpoint", rotary_scaling_factor=None)
    assert build(folder).meta.max_len == 8192


def test_defaults_are_those_of_both_configs(tmp_path: Path) -> None:
    silent = ["max_position_embeddings", "hidden_act", "layer_norm_eps", "type_vocab_size", "rope_parameters"]
    graph = build(with_config(made(tmp_path / "a", NOMIC), **dict.fromkeys(silent, ...)))
    assert (graph.meta.max_len, graph.meta.type_vocab) == (2048, 2)
    assert {node.attrs["theta"] for node in graph.nodes if node.op == "rotary"} == {1000.0}
    assert {node.attrs["kind"] for node in graph.nodes if node.op == "gated_activation"} == {"silu"}
    assert {node.attrs["eps"] for node in graph.nodes if node.op == "layer_norm"} == {1e-12}
    biases = ["qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"]
    folder = own(tmp_path / "b", config=dict.fromkeys(biases, True))
    silent = [*biases, "n_positions", "layer_norm_epsilon", "type_vocab_size", "rotary_emb_base"]
    graph = build(with_config(folder, **dict.fromkeys(silent, ...)))
    assert (graph.meta.max_len, graph.meta.type_vocab) == (1024, 2)
    assert {node.attrs["theta"] for node in graph.nodes if node.op == "rotary"} == {10_000.0}
    assert {node.attrs["eps"] for node in graph.nodes if node.op == "layer_norm"} == {1e-5}


OWN = [
    ({"prenorm": True}, UnsupportedModelError, "prenorm is True"),
    ({"parallel_block": True}, UnsupportedModelError, "parallel_block is True"),
    ({"use_rms_norm": True}, UnsupportedModelError, "use_rms_norm is True"),
    ({"causal": True}, UnsupportedModelError, "causal is True"),
    ({"rotary_emb_interleaved": True}, UnsupportedModelError, "rotary_emb_interleaved is True"),
    ({"rotary_emb_fraction": 0.5}, UnsupportedModelError, "rotary_emb_fraction is 0.5"),
    ({"rotary_emb_fraction": 0.0}, UnsupportedModelError, "rotary_emb_fraction is 0.0"),
    ({"rotary_emb_fraction": None}, UnsupportedModelError, "rotary_emb_fraction is missing"),
    ({"rotary_emb_scale_base": 512}, UnsupportedModelError, "rotary_emb_scale_base is 512"),
    ({"num_heads_kv": 1}, UnsupportedModelError, "num_heads_kv is 1"),
    ({"moe_every_n_layers": 2, "num_experts": 8}, UnsupportedModelError, "moe_every_n_layers is 2"),
    ({"activation_function": "glu"}, UnsupportedModelError, "activation_function is 'glu'"),
    ({"activation_function": None}, UnsupportedModelError, "activation_function is 'gelu_new'"),
    ({"auto_map": {"AutoModel": "modeling.OtherModel"}}, UnsupportedModelError, "auto_map is "),
    ({"auto_map": {"AutoModel": "m.NomicBertModel", "AutoTokenizer": "t.Mine"}}, UnsupportedModelError, "auto_map is "),
    ({"auto_map": "m.NomicBertModel"}, UnsupportedModelError, "auto_map is "),
    ({"hidden_size": 9}, CheckpointError, "n_embd is 8 and hidden_size is 9, two spellings"),
    ({"n_embd": 1 << 25}, CheckpointError, "n_embd is 33554432; an integer from 1"),
    ({"n_embd": 16.0}, CheckpointError, "n_embd is 16.0; an integer from 1"),
    ({"n_head": 0}, CheckpointError, "n_head is 0; an integer from 1"),
    ({"n_head": 8}, CheckpointError, "8 heads of 1 columns; rotary positions need pairs"),
    ({"n_layer": 1025}, CheckpointError, "n_layer is 1025; an integer from 1 to 1024"),
    ({"n_inner": None}, CheckpointError, "n_inner is None; an integer from 1"),
    ({"n_inner": 65537}, UnsupportedModelError, "65792 inner ones"),
    ({"n_positions": 1 << 18}, CheckpointError, "n_positions is 262144; an integer from 1"),
    ({"pad_vocab_size_multiple": 0}, CheckpointError, "pad_vocab_size_multiple is 0; an integer from 1"),
    ({"type_vocab_size": -1}, CheckpointError, "type_vocab_size is -1; an integer from 0"),
    ({"rotary_emb_base": 0}, CheckpointError, "rotary_emb_base is 0; a number above 0"),
    ({"rotary_scaling_factor": -2}, CheckpointError, "rotary_scaling_factor is -2; a number above 0"),
    ({"rotary_scaling_factor": 2, "max_trained_positions": 0}, CheckpointError, "max_trained_positions is 0"),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        CheckpointError,
        r"rotary_emb_base is 100, and .*rope_parameters say 100, times 0\.5: two spellings",
    ),
    ({"layer_norm_epsilon": 0.0}, CheckpointError, "layer_norm_epsilon is 0.0; a number above 0"),
    ({"qkv_proj_bias": "no"}, CheckpointError, "qkv_proj_bias is 'no'; true or false"),
    ({"qkv_proj_bias": True}, CheckpointError, r"'encoder\.layers\.0\.attn\.Wqkv\.bias' is missing"),
    ({"mlp_fc1_bias": True}, CheckpointError, r"'encoder\.layers\.0\.mlp\.fc12\.bias' is missing"),
    ({"mlp_fc2_bias": True}, CheckpointError, r"'encoder\.layers\.0\.mlp\.fc2\.bias' is missing"),
]


@pytest.mark.parametrize(("changes", "error", "message"), OWN, ids=[message for *_, message in OWN])
def test_configs_of_its_own_code(changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        build(with_config(own(tmp_path), **changes))


ROPES = [
    ({"rope_type": "yarn", "factor": 4.0}, UnsupportedModelError, "rope_parameters: rope_type is 'yarn'"),
    ({"rope_type": "dynamic", "factor": 4.0}, UnsupportedModelError, "rope_parameters: rope_type is 'dynamic'"),
    ({"rope_type": "linear", "type": "ntk", "factor": 2}, UnsupportedModelError, "rope_parameters: type is 'ntk'"),
    ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor is 0.5"),
    ({"type": "ntk", "factor": 8.0, "mixed_b": 0.75}, UnsupportedModelError, "rope_parameters: mixed_b is 0.75"),
    ({"rope_type": "default", "factor": 8.0}, UnsupportedModelError, "rope_parameters: factor is 8.0"),
    ({"rope_type": "linear"}, CheckpointError, "rope_parameters: factor is missing; add it"),
    ({"rope_type": "linear", "factor": 0}, CheckpointError, "rope_parameters: factor is 0; a number above 0"),
    ({"rope_type": "ntk", "factor": 1e40}, CheckpointError, r"rope_parameters: factor is 1e\+40; a number above 0"),
    ({"rope_type": "linear", "factor": 1e-308, "rope_theta": 1e-30}, CheckpointError, "factor is 1e-308 and the base"),
    ({"rope_type": "linear", "factor": 5e-324}, CheckpointError, "factor is 4.94066e-324 and the base 1000"),
    ({"rope_theta": -1.0}, CheckpointError, "rope_parameters: rope_theta is -1.0; a number above 0"),
    ({"rope_type": 7}, UnsupportedModelError, "rope_parameters: rope_type is 7"),
]


@pytest.mark.parametrize(("rope", "error", "message"), ROPES, ids=[message for *_, message in ROPES])
def test_rotary_positions_that_it_does_not_have(
    rope: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        build(with_config(made(tmp_path, NOMIC), rope_parameters=rope))


@pytest.mark.parametrize(
    ("changes", "theta", "rate"),
    [
        ({"rope_parameters": None, "rope_theta": 500}, 500.0, 1.0),
        ({"rope_parameters": {"rope_theta": 70.0}, "rope_theta": 500}, 70.0, 1.0),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, 1000.0, 0.25),
        ({"rope_scaling": {"type": "linear", "factor": 4}, "rope_theta": 9.0}, 9.0, 0.25),
        ({"rope_parameters": {"rope_type": "ntk", "rope_theta": 20.0, "factor": 8.0}}, 160.0, 8.0**-0.5),
        ({"rope_parameters": {"rope_type": "ntk", "rope_theta": 20.0, "factor": 0.5}}, 20.0, 1.0),
    ],
)
def test_rotary_positions_in_every_spelling(changes: dict[str, Any], theta: float, rate: float, tmp_path: Path) -> None:
    graph = build(with_config(made(tmp_path, NOMIC), **changes))
    found = {(node.attrs["theta"], node.attrs["rate"]) for node in graph.nodes if node.op == "rotary"}
    assert found == {(theta, rate)}


def test_experts_are_no_tensors_of_the_architecture(tmp_path: Path) -> None:
    """Where the config is silent about them."""
    name = "encoder.layers.0.mlp.experts.mlp.w1"
    folder = with_tensors(own(tmp_path), lambda tensors: tensors.update({name: np.ones((8, 8), np.float32)}))
    with pytest.raises(CheckpointError, match=r"1 tensors have no place.*experts"):
        build(folder)


def test_a_head_with_new_biases(tmp_path: Path) -> None:
    """What transformers saves of a checkpoint whose own code has none: they are read, not dropped."""
    folder = own(tmp_path, "fill_mask")
    assert not any("cls" in name and name.endswith(".bias") and "norm" not in name for name in build(folder).constants)
    new = {"transform.dense.bias": 8, "bias": 256, "decoder.bias": 256}
    with_tensors(
        folder,
        lambda tensors: tensors.update(
            {f"cls.predictions.{name}": np.full(size, 0.5, np.float32) for name, size in new.items()}
        ),
    )
    graph = build(folder)
    assert {"cls.predictions.transform.dense.bias", "cls.predictions.decoder.bias"} <= set(graph.constants)


@pytest.mark.parametrize("layout", ["own", "saved"])
def test_training_asks_for_the_layout_of_transformers(layout: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"training needs a model of transformers.*save_original_format"):
        need_transformers(open_checkpoint(made(tmp_path, NOMIC, layout=layout)), "training")
    advised = made(tmp_path / "other", NOMIC)
    need_transformers(open_checkpoint(advised), "training")
    # What transformers saves of the model keeps the words of its own code.
    own_words = {"n_embd": 8, "n_head": 2, "n_layer": 1, "auto_map": {"AutoModel": "m.NomicBertModel"}}
    need_transformers(open_checkpoint(with_config(advised, **own_words)), "training")


def test_prompts_of_its_own_layout(tmp_path: Path) -> None:
    """nomic-embed-text wants ``search_query: `` before a query; the folder says so, as any of sentence-transformers."""
    folder = make_checkpoint(
        tmp_path / "nomic", NOMIC, "embed", layout="own", layers=1, pooling=("mean",), normalize=True
    )
    settings = {"prompts": {"query": "search_query: ", "document": "search_document: "}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    with encast.load(encast.compile(folder, tmp_path / "nomic.encast", dtype="int8", strict=True)) as engine:
        plain = engine.embed(["search_query: the cat"])
        np.testing.assert_array_equal(engine.embed(["the cat"], prompt_name="query"), plain)
        assert not np.array_equal(engine.embed(["the cat"]), plain)
