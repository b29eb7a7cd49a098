"""XLM-RoBERTa in the layout of flash-attention's BERT: its config, what is refused of it, how its weights are read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bounds import allowed_difference, largest_excess
from cases import Opened, open_case
from checkpoints import make_checkpoint
from late_checkpoints import make_late_checkpoint
from m3_checkpoints import make_m3_checkpoint
from safetensors.numpy import load_file
from test_build_graph import HOSTILE, build, made, with_config, with_tensors
from xlm_roberta_flash_family import FAMILY

import encast
from encast.archs import need_transformers, xlm_roberta_flash
from encast.archs.gated import Rotary
from encast.backends.reference import Reference
from encast.batch import Batch
from encast.errors import CheckpointError, InputError, UnsupportedModelError
from encast.importers import open_checkpoint
from encast.ir import Graph, Node
from encast.passes import optimise
from encast.quant import QuantSpec

FLASH = FAMILY.arch


def nodes(graph: Graph, op: str) -> list[Node]:
    return [node for node in graph.nodes if node.op == op]


# Configs


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_act": "relu"}, UnsupportedModelError, "hidden_act is 'relu', which this model's code refuses"),
        ({"hidden_act": 1}, CheckpointError, "hidden_act is 1"),
        ({"rotary_emb_dim": 2}, UnsupportedModelError, "rotary_emb_dim is 2.*4"),
        ({"rotary_emb_interleaved": True}, UnsupportedModelError, "rotary_emb_interleaved is True"),
        ({"rotary_emb_scale_base": 512}, UnsupportedModelError, "rotary_emb_scale_base is 512"),
        ({"layer_norm_eps": ...}, CheckpointError, "layer_norm_eps is missing"),
        ({"auto_map": {"AutoConfig": "c.XLMRobertaConfig", "AutoModel": "m.XLMRobertaModel"}}, UnsupportedModelError,
         "auto_map is "),
        ({"rotary_emb_base": 0}, CheckpointError, "rotary_emb_base is 0"),
        ({"rope_theta": 10000.0}, CheckpointError, "two spellings of one field"),
        ({"rope_scaling": {"type": "yarn"}}, UnsupportedModelError, "rope_scaling: type is 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, CheckpointError, "two spellings of one field"),
        ({"num_attention_heads": 16}, CheckpointError, "16 heads of 1 columns; rotary positions need"),
        ({"position_embedding_type": "alibi"}, UnsupportedModelError, "position_embedding_type is 'alibi'"),
        ({"position_embedding_type": "absolute"}, CheckpointError, "position_embeddings.weight' is missing"),
        ({"is_decoder": True}, UnsupportedModelError, "is_decoder is True"),
        ({"layer_norm_eps": 0}, CheckpointError, "layer_norm_eps is 0; a number above 0"),
        ({"type_vocab_size": 2}, CheckpointError, r"token_type_embeddings.weight' has shape \[1, 16\]"),
        ({"pad_vocab_size_multiple": 8}, CheckpointError, r"word_embeddings.weight' has shape \[50, 16\].*\[56"),
        ({"auto_map": {"AutoConfig": "c.XLMRobertaFlashConfig", "AutoModel": "m.OtherModel"}}, UnsupportedModelError,
         "auto_map is "),
        ({"model_type": "roberta"}, UnsupportedModelError, "model_type is 'roberta', and position_embedding_type is"),
        ({"model_type": "bert"}, UnsupportedModelError, "position_embedding_type is 'rotary'"),
    ],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    if changes.get("model_type"):
        changes = {**changes, "auto_map": ...}
    with pytest.raises(error, match=message):
        build(with_config(made(tmp_path, FLASH, hidden=16, heads=4, vocab=50, type_vocab=1), **changes))


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "pad_vocab_size_multiple"])
def test_hostile_sizes(field: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {field} is .*an integer from 1 to"):
        build(with_config(made(tmp_path, FLASH), **{field: value}))


@pytest.mark.parametrize("value", [-1, 1.5, "", [], {"a": []}, {"AutoConfig": 1}, {"AutoConfig": []}], ids=repr)
def test_hostile_code(value: Any, tmp_path: Path) -> None:
    """Which model it is says the other field too."""
    with pytest.raises((CheckpointError, UnsupportedModelError), match="auto_map"):
        build(with_config(made(tmp_path, FLASH), auto_map=value))


def test_the_config_of_jina_colbert_v2(tmp_path: Path) -> None:
    """All fields but for sizes, ``architectures`` and the language's."""
    code = "jinaai/xlm-roberta-flash-implementation--"
    fields = {
        "auto_map": {
            "AutoConfig": f"{code}configuration_xlm_roberta.XLMRobertaFlashConfig",
            "AutoModel": f"{code}modeling_xlm_roberta.XLMRobertaModel",
            "AutoModelForMaskedLM": f"{code}modeling_xlm_roberta.XLMRobertaForMaskedLM",
            "AutoModelForPreTraining": f"{code}modeling_xlm_roberta.XLMRobertaForPreTraining",
        },
        "bos_token_id": 0, "classifier_dropout": None, "emb_pooler": None, "eos_token_id": 2, "hidden_act": "gelu",
        "layer_norm_eps": 1e-05, "lora_adaptations": None, "lora_rank": 4, "lora_alpha": 1,
        "matryoshka_dimensions": None, "max_position_embeddings": 8194, "output_past": True, "pad_token_id": 1,
        "position_embedding_type": "rotary", "rotary_emb_base": 20000.0, "truncate_dim": None, "use_cache": False,
        "use_flash_attn": True, "use_reentrant": False, "load_trained_adapters": False,
    }  # fmt: skip
    graph = build(with_config(made(tmp_path, FLASH), **fields))
    assert graph.meta.max_len == 8194
    assert {(node.attrs["theta"], node.attrs["rate"]) for node in nodes(graph, "rotary")} == {(20000.0, 1.0)}
    assert {node.attrs["eps"] for node in nodes(graph, "layer_norm")} == {1e-5}


