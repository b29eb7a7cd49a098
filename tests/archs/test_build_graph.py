"""What ``build_graph`` accepts, what it says of what it built, and what it refuses, naming the field or tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import CASES, open_case
from checkpoints import ARCHS, make_checkpoint
from safetensors.numpy import load_file, save_file

from encast.archs import TASKS, build_graph, model_types
from encast.archs.config import Config
from encast.backends.reference import Reference
from encast.batch import Batch
from encast.errors import CheckpointError, EncastError, UnsupportedModelError
from encast.importers import open_checkpoint
from encast.ir import OPS, FusionPromise, Graph, GraphMeta, Node, verify
from encast.ir.meta import HEADS
from encast.passes import optimise
from encast.quant import QuantSpec

Array = np.ndarray[Any, Any]


def made(folder: Path, arch: str = "bert", head: str = "features", **options: Any) -> Path:
    return make_checkpoint(folder / "checkpoint", arch, head, **{"layers": 1, "hidden": 8, "heads": 2, **options})


def with_config(folder: Path, **changes: Any) -> Path:
    """Changes fields of config.json; ``...`` removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return folder


def with_tensors(folder: Path, change: Callable[[dict[str, Array]], object]) -> Path:
    path = folder / "model.safetensors"
    tensors = {name: array.copy() for name, array in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)
    return folder


def build(folder: Path, task: str | None = None) -> Graph:
    return build_graph(open_checkpoint(folder), task)


# What was built


def test_every_architecture_is_registered() -> None:
    assert set(model_types()) == set(ARCHS)


