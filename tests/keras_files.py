"""Checkpoints with Keras's weights: those that TensorFlow wrote (``golden/keras``), and more in the same form."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import make_checkpoint

__all__ = [
    "ARCHS",
    "GOLDEN",
    "HEADS",
    "HUB_GOLDEN",
    "SMALL",
    "WHOLE",
    "as_preset",
    "as_tf_model",
    "checkpoint_of",
    "compact_names",
    "preset_pair",
    "registered",
    "rewrite",
    "tf_names",
]

GOLDEN = Path(__file__).parent / "golden" / "keras"
HUB_GOLDEN = Path(__file__).parent / "golden" / "keras_hub"
ARCHS = (
    "bert", "distilbert", "roberta", "xlm-roberta", "camembert", "electra", "mpnet", "albert", "deberta-v2",
)  # fmt: skip
"""Those that transformers 4 had for TensorFlow too."""
HEADS = ("features", "classify", "tag", "answer", "fill_mask")
SMALL: dict[str, Any] = {"layers": 1, "hidden": 8, "heads": 2, "vocab": 60}
WHOLE: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "bert-classify": ("bert", "classify", SMALL, "1GB"),
    "albert-fill_mask": ("albert", "fill_mask", {**SMALL, "inner": 12}, "4KB"),
}
"""What TensorFlow wrote whole: architecture, head, options of ``make_checkpoint``, and the size of shards."""


def checkpoint_of(folder: Path, arch: str, head: str, **options: Any) -> Path:
    """The checkpoint of PyTorch."""
    return make_checkpoint(folder / f"{arch}-{head}", arch, head, **options)


def as_tf_model(source: Path, target: Path, names: dict[str, str]) -> Path:
    """The checkpoint ``source`` with its weights in ``tf_model.h5``, at the paths that TensorFlow gave a model with one
    layer; ``names`` is an entry of ``tf_names.json``. Paths that no tensor is for hold zeros, as of an unused pooler.
    """
    import h5py
    from safetensors.numpy import load_file

    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    # transformers saves ALBERT's second name for this bias; the maker of checkpoints does not.
    decoder = {"predictions/decoder/bias:0": tensors.get("predictions.bias", np.zeros(1, "f4"))}
    (target / "model.safetensors").unlink()
    with h5py.File(target / "tf_model.h5", "w") as file:
        for path, name in names.items():
            layers = [0]
            if ".layer.0." in name or name.startswith("layer.0."):
                layers = [i for i in range(99) if name.replace("layer.0.", f"layer.{i}.") in tensors]
            for layer in layers:
                at = path.replace("layer_._0", f"layer_._{layer}")
                if name:
                    tensor = tensors[name.replace("layer.0.", f"layer.{layer}.")]
                else:
                    tensor = next((value for end, value in decoder.items() if at.endswith(end)), np.zeros(1, "f4"))
                file.create_dataset(at, data=tensor.T if path.endswith("kernel:0") else tensor)
    return target


def tf_names() -> dict[str, dict[str, str]]:
    """``ARCHITECTURE-HEAD`` → path of a dataset → the tensor of PyTorch with its values, "" for one that it lacks."""
    stored = json.loads((GOLDEN / "tf_names.json").read_text())
    return {f"{arch}-{head}": _whole_names(names, names[head]) for arch, names in stored.items() for head in HEADS}


def _whole_names(names: dict[str, Any], head: dict[str, Any]) -> dict[str, str]:
    found = {path: name and head["prefix"] + name for path, name in names["shared"].items()} | head["names"]
    return {path.replace("/", f"/{head['model']}/", 1): name for path, name in sorted(found.items())}


_ENCODERS = {"xlm-roberta": "roberta", "camembert": "roberta", "deberta-v2": "deberta"}


def compact_names(table: dict[str, dict[str, str]]) -> dict[str, Any]:
    """What ``tf_names`` gives, with the names that all heads of an architecture have written down once."""
    compact: dict[str, Any] = {}
    for arch in ARCHS:
        heads: dict[str, Any] = {}
        for head in HEADS:
            whole = table[f"{arch}-{head}"]
            (model,) = {path.split("/")[1] for path in whole}
            names = {path.replace(f"/{model}/", "/", 1): name for path, name in whole.items()}
            prefix = "" if head == "features" else f"{_ENCODERS.get(arch, arch)}."
            heads[head] = {"model": model, "prefix": prefix, "names": names}
        first = heads["features"]["names"]
        shared = {
            path: name
            for path, name in first.items()
            if all(of["names"].get(path) == (name and of["prefix"] + name) for of in heads.values())
        }
        for of in heads.values():
            of["names"] = {path: name for path, name in of["names"].items() if path not in shared}
        compact[arch] = {"shared": shared, **heads}
    return compact


_HUB_NAMES = {
    "bert": ("BertBackbone", "BertTextClassifier", "BertTokenizer"),
    "distilbert": ("DistilBertBackbone", "DistilBertTextClassifier", "DistilBertTokenizer"),
    "roberta": ("RobertaBackbone", "RobertaTextClassifier", "RobertaTokenizer"),
}
_BERT_PARTS = {
    "attention.self.query": "_self_attention_layer/query_dense", "output.LayerNorm": "_feedforward_layer_norm",
    "attention.self.key": "_self_attention_layer/key_dense", "output.dense": "_feedforward_output_dense",
    "attention.self.value": "_self_attention_layer/value_dense",
    "attention.output.dense": "_self_attention_layer/output_dense",
    "attention.output.LayerNorm": "_self_attention_layer_norm", "intermediate.dense": "_feedforward_intermediate_dense",
}  # fmt: skip
_DISTILBERT_PARTS = {
    "attention.q_lin": "_self_attention_layer/query_dense", "attention.k_lin": "_self_attention_layer/key_dense",
    "attention.v_lin": "_self_attention_layer/value_dense", "attention.out_lin": "_self_attention_layer/output_dense",
    "sa_layer_norm": "_self_attention_layer_norm", "ffn.lin1": "_feedforward_intermediate_dense",
    "ffn.lin2": "_feedforward_output_dense", "output_layer_norm": "_feedforward_layer_norm",
}  # fmt: skip
_TWO_TABLES = "token_and_position_embedding"


def registered(name: str, /, **config: Any) -> str:
    return json.dumps({"class_name": name, "config": config, "registered_name": f"keras_hub>{name}"})


def as_preset(source: Path, target: Path, *, nested: bool = False) -> Path:
    """The BERT, DistilBERT or RoBERTa in ``source`` as a preset of KerasHub; ``nested``: as KerasNLP wrote it, with the
    backbone in the file of the head too. Of RoBERTa the rows that KerasHub lacks must be zero.
    """
    from safetensors.numpy import load_file

    config = json.loads((source / "config.json").read_text())
    arch, tensors = config["model_type"], load_file(source / "model.safetensors")
    tensors = {name.removeprefix(f"{arch}."): tensor for name, tensor in tensors.items()}
    backbone, head = {}, {}
    distil = arch == "distilbert"
    heads = config["n_heads" if distil else "num_attention_heads"]
    hidden = config["dim" if distil else "hidden_size"]
    layers = config["n_layers" if distil else "num_hidden_layers"]
    for number in range(layers):
        keras = "layers/transformer_encoder" + (f"_{number}" if number else "")
        for name, path in (_DISTILBERT_PARTS if distil else _BERT_PARTS).items():
            at = f"{'transformer' if distil else 'encoder'}.layer.{number}.{name}"
            weight, bias = tensors.pop(f"{at}.weight").T, tensors.pop(f"{at}.bias")
            if path.endswith("output_dense") and "attention" in path:
                weight = weight.reshape(heads, hidden // heads, hidden)
            elif "attention_layer/" in path:
                weight, bias = weight.reshape(hidden, heads, -1), bias.reshape(heads, -1)
            backbone |= {f"{keras}/{path}/vars/0": weight, f"{keras}/{path}/vars/1": bias}
    embeddings = {
        "word_embeddings.weight": f"{_TWO_TABLES}/token_embedding/vars/0",
        "position_embeddings.weight": f"{_TWO_TABLES}/position_embedding/vars/0",
        "LayerNorm.weight": "layer_normalization/vars/0",
        "LayerNorm.bias": "layer_normalization/vars/1",
    }
    if arch == "bert":
        embeddings |= {
            "word_embeddings.weight": "reversible_embedding/vars/0",
            "position_embeddings.weight": "position_embedding/vars/0",
            "token_type_embeddings.weight": "embedding/vars/0",
        }
    for name, path in embeddings.items():
        table = tensors.pop(f"embeddings.{name}")
        backbone[f"layers/{path}"] = table[2:] if arch == "roberta" and name.startswith("position") else table
    if arch == "roberta":
        del tensors["embeddings.token_type_embeddings.weight"]
    rest = {"pooler.dense": "dense"} if arch == "bert" else {}
    outputs = {"classifier": "dense"} if arch == "bert" else {"pre_classifier": "dense", "classifier": "dense_1"}
    if arch == "roberta":
        outputs = {"classifier.dense": "dense", "classifier.out_proj": "dense_1"}
    for into, names in ((backbone, rest), (head, outputs)):
        for name, layer in names.items():
            if f"{name}.weight" in tensors:
                into[f"layers/{layer}/vars/0"] = tensors.pop(f"{name}.weight").T
                into[f"layers/{layer}/vars/1"] = tensors.pop(f"{name}.bias")
    tensors.pop("pooler.dense.weight", None), tensors.pop("pooler.dense.bias", None)  # RoBERTa has none in KerasHub
    assert not tensors, list(tensors)

    backbone_class, classifier, tokenizer = _HUB_NAMES[arch]
    target.mkdir()
    sizes = {
        "vocabulary_size": config["vocab_size"],
        "num_layers": layers,
        "num_heads": heads,
        "hidden_dim": hidden,
        "intermediate_dim": config["hidden_dim" if distil else "intermediate_size"],
        "max_sequence_length": config["max_position_embeddings"] - (2 if arch == "roberta" else 0),
    }
    (target / "config.json").write_text(registered(backbone_class, **sizes))
    _write_h5(target / "model.weights.h5", backbone)
    if head:
        labels = config["num_labels"]
        (target / "task.json").write_text(registered(classifier, num_classes=labels, activation="linear"))
        inner = {f"layers/{arch.replace('distil', 'distil_')}_backbone/{path}": x for path, x in backbone.items()}
        step = {"optimizer/vars/0": np.array(7, "i4")}
        _write_h5(target / "task.weights.h5", {**head, **step, **(inner if nested else {})})
    assets = target / "assets" / "tokenizer"
    assets.mkdir(parents=True)
    settings = {"add_prefix_space": False} if arch == "roberta" else {"lowercase": True, "strip_accents": False}
    (target / "tokenizer.json").write_text(registered(tokenizer, **settings))
    for name, shown in (("vocab.txt", "vocabulary.txt"), ("vocab.json", "vocabulary.json"), ("merges.txt",) * 2):
        if (source / name).exists():
            shutil.copy(source / name, assets / shown)
    return target


def preset_pair(folder: Path, arch: str = "bert", head: str = "classify", **options: Any) -> tuple[Path, Path]:
    """A checkpoint of PyTorch with KerasHub's activation, and the same as a preset; ``options`` are ``as_preset``'s."""
    from safetensors.numpy import load_file, save_file

    activation = "gelu_new" if arch == "bert" else "gelu"
    given = {**SMALL, "layers": 2, "activation": activation, "tokenizer_json": False}
    source = checkpoint_of(folder, arch, head, **given)
    config = json.loads((source / "config.json").read_text())
    labels = len(config.pop("id2label", ()))
    config.pop("label2id", None)
    (source / "config.json").write_text(json.dumps({**config, **({"num_labels": labels} if labels else {})}))
    if arch == "roberta":
        tensors = load_file(source / "model.safetensors")
        for name, tensor in tensors.items():
            if name.endswith("position_embeddings.weight"):
                tensor[:2] = 0
            if name.endswith("token_type_embeddings.weight"):
                tensor[:] = 0
        save_file(tensors, source / "model.safetensors")
    return source, as_preset(source, folder / "preset", **options)


def rewrite(path: Path, name: str | None = None, /, *, inside: tuple[str, ...] = (), **fields: Any) -> None:
    """Changes class and fields of what Keras serialised; ``inside``: that in these fields, each in the one before."""
    whole = json.loads(path.read_text())
    stored = whole
    for field in inside:
        stored = stored["config"][field]
    stored["registered_name"] = f"keras_hub>{name}" if name else stored["registered_name"]
    stored["config"].update(fields)
    path.write_text(json.dumps(whole))


def _write_h5(path: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array
        file.create_group("layers/dropout/vars").attrs["name"] = "dropout"