def test_the_config_of_jina_reranker_v2(tmp_path: Path) -> None:
    """A table of positions, and neither ``position_embedding_type`` nor a base that would say more."""
    folder = made(tmp_path, FLASH, "classify", layout="absolute", labels=1, positions=30)
    names = {"AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig"}
    names["AutoModelForSequenceClassification"] = "modeling_xlm_roberta.XLMRobertaForSequenceClassification"
    graph = build(with_config(folder, auto_map=names, pad_token_id=1, position_embedding_type=..., model_type=...))
    assert (graph.meta.max_len, graph.meta.task, nodes(graph, "rotary")) == (28, "classify", [])
    (ids,) = nodes(graph, "position_ids")
    assert (ids.attrs["offset"], ids.attrs["skip_id"]) == (2, 1)


@pytest.mark.parametrize(
    ("fields", "kind"), [({}, "gelu"), ({"hidden_act": ...}, "gelu"), ({"hidden_act": "gelu_fast"}, "gelu_tanh")]
)
def test_activations(fields: dict[str, Any], kind: str, tmp_path: Path) -> None:
    graph = build(with_config(made(tmp_path, FLASH, layers=2), **fields))
    assert [node.attrs["kind"] for node in nodes(graph, "activation")] == [kind] * 2


def test_merged_adapters(tmp_path: Path) -> None:
    names = {"AutoConfig": "c.XLMRobertaFlashConfig", "AutoModel": "modeling_lora.XLMRobertaLoRA"}
    folder = with_config(made(tmp_path, FLASH), auto_map=names, architectures=["XLMRobertaLoRA"])
    assert build(with_config(folder, lora_adaptations=[])).meta.task == "features"


@pytest.mark.parametrize("pad", [None, 250001])
def test_what_rotary_positions_do_not_need(pad: int | None, tmp_path: Path) -> None:
    graph = build(with_config(made(tmp_path, FLASH), pad_token_id=pad, rotary_emb_base=...))
    assert {node.attrs["theta"] for node in nodes(graph, "rotary")} == {10000.0}