@pytest.mark.parametrize("name", CASES)
def test_graphs_are_plain_and_say_what_they_are(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    opened = open_case(name, tmp_path_factory)
    graph, case = opened.graph, opened.case
    verify(graph)
    assert all(OPS[node.op].plain for node in graph.nodes)
    assert all(node.attrs["activation"] == "none" for node in graph.nodes if node.op == "linear")
    meta = graph.meta
    assert GraphMeta.from_json(json.loads(json.dumps(meta.to_json()))) == meta
    assert (meta.arch, meta.task) == (case.arch, case.head)
    layers = case.options.get("layers", 3) * case.options.get("inner_group", 1)
    assert meta.layers == layers
    assert [node.layer for node in graph.nodes if node.op == "softmax"] == list(range(layers))
    assert ("token_type_ids" in graph.inputs) == (meta.type_vocab > 0)
    assert ("select" in graph.inputs) == (case.head == "fill_mask")
    assert set(graph.outputs) == {"last_hidden_state"} | {(HEADS[case.head] or ("last_hidden_state",))[0]}
    labels = 2 if case.head == "answer" else case.options.get("labels", 3)
    if case.head in ("classify", "tag"):
        assert meta.labels == tuple(f"label {index}" for index in range(labels))
        assert graph.type_of(graph.outputs["logits"]).shape[1] == labels
    else:
        assert meta.labels is None


def _reads_private_sum(graph: Graph, norm: Node) -> bool:
    maker = graph.producer(norm.inputs[0])
    return maker is not None and maker.op == "add" and len(graph.users(norm.inputs[0])) == 1


@pytest.mark.parametrize("name", CASES)
def test_expected_fusions_are_those_that_the_nodes_allow(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    graph = open_case(name, tmp_path_factory).graph
    expected = graph.meta.expected

    def count(op: str, layer: bool) -> int:
        return sum(node.op == op and (node.layer >= 0) == layer for node in graph.nodes)

    layers = graph.meta.layers
    assert expected["qkv"] == FusionPromise(1, 0)
    assert expected["attention"] == FusionPromise(count("softmax", True) // layers, 0)
    # A norm takes a sum in that nobody else reads; the sum of the embeddings is another fusion.
    taking = [
        node.layer >= 0
        for node in graph.nodes
        if node.op == "layer_norm" and not node.name.startswith("embeddings.") and _reads_private_sum(graph, node)
    ]
    assert expected["add_layer_norm"] == FusionPromise(taking.count(True) // layers, taking.count(False))
    # Words that go into the layers as they are have no norm to be taken in.
    words = {node.outputs[0] for node in graph.nodes if node.op == "embedding"}
    bare = any(node.op == "rms_norm" and node.inputs[0] in words for node in graph.nodes)
    assert expected["embed_layer_norm"] == FusionPromise(0, int(not bare))
    assert expected["linear_activation"] == FusionPromise(
        count("activation", True) // layers, count("activation", False)
    )
    for node in graph.nodes:
        if node.op == "activation":
            assert (producer := graph.producer(node.inputs[0])) is not None
            assert producer.op == "linear"


@pytest.mark.parametrize(
    ("arch", "positions", "longest"), [("bert", 48, 48), ("roberta", 48, 46), ("mpnet", 48, 46), ("camembert", 20, 18)]
)
def test_longest_sequence_runs_and_one_more_is_refused(arch: str, positions: int, longest: int, tmp_path: Path) -> None:
    graph = build(made(tmp_path, arch, positions=positions))
    assert graph.meta.max_len == longest
    got = Reference(graph).run("last_hidden_state", Batch.of([[7] * longest]))
    assert got.shape == (longest, 8)
    with pytest.raises(EncastError, match=f"at most {longest}"):
        Reference(graph).run("last_hidden_state", Batch.of([[7] * (longest + 1)]))


def test_names_are_the_same_with_and_without_a_head(tmp_path: Path) -> None:
    bare, headed = build(made(tmp_path / "a")), build(made(tmp_path / "b", head="tag"))
    assert set(bare.constants) < set(headed.constants)
    assert set(headed.constants) - set(bare.constants) == {"classifier.weight", "classifier.bias"}


def test_shared_layers_share_their_constants(tmp_path: Path) -> None:
    graph = build(made(tmp_path, "albert", layers=5))
    assert sum("query.weight" in name for name in graph.constants) == 1
    assert sum(node.name.endswith("query") for node in graph.nodes) == 5


def test_a_tied_decoder_is_the_word_table(tmp_path: Path) -> None:
    def copy_decoder(tensors: dict[str, Array]) -> None:
        tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]

    for folder in (made(tmp_path / "a", head="fill_mask"), made(tmp_path / "b", head="fill_mask")):
        graph = build(folder)
        assert graph.nodes[-1].inputs[1] == "embeddings.word_embeddings.weight"
        with_tensors(folder, copy_decoder)
        assert build(folder).nodes[-1].inputs[1] == "embeddings.word_embeddings.weight"


def test_a_decoder_of_its_own_wins_over_the_tie(tmp_path: Path) -> None:
    folder = with_config(made(tmp_path, head="fill_mask", tied=False), tie_word_embeddings=True)
    assert build(folder).nodes[-1].inputs[1:] == ["cls.predictions.decoder.weight", "cls.predictions.decoder.bias"]


def test_one_token_type_is_folded_into_the_positions(tmp_path: Path) -> None:
    folder = made(tmp_path, "roberta")
    tensors = load_file(folder / "model.safetensors")
    graph, _ = optimise(build(folder), QuantSpec("f32"), strict=True)
    assert "token_type_ids" not in graph.inputs
    (embed,) = [node for node in graph.nodes if node.op == "embed_layer_norm"]
    wanted = tensors["embeddings.position_embeddings.weight"] + tensors["embeddings.token_type_embeddings.weight"]
    np.testing.assert_array_equal(graph.constants[embed.inputs[3]].array, wanted)


def test_config_of_2019_without_model_type(tmp_path: Path) -> None:
    assert build(with_config(made(tmp_path), model_type=...)).meta.arch == "bert"


def test_buffers_and_unused_heads_may_stay_unread(tmp_path: Path) -> None:
    def add(tensors: dict[str, Array]) -> None:
        tensors["embeddings.position_ids"] = np.arange(48)[None]
        tensors["cls.seq_relationship.weight"] = np.ones((2, 8), np.float32)

    build(with_tensors(made(tmp_path), add))


@pytest.mark.parametrize("model", ["TFBertModel", "FlaxBertModel", "BertModel"])
def test_class_names_of_other_frameworks(model: str, tmp_path: Path) -> None:
    assert build(with_config(made(tmp_path), architectures=[model])).meta.task == "features"


# Tasks


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head", ["features", "classify", "tag", "answer", "fill_mask"])
def test_a_task_without_its_head_is_refused(arch: str, head: str, tmp_path: Path) -> None:
    folder = made(tmp_path, arch, head)
    assert build(folder).meta.task == head
    for task in TASKS:
        if task in ("features", "embed", head) or (task, head) == ("embed_sparse", "fill_mask"):
            assert build(folder, task).meta.task == task
        else:
            with pytest.raises(UnsupportedModelError, match=f"task '{task}' needs a head"):
                build(folder, task)


@pytest.mark.parametrize("head", ["classify", "answer", "fill_mask"])
def test_a_promised_head_that_is_missing_is_named(head: str, tmp_path: Path) -> None:
    folder = made(tmp_path, "roberta", head)
    bare = with_tensors(folder, lambda t: [t.pop(name) for name in list(t) if not name.startswith("roberta.")])
    with pytest.raises(CheckpointError, match=r"tensor '\w+\.[\w.]*weight' is missing"):
        build(bare)
    with pytest.raises(UnsupportedModelError, match=f"task '{head}' needs a head"):
        build(bare, head)


def test_heads_that_encast_does_not_have(tmp_path: Path) -> None:
    folder = with_config(made(tmp_path), architectures=["BertForMultipleChoice"])
    with pytest.raises(UnsupportedModelError, match=r"BertForMultipleChoice.*'ForMaskedLM'.*task 'features'"):
        build(folder)
    assert build(folder, "features").meta.task == "features"


def test_an_unknown_task(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no task is named 'summarise'.*'fill_mask'"):
        build(made(tmp_path), "summarise")


def test_modules_decide_the_task(tmp_path: Path) -> None:
    graph = build(made(tmp_path, head="embed", pooling=("cls", "mean"), normalize=True))
    assert graph.meta.task == "embed"
    assert str(graph.type_of(graph.outputs["embedding"])) == "f32[seqs, 16]"


# Configs that ask for what is not there, or lie


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("position_embedding_type", "relative_query"),
        ("is_decoder", True),
        ("add_cross_attention", True),
        ("is_encoder_decoder", True),
        ("pruned_heads", {"0": [1]}),
        ("quantization_config", {"quant_method": "gptq"}),
        ("auto_map", {"AutoModel": "modeling_mine.Model"}),
        ("hidden_act", "gelu_10"),
        ("hidden_act", "quick_gelu"),
        ("hidden_act", "linear"),
        ("hidden_act", None),
        ("model_type", "deberta"),
        ("model_type", "xlm-roberta-xl"),
    ],
)
def test_other_arithmetic_is_refused_by_name(field: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"config\.json: {field} is "):
        build(with_config(made(tmp_path), **{field: value}))


def test_other_arithmetic_of_one_architecture(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"relative_attention_num_buckets is 64.*32"):
        build(with_config(made(tmp_path / "a", "mpnet"), relative_attention_num_buckets=64))
    with pytest.raises(UnsupportedModelError, match="activation is 'mish'"):
        build(with_config(made(tmp_path / "b", "distilbert"), activation="mish"))
    with pytest.raises(UnsupportedModelError, match="problem_type is 'ranking'"):
        build(with_config(made(tmp_path / "c", head="classify"), problem_type="ranking"))


HOSTILE = [-1, 0, 1.5, 10**9, 10**30, "12", True, None, [], {}]


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
@pytest.mark.parametrize(
    "field",
    [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
        "type_vocab_size",
    ],
)
def test_hostile_sizes_are_refused_by_name(field: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {field} is .*an integer from 1 to"):
        build(with_config(made(tmp_path), **{field: value}))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"]
)
def test_missing_sizes_are_named(arch: str, field: str, tmp_path: Path) -> None:
    names = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
    }
    name = names.get(field, field) if arch == "distilbert" else field
    with pytest.raises(CheckpointError, match=rf"config\.json: {name} is missing"):
        build(with_config(made(tmp_path, arch), **{name: ...}))


@pytest.mark.parametrize("value", [0.0, -1e-12, 2.0, "1e-12", 0, None, True], ids=repr)
def test_hostile_eps_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"layer_norm_eps is .*a number above 0"):
        build(with_config(made(tmp_path), layer_norm_eps=value))


