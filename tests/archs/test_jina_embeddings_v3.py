"""Jina Embeddings v3 of transformers: what its config says, what is refused of it, both layouts of its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bounds import allowed_difference, largest_excess
from cases import open_case
from test_build_graph import build, made, with_config, with_tensors

import encast
from encast.archs import jina_embeddings_v3, need_transformers
from encast.archs.gated import Rotary
from encast.batch import Batch
from encast.errors import CheckpointError, InputError, UnsupportedModelError
from encast.importers import open_checkpoint
from encast.ir import Graph, Node
from encast.passes import optimise
from encast.quant import QuantSpec

JINA = "jina_embeddings_v3"


def nodes(graph: Graph, op: str) -> list[Node]:
    return [node for node in graph.nodes if node.op == op]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rope_parameters": {"rope_type": "yarn"}}, UnsupportedModelError, "rope_parameters: rope_type is 'yarn'"),
        ({"rope_parameters": {"rope_theta": 0}}, CheckpointError, "rope_theta is 0; a number above 0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, UnsupportedModelError, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, UnsupportedModelError, "rope_type is 'ntk'"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor is 0.5"),
        ({"position_embedding_type": "relative_key"}, UnsupportedModelError, "position_embedding_type is 'relative"),
        ({"hidden_act": "mish"}, UnsupportedModelError, "hidden_act is 'mish'"),
        ({"head_dim": 8}, UnsupportedModelError, "head_dim is 8"),
        ({"num_attention_heads": 16}, CheckpointError, "16 heads of 1 columns; rotary positions need"),
        ({"is_decoder": True}, UnsupportedModelError, "is_decoder is True"),
        ({"layer_norm_eps": 0}, CheckpointError, "layer_norm_eps is 0; a number above 0"),
        ({"type_vocab_size": 0}, CheckpointError, "type_vocab_size is 0; an integer from 1"),
        ({"max_position_embeddings": 1 << 18}, CheckpointError, "max_position_embeddings is 262144; an integer from 1"),
        ({"auto_map": {"AutoModel": "modeling_lora.XLMRobertaLoRA"}}, UnsupportedModelError, "auto_map is "),
    ],
)
def test_what_is_refused(changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        build(with_config(made(tmp_path, JINA, hidden=16, heads=4), **changes))


def test_the_config_of_transformers(tmp_path: Path) -> None:
    """``JinaEmbeddingsV3Config().to_dict()`` but for sizes: its defaults where the file says nothing."""
    fields = {
        "attention_probs_dropout_prob": 0.1, "bos_token_id": 0, "classifier_dropout": None, "eos_token_id": 2,
        "hidden_dropout_prob": 0.1, "initializer_range": 0.02, "layer_norm_eps": ..., "pad_token_id": 1,
        "max_position_embeddings": ..., "hidden_act": ..., "use_cache": True, "tie_word_embeddings": True,
        "rope_parameters": ..., "dtype": "bfloat16",
    }  # fmt: skip
    graph = build(with_config(made(tmp_path, JINA), **fields))
    assert graph.meta.max_len == 8194
    assert {(node.attrs["theta"], node.attrs["rate"]) for node in nodes(graph, "rotary")} == {(20000.0, 1.0)}
    assert {node.attrs["eps"] for node in nodes(graph, "layer_norm")} == {1e-5}
    assert {node.attrs["kind"] for node in nodes(graph, "activation")} == {"gelu"}


@pytest.mark.parametrize("head", ["features", "fill_mask", "tag"])
def test_it_is_the_model_of_its_own_code(head: str, tmp_path: Path) -> None:
    """The tensors of ``xlm-roberta-flash``, under the config of transformers: the same graph."""
    folder = made(tmp_path, "xlm-roberta-flash", head, layers=2, type_vocab=1)
    own = build(folder)
    suffix = {"features": "Model", "fill_mask": "ForMaskedLM", "tag": "ForTokenClassification"}[head]
    fields = {"model_type": JINA, "architectures": [f"JinaEmbeddingsV3{suffix}"]}
    fields |= {"auto_map": ..., "position_embedding_type": ..., "rotary_emb_base": ...}
    other = build(with_config(folder, **fields, rope_parameters={"rope_type": "default", "rope_theta": 500.0}))
    assert [(node.op, dict(node.attrs)) for node in own.nodes] == [(node.op, dict(node.attrs)) for node in other.nodes]
    assert set(own.constants) == set(other.constants)
    for constant in own.constants:
        np.testing.assert_array_equal(own.constants[constant].array, other.constants[constant].array)


def test_training_wants_the_names_of_transformers(tmp_path: Path) -> None:
    need_transformers(open_checkpoint(made(tmp_path, JINA)), "training")
    with pytest.raises(UnsupportedModelError, match=r"training needs .*save_original_format=False"):
        need_transformers(open_checkpoint(made(tmp_path / "flash", JINA, layout="flash")), "training")


def test_two_layouts_in_one_file(tmp_path: Path) -> None:
    folder = made(tmp_path, JINA)
    with_tensors(folder, lambda tensors: tensors.update({"emb_ln.weight": np.ones(8, "f4")}))
    with pytest.raises(CheckpointError, match=r"emb_ln\.bias' is missing"):
        build(folder)


@pytest.mark.parametrize("factor", [0.99, 1.01])
@pytest.mark.parametrize("name", ["jina_embeddings_v3-features", "jina_embeddings_v3-flash"])
def test_another_base_shows(
    name: str, factor: float, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_case(name, tmp_path_factory)
    monkeypatch.setattr(jina_embeddings_v3, "read_rotary", lambda config, theta, size, kinds: Rotary(500.0 * factor))
    exact, allowed = allowed_difference(opened.graph, opened.output, opened.batch, opened.select)
    allowed = opened.kept(allowed)
    assert largest_excess(opened.golden("f64"), opened.kept(exact), allowed) < 1e-5
    assert largest_excess(opened.evaluate(build(opened.folder)), opened.golden("f64"), allowed) > 1.0


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("layout", ["transformers", "flash"])
def test_all_that_a_layer_promises_is_fused(dtype: str, layout: str, tmp_path: Path) -> None:
    graph, report = optimise(
        build(made(tmp_path, JINA, layers=2, hidden=64, layout=layout)), QuantSpec(dtype), strict=True
    )
    assert not report.misses
    assert not nodes(graph, "activation")


def test_from_one_token_to_the_longest(tmp_path: Path) -> None:
    folder = made(tmp_path, JINA, hidden=320, heads=5, positions=70)
    path = encast.compile(folder, tmp_path / "made.encast", dtype="f32", strict=True)
    texts = [[index % 50 + 6 for index in range(length)] for length in (1, 70, 69, 2)]
    with encast.load(path, threads=1) as engine:
        got = engine.runnable.run("last_hidden_state", Batch.of(texts))
        with pytest.raises(InputError, match="70"):
            engine.runnable.run("last_hidden_state", Batch.of([[7] * 71]))
    exact, allowed = allowed_difference(build(folder), "last_hidden_state", Batch.of(texts), elementary=16 * 2.0**-24)
    assert largest_excess(got, exact, allowed) <= 1.0