@pytest.mark.parametrize("pad", [-1, 31, "1", 1.5])
def test_a_table_needs_the_padding_id(pad: Any, tmp_path: Path) -> None:
    folder = made(tmp_path, FLASH, layout="absolute", positions=30)
    with pytest.raises(CheckpointError, match=r"pad_token_id is .*an integer from 0 to 30"):
        build(with_config(folder, pad_token_id=pad))


def test_it_is_known_by_either_field(tmp_path: Path) -> None:
    folder = made(tmp_path, FLASH)
    graph = build(folder)
    for fields in ({"auto_map": ...}, {"model_type": FLASH}, {"model_type": ""}, {"model_type": ...}):
        again = build(with_config(folder, **fields))
        assert [node.op for node in again.nodes] == [node.op for node in graph.nodes]


def test_others_are_xlm_roberta_as_before(tmp_path: Path) -> None:
    graph = build(made(tmp_path, "xlm-roberta"))
    assert "embeddings.position_embeddings.weight" in graph.constants


# Weights and answers


def test_queries_keys_and_values_lie_one_behind_the_other(tmp_path: Path) -> None:
    folder = made(tmp_path, FLASH, hidden=8, heads=2)
    stored = load_file(folder / "model.safetensors")
    graph = build(folder)
    for index, part in enumerate(("query", "key", "value")):
        for kind in ("weight", "bias"):
            name = f"encoder.layers.0.mixer.Wqkv.{kind}"
            wanted = stored[name][8 * index : 8 * index + 8]
            np.testing.assert_array_equal(graph.constants[f"{name}[{part}]"].array, wanted)


def test_a_padding_id_within_a_text_takes_no_position(tmp_path: Path) -> None:
    folder = make_checkpoint(
        tmp_path / "made", FLASH, "features", layers=2, hidden=16, heads=4, type_vocab=1, layout="absolute", seed=5
    )
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    ids = [7, 0, 9, 0, 0, 12]
    assert FAMILY.answers is not None
    wanted, _ = FAMILY.answers(tensors, config, "features", ids)
    found = Reference(build(folder)).run("last_hidden_state", Batch.of([ids]))
    np.testing.assert_allclose(found, wanted, atol=1e-12)


