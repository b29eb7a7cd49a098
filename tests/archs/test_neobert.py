"""NeoBERT: what its config says, field by field, what is refused of it, how its weights are read, and its heads."""

from __future__ import annotations

from collections.abc import Callable
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

import encast
from encast.archs import need_transformers, neobert
from encast.archs.modules import Modules, tensors_of
from encast.batch import Batch
from encast.errors import CheckpointError, InputError, UnsupportedModelError
from encast.importers import open_checkpoint
from encast.ir import Graph, Node
from encast.passes import optimise
from encast.quant import QuantSpec
from encast.sparsity import Pattern, prune_checkpoint

NEO = "neobert"


def nodes(graph: Graph, op: str) -> list[Node]:
    return [node for node in graph.nodes if node.op == op]


# Configs


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rms_norm": False}, UnsupportedModelError, "rms_norm is False.*True"),
        ({"rope": False}, UnsupportedModelError, "rope is False.*True"),
        ({"ngpt": True}, UnsupportedModelError, "ngpt is True.*False"),
        ({"ngpt": 1}, UnsupportedModelError, "ngpt is 1"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act is 'gelu'.*'SwiGLU'"),
        ({"hidden_act": "silu"}, UnsupportedModelError, "hidden_act is 'silu'.*'SwiGLU'"),
        ({"dim_head": 8}, UnsupportedModelError, "dim_head is 8.*4"),
        ({"head_dim": 8}, UnsupportedModelError, "head_dim is 8.*4"),
        ({"rope_theta": 500000.0}, UnsupportedModelError, "rope_theta.*base 10000.*remove"),
        ({"rope_theta": 0}, CheckpointError, "rope_theta is 0; a number above 0"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, UnsupportedModelError, "base 10000.*remove"),
        ({"rope_scaling": {"type": "yarn"}}, UnsupportedModelError, "rope_scaling: type is 'yarn'"),
        ({"rope_parameters": {"rope_theta": 100.0}}, UnsupportedModelError, "base 10000.*remove"),
        ({"position_embedding_type": "absolute"}, UnsupportedModelError, "position_embedding_type is 'absolute'"),
        ({"is_decoder": True}, UnsupportedModelError, "is_decoder is True"),
        ({"norm_eps": 0}, CheckpointError, "norm_eps is 0; a number above 0"),
        ({"norm_eps": None}, CheckpointError, "norm_eps is None; a number above 0"),
        ({"max_length": 0}, CheckpointError, "max_length is 0; an integer from 1"),
        ({"max_length": 1 << 18}, CheckpointError, "max_length is 262144; an integer from 1"),
        ({"intermediate_size": 1}, CheckpointError, "intermediate_size is 1; an integer from 2"),
        ({"num_attention_heads": 8}, UnsupportedModelError, "dim_head is 4.*2"),
        ({"num_attention_heads": 16, "dim_head": ...}, CheckpointError, "16 heads of 1 columns; rotary positions need"),
        ({"num_attention_heads": 3, "dim_head": ...}, CheckpointError, "16 and the number of attention heads 3"),
        ({"auto_map": {"AutoModel": "model.NormNeoBERT"}}, UnsupportedModelError, "auto_map is "),
        ({"auto_map": {"AutoModel": "model.NeoBERTNormed"}}, UnsupportedModelError, "auto_map is "),
        ({"auto_map": {"AutoModel": "modeling_llama.LlamaModel"}}, UnsupportedModelError, "auto_map is "),
        ({"intermediate_size": 96}, CheckpointError, r"w12\.weight' has shape \[48, 16\], the config promises \[128"),
    ],
)
def test_configs_of_neobert(changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        build(with_config(made(tmp_path, NEO, hidden=16, heads=4), **changes))


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "max_length"])
def test_hostile_sizes(field: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {field} is .*an integer from 1 to"):
        build(with_config(made(tmp_path, NEO), **{field: value}))


@pytest.mark.parametrize("field", ["rms_norm", "rope", "ngpt", "hidden_act", "dim_head", "rope_scaling", "auto_map"])
@pytest.mark.parametrize("value", [-1, 1.5, "", [], {"a": []}], ids=repr)
def test_hostile_switches(field: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=field):
        build(with_config(made(tmp_path, NEO), **{field: value}))


def published(**fields: Any) -> dict[str, Any]:
    """The fields of a published config but for sizes."""
    code = "chandar-lab/NeoBERT--model."
    return {
        "architectures": ["NeoBERTLMHead"],
        "auto_map": {
            "AutoConfig": "model.NeoBERTConfig", "AutoModel": "model.NeoBERT",
            "AutoModelForMaskedLM": "model.NeoBERTLMHead",
            "AutoModelForSequenceClassification": f"{code}NeoBERTForSequenceClassification",
        },
        "classifier_init_range": 0.02, "decoder_init_range": 0.02, "dim_head": 4, "embedding_init_range": 0.02,
        "kwargs": {"pretrained_model_name_or_path": "google-bert/bert-base-uncased", "trust_remote_code": True},
        "max_length": 4096, "norm_eps": 1e-05, "torch_dtype": "float32", "transformers_version": "4.48.2", **fields,
    }  # fmt: skip


def test_a_published_config(tmp_path: Path) -> None:
    graph = build(with_config(made(tmp_path, NEO, "fill_mask", hidden=16, heads=4), **published()))
    assert (graph.meta.max_len, graph.meta.task, graph.meta.type_vocab) == (4096, "fill_mask", 0)
    assert {(node.attrs["theta"], node.attrs["rate"]) for node in nodes(graph, "rotary")} == {(10000.0, 1.0)}
    assert {node.attrs["eps"] for node in nodes(graph, "rms_norm")} == {1e-5}


def test_the_config_of_the_training_code(tmp_path: Path) -> None:
    """Switches at the values that the published model has, and the class of GLUE's checkpoints."""
    fields = {"rms_norm": True, "rope": True, "ngpt": False, "hidden_act": "swiglu", "flash_attention": True}
    folder = with_config(made(tmp_path, NEO, "classify", hidden=16, heads=4), **fields, auto_map=...)
    name = "NeoBERTHFForSequenceClassification"
    graph = build(with_config(folder, architectures=[name], auto_map={"AutoModel": f"neobert.model.{name}"}))
    assert graph.meta.task == "classify"


def test_what_a_config_may_leave_out(tmp_path: Path) -> None:
    graph = build(with_config(made(tmp_path, NEO, hidden=16, heads=4), norm_eps=..., max_length=..., dim_head=...))
    assert graph.meta.max_len == 1024
    assert {node.attrs["eps"] for node in nodes(graph, "rms_norm")} == {1e-6}


@pytest.mark.parametrize(
    ("said", "inner"), [(3072, 2048), (100, 72), (2, 8), (12, 8), (13, 8), (4, 8), (5, 8), (37, 24)]
)
def test_inner_columns_are_two_thirds_and_a_multiple_of_eight(said: int, inner: int, tmp_path: Path) -> None:
    graph = build(made(tmp_path, NEO, inner=said))
    assert graph.constants["transformer_encoder.0.ffn.w3.weight"].type.shape == (8, inner)


# Weights


def test_rows_of_queries_keys_and_values(tmp_path: Path) -> None:
    """Counted by hand: two heads of four; each head's own queries, keys and values lie together in the checkpoint."""
    folder = made(tmp_path, NEO, hidden=8, heads=2)
    stored = load_file(folder / "model.safetensors")["transformer_encoder.0.qkv.weight"]
    graph = build(folder)
    rows = {"pairs.query": [0, 2, 1, 3, 12, 14, 13, 15], "pairs.key": [4, 6, 5, 7, 16, 18, 17, 19]}
    rows["heads.value"] = [8, 9, 10, 11, 20, 21, 22, 23]
    for part, wanted in rows.items():
        got = graph.constants[f"transformer_encoder.0.qkv.weight[{part}]"].array
        np.testing.assert_array_equal(got, stored[wanted])


def test_tensors_come_back_from_constants(tmp_path: Path) -> None:
    folder = made(tmp_path, NEO, hidden=24, heads=3)
    stored = load_file(folder / "model.safetensors")
    graph = build(folder)
    tensors = tensors_of({name: one.array for name, one in graph.constants.items()}, heads=3)
    assert set(tensors) == set(stored)
    for name, array in stored.items():
        np.testing.assert_array_equal(tensors[name], array)


def test_both_layouts_of_the_feed_forward_are_one_graph(tmp_path: Path) -> None:
    folder = made(tmp_path / "packed", NEO)
    packed = build(folder)

    def apart(tensors: dict[str, Any]) -> None:
        w1, w2 = np.split(tensors.pop("transformer_encoder.0.ffn.w12.weight"), 2)
        tensors.update({"transformer_encoder.0.ffn.w1.weight": w1, "transformer_encoder.0.ffn.w2.weight": w2})

    split = build(with_tensors(folder, apart))
    arrays = [
        next(graph.constants[node.inputs[1]].array for node in graph.nodes if node.outputs[0] == gate.inputs[0])
        for graph in (packed, split)
        for gate in nodes(graph, "gated_activation")
    ]
    np.testing.assert_array_equal(*arrays)


def _no_heads(self: Modules, name: str, parts: Any, heads: int, size: int, *shape: int, pairs: Any = ()) -> list[str]:
    """All queries, then all keys, then all values, as other models pack them; pairs still moved."""
    rows = self.array(name, 3 * heads * size, *shape).reshape(3, heads, size, *shape)
    moved = rows.reshape(3, heads, size // 2, 2, *shape).swapaxes(2, 3).reshape(rows.shape)
    return [
        self.graph.add_constant(f"{name}[{part}]", (moved if part in pairs else rows)[index].reshape(-1, *shape))
        for index, part in enumerate(parts)
    ]


_read = Modules.parts_of_heads


def _no_pairs(self: Modules, *args: Any, pairs: Any = ()) -> list[str]:
    return _read(self, *args)


def _pairs_of_keys_alone(self: Modules, *args: Any, pairs: Any = ()) -> list[str]:
    return _read(self, *args, pairs=pairs[1:])


def _turned_order(self: Modules, name: str, parts: Any, *args: Any, pairs: Any = ()) -> list[str]:
    names = _read(self, name, (parts[1], parts[0], parts[2]), *args, pairs=pairs)
    return [names[1], names[0], names[2]]


def _values_first(self: Modules, name: str, parts: Any, *args: Any, pairs: Any = ()) -> list[str]:
    made = _read(self, name, (parts[2], *parts[:2]), *args, pairs=pairs)
    return [*made[1:], made[0]]


@pytest.mark.parametrize("wrong", [_no_heads, _no_pairs, _pairs_of_keys_alone, _turned_order, _values_first])
@pytest.mark.parametrize("name", ["neobert-features", "neobert-odd", "neobert-wide"])
def test_rows_read_otherwise_show(
    name: str, wrong: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_case(name, tmp_path_factory)
    monkeypatch.setattr(Modules, "parts_of_heads", wrong)
    assert _excess(opened) > 1.0


@pytest.mark.parametrize("name", ["neobert-features", "neobert-apart"])
def test_a_gate_read_otherwise_shows(
    name: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_case(name, tmp_path_factory)
    monkeypatch.setattr(neobert, "_PACKED", replace(neobert._PACKED, up_first=True))
    monkeypatch.setattr(neobert, "_APART", replace(neobert._APART, inner=("ffn.w2", "ffn.w1")))
    assert _excess(opened) > 1.0


@pytest.mark.parametrize("theta", [9_900.0, 10_100.0])
def test_another_base_shows(
    theta: float, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_case("neobert-features", tmp_path_factory)
    monkeypatch.setattr(neobert, "_THETA", theta)
    assert _excess(opened) > 1.0


def test_another_eps_shows(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    opened = open_case("neobert-features", tmp_path_factory)
    folder = with_config(make_checkpoint(tmp_path / "other", NEO, "features", **opened.case.options), norm_eps=1e-6)
    assert _excess(opened, build(folder)) > 1.0


def _excess(opened: Opened, graph: Graph | None = None) -> float:
    """How far the graph that is built now is off the answers, in the bound of float32 engines."""
    exact, allowed = allowed_difference(opened.graph, opened.output, opened.batch, opened.select)
    allowed = opened.kept(allowed)
    assert largest_excess(opened.golden("f64"), opened.kept(exact), allowed) < 1e-5
    return largest_excess(opened.evaluate(graph or build(opened.folder)), opened.golden("f64"), allowed)


# Fusions, lengths, heads


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
def test_all_that_a_layer_promises_is_fused(dtype: str, tmp_path: Path) -> None:
    graph, report = optimise(build(made(tmp_path, NEO, layers=2, hidden=64)), QuantSpec(dtype), strict=True)
    assert not report.misses
    assert len(nodes(graph, "rms_norm")) == (5 if dtype == "f32" else 1), "the last one, which no product reads"


def test_from_one_token_to_max_length(tmp_path: Path) -> None:
    folder = made(tmp_path, NEO, hidden=320, heads=5, positions=70)
    path = encast.compile(folder, tmp_path / "made.encast", dtype="f32", strict=True)
    graph = build(folder)
    texts = [[index % 50 + 6 for index in range(length)] for length in (1, 70, 69, 2)]
    with encast.load(path, threads=1) as engine:
        got = engine.runnable.run("last_hidden_state", Batch.of(texts))
        with pytest.raises(InputError, match="70"):
            engine.runnable.run("last_hidden_state", Batch.of([[7] * 71]))
    exact, allowed = allowed_difference(graph, "last_hidden_state", Batch.of(texts), elementary=16 * 2.0**-24)
    assert largest_excess(got, exact, allowed) <= 1.0


@pytest.mark.parametrize(
    ("name", "head", "task"),
    [("NeoBERT", "features", "features"), ("NeoBERTModel", "features", "features"),
     ("NeoBERTLMHead", "fill_mask", "fill_mask"), ("NeoBERTForMaskedLM", "fill_mask", "fill_mask"),
     ("NeoBERTForSequenceClassification", "classify", "classify")],
)  # fmt: skip
def test_class_names(name: str, head: str, task: str, tmp_path: Path) -> None:
    assert build(with_config(made(tmp_path, NEO, head), architectures=[name])).meta.task == task


def test_another_class_is_named(tmp_path: Path) -> None:
    folder = with_config(made(tmp_path, NEO), architectures=["NormNeoBERT"])
    with pytest.raises(UnsupportedModelError, match="architectures is 'NormNeoBERT', a head that encast does not have"):
        build(folder)


def test_a_decoder_is_never_tied(tmp_path: Path) -> None:
    """Its code has no such thing, and a config may say what transformers writes by itself."""
    folder = with_config(made(tmp_path, NEO, "fill_mask"), tie_word_embeddings=True)
    assert nodes(build(folder), "linear")[-1].inputs[1:] == ["decoder.weight", "decoder.bias"]
    with pytest.raises(CheckpointError, match=r"'decoder\.weight' is missing"):
        build(with_tensors(folder, lambda tensors: tensors.pop("decoder.weight")))


def test_the_classifier_reads_the_first_token(tmp_path: Path) -> None:
    graph = build(made(tmp_path, NEO, "classify"))
    assert len(nodes(graph, "first_token")) == 1
    assert [node.attrs["kind"] for node in nodes(graph, "activation")] == ["tanh"]


def test_all_embeddings(tmp_path: Path) -> None:
    late = make_late_checkpoint(tmp_path / "late", NEO)
    make_m3_checkpoint(tmp_path / "m3", NEO)
    sparse = make_checkpoint(tmp_path / "sparse", NEO, "embed_sparse", layers=1, hidden=16, heads=2, splade="relu")
    for folder, task in ((late, "embed_tokens"), (tmp_path / "m3", "embed_m3"), (sparse, "embed_sparse")):
        assert build(folder, task).meta.task == task


# Other ways in and out


def test_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"training needs a model of transformers, and .* no NeoBERT"):
        need_transformers(open_checkpoint(made(tmp_path, NEO)), "training")


def test_zeros_lie_in_blocks_where_products_read_them(tmp_path: Path) -> None:
    """The rows of a pair are neighbours in the checkpoint, and lie half a head apart in the product."""
    source = make_checkpoint(tmp_path / "dense", NEO, "features", layers=1, hidden=64, heads=4)
    prune_checkpoint(source, tmp_path / "sparse", pattern=Pattern(4, 1), sparsity=0.75)
    graph = build(tmp_path / "sparse")
    for node in nodes(graph, "linear"):
        zero = graph.constants[node.inputs[1]].array == 0
        blocks = zero.reshape(-1, 4, zero.shape[1])
        assert (blocks.all(axis=1) == blocks.any(axis=1)).all(), node.name
    zero = np.concatenate([graph.constants[node.inputs[1]].array for node in nodes(graph, "linear")[:3]]) == 0
    assert 0.74 < zero.mean() < 0.76
