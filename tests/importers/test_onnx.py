"""Exports by torch give the artifacts of the checkpoints that they were made of, bit for bit."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from onnx_files import CASES, NEWER, Export, checkpoint_of
from safetensors.numpy import load_file, save_file

from encast.archs import build_graph
from encast.compile import compile
from encast.errors import CheckpointError, EncastError, InputError, UnsupportedModelError
from encast.importers import checkpoint_name, open_checkpoint
from encast.sparsity import Pattern, prune_checkpoint

GOLDEN = Path(__file__).parent.parent / "golden" / "onnx"
IDS = [case.file for case in CASES]
FILES = ("graph.json", "weights.safetensors", "tokenizer.json")


def case_of(file: str) -> Export:
    return next(case for case in CASES if case.file == file)


def pair(tmp_path: Path, case: Export) -> tuple[Path, Path]:
    """The checkpoint, and a folder with its export and all of its files but the weights."""
    checkpoint, exported = tmp_path / "checkpoint", tmp_path / "exported"
    checkpoint_of(case, checkpoint)
    shutil.copytree(checkpoint, exported)
    (exported / "model.safetensors").unlink()
    shutil.copy(GOLDEN / case.file, exported / "model.onnx")
    if case.cut:
        cut_positions(checkpoint, case)
    return checkpoint, exported


def cut_positions(checkpoint: Path, case: Export) -> None:
    """Leaves the positions that an export of a fixed length has."""
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("position_embeddings.weight"))
    save_file({**tensors, name: tensors[name][: case.fixed[1]]}, path)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "max_position_embeddings": case.fixed[1]}))


@pytest.mark.parametrize("case", CASES, ids=IDS)
@pytest.mark.parametrize("dtype", ["f32", "int8"])
def test_the_artifact_is_the_same_bits(tmp_path: Path, case: Export, dtype: str) -> None:
    sources = pair(tmp_path, case)
    made = [
        compile(source, tmp_path / f"{index}.encast", dtype=dtype, strict=True) for index, source in enumerate(sources)
    ]
    for name in FILES:
        assert (made[0] / name).read_bytes() == (made[1] / name).read_bytes(), name


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_sizes_and_heads_follow_from_the_graph_alone(tmp_path: Path, case: Export) -> None:
    checkpoint, _ = pair(tmp_path, case)
    lone = tmp_path / "lone"
    lone.mkdir()
    shutil.copy(GOLDEN / case.file, lone)
    if case.arch in NEWER:
        with pytest.raises(UnsupportedModelError, match=r"no table of positions.*: put the model's config\.json"):
            build_graph(open_checkpoint(lone / case.file))
        return
    wanted, found = build_graph(open_checkpoint(checkpoint)), build_graph(open_checkpoint(lone / case.file))
    if "inner_group" in case.options:
        assert found.meta.arch == "electra"  # ALBERT whose layers share nothing is no other graph
        return
    # Nothing in a graph tells XLM-RoBERTa from RoBERTa.
    same = {"xlm-roberta": "roberta"}
    assert found.meta.arch == same.get(case.arch, case.arch)
    for fact in ("task", "hidden", "layers", "heads", "vocab", "type_vocab", "max_len", "expected"):
        assert getattr(found.meta, fact) == getattr(wanted.meta, fact), fact
    if case.then == ("f16",):  # which has no room for the epsilon of a norm in parts
        assert re.sub(r"eps=\S+", "", str(found)) == re.sub(r"eps=\S+", "", str(wanted))
    else:
        assert str(found) == str(wanted)
    for name, constant in wanted.constants.items():
        assert constant.array.tobytes() == found.constants[name].array.tobytes(), name
    if case.head in ("classify", "tag"):
        assert found.meta.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


def test_a_classifier_has_an_encoder_too(tmp_path: Path) -> None:
    checkpoint, exported = pair(tmp_path, case_of("bert-classify-torchscript-14.onnx"))
    for task in ("features", "embed"):
        made = [
            compile(source, tmp_path / f"{n}-{task}.encast", task=task)
            for n, source in enumerate((checkpoint, exported))
        ]
        assert (made[0] / "weights.safetensors").read_bytes() == (made[1] / "weights.safetensors").read_bytes()
    with pytest.raises(UnsupportedModelError, match="task 'tag' needs a head"):
        build_graph(open_checkpoint(exported), "tag")


def test_pooling_beside_an_encoder(tmp_path: Path) -> None:
    """modules.json of sentence-transformers, where the graph ends with the last hidden state."""
    case = case_of("bert-features-dynamo-18.onnx")
    _, exported = pair(tmp_path, case)
    (exported / "modules.json").write_text(
        json.dumps(
            [
                {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
                {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            ]
        )
    )
    (exported / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (exported / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    graph = build_graph(open_checkpoint(exported))
    assert graph.meta.task == "embed"
    assert next(node.attrs for node in graph.nodes if node.op == "pooling") == {"modes": ["cls"]}


def test_pooling_beside_another_pooling(tmp_path: Path) -> None:
    _, exported = pair(tmp_path, case_of("bert-embed-torchscript-17.onnx"))
    path = next(exported.glob("*_Pooling/config.json"))
    config = json.loads(path.read_text())
    text = path.read_text().replace("pooling_mode_mean_tokens", "X").replace("pooling_mode_cls_token", "Y")
    text = text.replace("X", "pooling_mode_cls_token").replace("Y", "pooling_mode_mean_tokens")
    path.write_text(text if text != json.dumps(config) else json.dumps({**config, "pooling_mode": "cls"}))
    with pytest.raises(CheckpointError, match=r"modules\.json: says pooling, dense layers, normalisation"):
        build_graph(open_checkpoint(exported))


def test_a_dense_layer_beside_another_bias(tmp_path: Path) -> None:
    _, exported = pair(tmp_path, case_of("distilbert-embed-dynamo-18.onnx"))
    path = next(exported.glob("*_Dense/model.safetensors"))
    tensors = load_file(path)
    save_file({**tensors, "linear.bias": tensors["linear.bias"] + 1}, path)
    with pytest.raises(CheckpointError, match=r"dense layer 0 of modules\.json is not that of the exported graph"):
        build_graph(open_checkpoint(exported))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 61),
        ("hidden_size", 64),
        ("num_hidden_layers", 2),
        ("num_attention_heads", 8),
        ("intermediate_size", 41),
        ("max_position_embeddings", 25),
        ("type_vocab_size", 3),
        ("layer_norm_eps", 1e-5),
        ("hidden_act", "relu"),
    ],
)
def test_config_may_not_contradict_the_graph(tmp_path: Path, field: str, value: Any) -> None:
    _, exported = pair(tmp_path, case_of("bert-features-dynamo-18.onnx"))
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(CheckpointError, match=rf"config\.json: {field} is .*, the exported graph has"):
        build_graph(open_checkpoint(exported))


@pytest.mark.parametrize(("field", "value"), [("layer_norm_eps", 1e-5), ("hidden_act", "gelu_new")])
def test_f16_hides_no_contradiction(tmp_path: Path, field: str, value: Any) -> None:
    _, exported = pair(tmp_path, case_of("bert-features-torchscript-11-f16.onnx"))
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(CheckpointError, match=rf"config\.json: {field} is .*, the exported graph has"):
        build_graph(open_checkpoint(exported))


def test_a_gelu_that_an_optimiser_replaced_is_no_secret(tmp_path: Path) -> None:
    case = case_of("bert-fill_mask-torchscript-14-transformers.onnx")
    _, exported = pair(tmp_path, case)
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    with pytest.raises(CheckpointError, match=r"has 'gelu_tanh'.*as O3 and O4 do: write gelu_new for it"):
        build_graph(open_checkpoint(exported))


def test_labels_may_not_contradict_the_graph(tmp_path: Path) -> None:
    _, exported = pair(tmp_path, case_of("bert-classify-torchscript-14.onnx"))
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps({**config, "id2label": {"0": "a", "1": "b"}}))
    with pytest.raises(CheckpointError, match="has 2 labels, the exported graph 3"):
        build_graph(open_checkpoint(exported))


def test_labels_are_no_matter_of_an_encoder(tmp_path: Path) -> None:
    _, exported = pair(tmp_path, case_of("bert-features-dynamo-18.onnx"))
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps({**config, "id2label": {"0": "a", "1": "b", "2": "c"}}))
    assert build_graph(open_checkpoint(exported)).meta.task == "features"


@pytest.mark.parametrize("model_type", ["distilbert", "roberta", "mpnet", "albert", "modernbert", "eurobert", "t5"])
def test_config_may_not_name_another_architecture(tmp_path: Path, model_type: str) -> None:
    _, exported = pair(tmp_path, case_of("bert-features-dynamo-18.onnx"))
    (exported / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(UnsupportedModelError, match=f"graph is none of {model_type}|model_type is 't5'"):
        build_graph(open_checkpoint(exported))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "neobert"}, "neobert"),
        ({"model_type": "xlm-roberta", "position_embedding_type": "rotary"}, "xlm-roberta-flash"),
        ({"model_type": "xlm-roberta", "auto_map": {"AutoConfig": "c.XLMRobertaFlashConfig"}}, "xlm-roberta-flash"),
    ],
)
def test_architectures_without_exports_are_named(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    _, exported = pair(tmp_path, case_of("bert-features-dynamo-18.onnx"))
    (exported / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnsupportedModelError, match=f"of type '{said}', of which no exports are read"):
        build_graph(open_checkpoint(exported))


def test_names_and_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, exported = pair(tmp_path, case_of("bert-features-dynamo-18.onnx"))
    assert checkpoint_name("models/net.onnx") == "net"
    monkeypatch.chdir(exported)
    assert open_checkpoint("model.onnx").export is not None
    with pytest.raises(CheckpointError, match=r"'other\.onnx': no such file; an ONNX file is needed"):
        open_checkpoint("other.onnx")
    with pytest.raises(InputError, match="pruning needs a folder in the Hugging Face layout; this is an ONNX file"):
        prune_checkpoint(exported, tmp_path / "pruned", pattern=Pattern(4, 1), sparsity=0.5)
    shutil.copy("model.onnx", "second.onnx")
    with pytest.raises(CheckpointError, match=r"has 2 ONNX files, 'model\.onnx', 'second\.onnx'; give the one"):
        open_checkpoint(exported)
    assert open_checkpoint("second.onnx").export is not None


def test_files_of_the_hub_lie_above_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, root = pair(tmp_path, case_of("bert-features-dynamo-18.onnx"))
    (root / "onnx").mkdir()
    (root / "model.onnx").rename(root / "onnx" / "model.onnx")
    with pytest.raises(CheckpointError, match=r"no weights; accepted are .*onnx/model\.onnx': give that file"):
        compile(root, tmp_path / "out.encast")
    made = [compile(checkpoint, tmp_path / "a.encast"), compile(root / "onnx" / "model.onnx", tmp_path / "b.encast")]
    for name in FILES:
        assert (made[0] / name).read_bytes() == (made[1] / name).read_bytes(), name
    card = json.loads((made[1] / "card.json").read_text())
    assert {"config.json", "onnx/model.onnx", "tokenizer.json"} <= set(card["source"]["files"])
    monkeypatch.chdir(root / "onnx")
    assert open_checkpoint("model.onnx").config
    (root / "onnx" / "config.json").write_text("{}")
    assert not open_checkpoint("model.onnx").config


def test_other_weights_of_the_folder_come_first(tmp_path: Path) -> None:
    checkpoint, exported = pair(tmp_path, case_of("bert-features-dynamo-18.onnx"))
    shutil.copy(exported / "model.onnx", checkpoint)
    assert open_checkpoint(checkpoint).export is None


def test_a_tokenizer_is_asked_for(tmp_path: Path) -> None:
    _, exported = pair(tmp_path, case_of("bert-features-dynamo-18.onnx"))
    for name in ("tokenizer.json", "vocab.txt"):
        (exported / name).unlink(missing_ok=True)
    with pytest.raises(EncastError, match=r"tokenizer\.json"):
        compile(exported, tmp_path / "out.encast")
    assert not (tmp_path / "out.encast").exists()


def test_provenance_names_the_files(tmp_path: Path) -> None:
    _, exported = pair(tmp_path, case_of("bert-features-dynamo-18.onnx"))
    card = json.loads((compile(exported, tmp_path / "net.encast") / "card.json").read_text())
    assert {"config.json", "model.onnx", "tokenizer.json"} <= set(card["source"]["files"])