def test_norms_read_otherwise_show(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_case("xlm-roberta-flash-features", tmp_path_factory)
    paths = replace(xlm_roberta_flash.FLASH_PATHS, attention_norm="norm2", output_norm="norm1")
    monkeypatch.setattr(xlm_roberta_flash, "FLASH_PATHS", paths)
    assert _excess(opened) > 1.0


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_another_base_shows(
    factor: float, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_case("xlm-roberta-flash-features", tmp_path_factory)
    theta = 500.0 * factor
    monkeypatch.setattr(xlm_roberta_flash, "read_flash_rotary", lambda config, size: Rotary(theta))
    assert _excess(opened) > 1.0


def test_other_positions_show(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_case("xlm-roberta-flash-absolute", tmp_path_factory)
    real = xlm_roberta_flash.sum_embeddings

    def moved(*args: Any, **options: Any) -> str:
        return real(*args, **{**options, "offset": options["offset"] + 1})

    monkeypatch.setattr(xlm_roberta_flash, "sum_embeddings", moved)
    assert _excess(opened) > 1.0


@pytest.mark.parametrize("eps", [1e-12, 1e-4])
def test_another_eps_shows(eps: float, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    opened = open_case("xlm-roberta-flash-features", tmp_path_factory)
    folder = make_checkpoint(tmp_path / "other", FLASH, "features", **opened.case.options)
    assert _excess(opened, build(with_config(folder, layer_norm_eps=eps))) > 1.0


def _excess(opened: Opened, graph: Graph | None = None) -> float:
    """How far the graph that is built now is off the answers, in the bound of float32 engines."""
    exact, allowed = allowed_difference(opened.graph, opened.output, opened.batch, opened.select)
    allowed = opened.kept(allowed)
    assert largest_excess(opened.golden("f64"), opened.kept(exact), allowed) < 1e-5
    return largest_excess(opened.evaluate(graph or build(opened.folder)), opened.golden("f64"), allowed)


# Fusions, lengths, heads


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("layout", ["transformers", "absolute"])
def test_all_that_a_layer_promises_is_fused(dtype: str, layout: str, tmp_path: Path) -> None:
    folder = made(tmp_path, FLASH, layers=2, hidden=64, layout=layout)
    graph, report = optimise(build(folder), QuantSpec(dtype), strict=True)
    assert not report.misses
    assert not nodes(graph, "activation")


@pytest.mark.parametrize("layout", ["transformers", "absolute"])
def test_from_one_token_to_the_longest(layout: str, tmp_path: Path) -> None:
    """The padding id 0 takes the first row of a table."""
    positions = 71 if layout == "absolute" else 70
    folder = made(tmp_path, FLASH, hidden=320, heads=5, positions=positions, layout=layout)
    path = encast.compile(folder, tmp_path / "made.encast", dtype="f32", strict=True)
    texts = [[index % 50 + 6 for index in range(length)] for length in (1, 70, 69, 2)]
    with encast.load(path, threads=1) as engine:
        got = engine.runnable.run("last_hidden_state", Batch.of(texts))
        with pytest.raises(InputError, match="70"):
            engine.runnable.run("last_hidden_state", Batch.of([[7] * 71]))
    exact, allowed = allowed_difference(build(folder), "last_hidden_state", Batch.of(texts), elementary=16 * 2.0**-24)
    assert largest_excess(got, exact, allowed) <= 1.0


def test_the_decoder_is_tied_unless_the_config_says_otherwise(tmp_path: Path) -> None:
    folder = made(tmp_path, FLASH, "fill_mask")
    assert nodes(build(folder), "linear")[-1].inputs[1] == "embeddings.word_embeddings.weight"
    with pytest.raises(CheckpointError, match=r"'lm_head\.decoder\.weight' is missing"):
        build(with_config(folder, tie_word_embeddings=False))


def test_the_layout_of_jina_colbert_v2(tmp_path: Path) -> None:
    """Tensors below ``roberta.``, with a pooler that nothing reads, and a projection."""
    folder = make_late_checkpoint(tmp_path / "late", FLASH, "stanford", type_vocab=1)
    width = {"roberta.pooler.dense.weight": (32, 32), "roberta.pooler.dense.bias": (32,)}
    more = {name: np.zeros(shape, np.float32) for name, shape in width.items()}
    with_tensors(folder, lambda tensors: tensors.update(more))
    graph = build(with_config(folder, architectures=["HF_ColBERT"]))
    assert graph.meta.task == "embed_tokens"
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    ids = [7, 12, 9, 30]
    assert FAMILY.answers is not None
    rows, _ = FAMILY.answers(tensors, config, "features", ids)
    wanted = rows @ tensors["linear.weight"].T.astype(np.float64)
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    found = Reference(graph).run("token_embedding", Batch.of([ids]))
    np.testing.assert_allclose(found, wanted, atol=1e-12)


def test_embeddings_of_bge_m3_and_splade(tmp_path: Path) -> None:
    make_m3_checkpoint(tmp_path / "m3", FLASH)
    sparse = make_checkpoint(tmp_path / "sparse", FLASH, "embed_sparse", layers=1, hidden=16, heads=2, splade="relu")
    for folder, task, outputs in (
        (tmp_path / "m3", "embed_m3", {"embedding", "sparse_embedding", "token_embedding"}),
        (sparse, "embed_sparse", {"sparse_embedding"}),
    ):
        assert outputs <= set(build(folder, task).outputs)


def test_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"training needs a model of transformers, and .* other names"):
        need_transformers(open_checkpoint(made(tmp_path, FLASH)), "training")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = made(tmp_path, FLASH)
    with pytest.raises(CheckpointError, match=r"'encoder\.layers\.0\.mixer\.out_proj\.bias' is missing"):
        build(with_tensors(folder, lambda tensors: tensors.pop("encoder.layers.0.mixer.out_proj.bias")))