def test_an_integer_may_be_an_eps(tmp_path: Path) -> None:
    graph = build(with_config(made(tmp_path), layer_norm_eps=1))
    assert {node.attrs["eps"] for node in graph.nodes if node.op == "layer_norm"} == {1.0}


@pytest.mark.parametrize("arch", ARCHS)
def test_sizes_that_kernels_do_not_have_are_refused_before_anything_is_written(arch: str, tmp_path: Path) -> None:
    name = "hidden_dim" if arch == "distilbert" else "intermediate_size"
    # NeoBERT has two thirds of what its config says.
    with pytest.raises(UnsupportedModelError, match=r"(196608|131072) inner ones"):
        build(with_config(made(tmp_path, arch), **{name: 3 << 16}))
    heads, hidden = ("n_heads", "dim") if arch == "distilbert" else ("num_attention_heads", "hidden_size")
    with pytest.raises(UnsupportedModelError, match="1 heads of 1025 columns"):
        build(with_config(made(tmp_path, arch), **{heads: 1, hidden: 1025, name: 2}))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_have(value: float) -> None:
    config = Config({"layer_norm_eps": value, "hidden_size": value}, "config.json")
    with pytest.raises(CheckpointError, match="layer_norm_eps is "):
        config.eps("layer_norm_eps", 1e-12)
    with pytest.raises(CheckpointError, match="hidden_size is "):
        config.count("hidden_size")


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        ("bert", {"num_attention_heads": 3}, "hidden size is 8 and the number of attention heads 3"),
        ("albert", {"num_hidden_groups": 2}, "num_hidden_groups is 2; an integer from 1 to 1"),
        ("albert", {"num_hidden_layers": 1024, "inner_group_num": 1024}, "more than 1024 layers"),
        ("roberta", {"pad_token_id": -1}, "pad_token_id is -1"),
        ("roberta", {"pad_token_id": None}, "pad_token_id is None"),
        ("distilbert", {"hidden_size": 9}, "dim is 8 and hidden_size is 9, two spellings"),
        ("bert", {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ("bert", {"model_type": 7}, "model_type is 7; a string"),
    ],
)
def test_contradictions_in_a_config(arch: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        build(with_config(made(tmp_path, arch, "fill_mask"), **changes))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"0": "a", "2": "b", "3": "c"}, "keys of id2label must be 0 to 2"),
        ({"0": "a", "1": 2, "2": "c"}, "must map indices to strings"),
        (["a", "b", "c"], "must map indices to strings"),
        ({}, "id2label is empty"),
        ({"0": "a", "1": "b"}, r"'classifier.weight' has shape \[3, 8\], the config promises \[2, 8\]"),
    ],
)
def test_labels_that_do_not_fit(labels: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        build(with_config(made(tmp_path, head="classify"), id2label=labels))


def test_labels_without_names_are_numbered(tmp_path: Path) -> None:
    graph = build(with_config(made(tmp_path, head="classify"), id2label=..., num_labels=3))
    assert graph.meta.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


def test_one_label_cannot_be_a_softmax(tmp_path: Path) -> None:
    folder = made(tmp_path, head="classify", labels=1, problem_type="single_label_classification")
    with pytest.raises(CheckpointError, match="softmax is always 1"):
        build(folder)


# Tensors


@pytest.mark.parametrize("arch", ARCHS)
def test_every_missing_tensor_is_named(arch: str, tmp_path: Path) -> None:
    folder = made(tmp_path, arch, "tag")
    original = (folder / "model.safetensors").read_bytes()
    for name in load_file(folder / "model.safetensors"):
        (folder / "model.safetensors").write_bytes(original)
        with_tensors(folder, lambda tensors, name=name: tensors.pop(name))  # type: ignore[misc]
        with pytest.raises(CheckpointError, match=rf"tensor '{name}' is missing; the config promises it with"):
            build(folder)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_misshapen_tensor_is_named(arch: str, tmp_path: Path) -> None:
    folder = made(tmp_path, arch, "answer")
    original = (folder / "model.safetensors").read_bytes()
    for name, array in load_file(folder / "model.safetensors").items():
        (folder / "model.safetensors").write_bytes(original)
        longer = np.concatenate([array, array[:1]])
        with_tensors(folder, lambda tensors, name=name, longer=longer: tensors.update({name: longer}))  # type: ignore[misc]
        with pytest.raises(CheckpointError, match=rf"'{name}' has shape \[{longer.shape[0]}.*the config promises"):
            build(folder)


@pytest.mark.parametrize(
    "extra", ["encoder.layer.1.output.dense.weight", "encoder.layer.0.crossattention.weight", "adapter"]
)
def test_extra_tensors_are_named(extra: str, tmp_path: Path) -> None:
    folder = with_tensors(made(tmp_path), lambda tensors: tensors.update({extra: np.ones((8, 16), np.float32)}))
    with pytest.raises(CheckpointError, match=rf"1 tensors have no place.*'{extra}' \[8, 16\]"):
        build(folder)


def test_fewer_layers_than_tensors_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"16 tensors have no place.*encoder\.layer\.1\..*num_hidden_layers"):
        build(with_config(made(tmp_path, layers=2), num_hidden_layers=1))


def test_both_spellings_of_a_norm_are_one_too_many(tmp_path: Path) -> None:
    def both(tensors: dict[str, Array]) -> None:
        tensors["embeddings.LayerNorm.gamma"] = np.ones(8, np.float32)

    with pytest.raises(CheckpointError, match=r"embeddings\.LayerNorm\.gamma"):
        build(with_tensors(made(tmp_path), both))


def test_a_prefix_of_another_architecture_is_hinted_at(tmp_path: Path) -> None:
    def rename(tensors: dict[str, Array]) -> None:
        for name in list(tensors):
            tensors["model." + name] = tensors.pop(name)

    with pytest.raises(CheckpointError, match=r"the file has 'model\.embeddings\.word_embeddings\.weight'"):
        build(with_tensors(made(tmp_path), rename))
