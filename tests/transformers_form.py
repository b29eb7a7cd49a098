"""A made checkpoint as transformers can open it: of layouts and heads that it does not have, one that is the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import Case
from families import FAMILIES
from safetensors.numpy import load_file, save_file

__all__ = ["transformers_form"]

# Model types without this head in transformers: it is that of token classification, by another name.
_WITHOUT_ANSWERS = ("nomic_bert", "gte", "new", *FAMILIES)


def transformers_form(folder: Path, case: Case, place: Path) -> Path:
    """``folder`` itself where transformers opens it as it is, else a copy in the new folder ``place``."""
    own = case.options.get("layout") == "own" or case.arch == "new"
    tagged = case.head == "answer" and case.arch in _WITHOUT_ANSWERS
    if not own and not tagged:
        return folder
    shutil.copytree(folder, place)
    config = json.loads((folder / "config.json").read_text())
    tensors = dict(load_file(folder / "model.safetensors"))
    if own:
        config, tensors = _FORMS[case.arch](config, tensors)
    if tagged:
        config["architectures"] = [config["architectures"][0].replace("QuestionAnswering", "TokenClassification")]
        tensors = {name.replace("qa_outputs", "classifier"): array for name, array in tensors.items()}
    (place / "config.json").write_text(json.dumps(config))
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    return place


Tensors = dict[str, np.ndarray[Any, Any]]


def _nomic(config: Mapping[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """transformers renames the tensors itself, but neither their prefix nor the fields of the config."""
    columns = next(array.shape[0] for name, array in tensors.items() if name.endswith("fc11.weight"))
    rows = next(array.shape[0] for name, array in tensors.items() if name.endswith("word_embeddings.weight"))
    made = {name: config[name] for name in ("architectures", "model_type", "type_vocab_size", "pad_token_id")}
    made |= {name: config[name] for name in ("id2label", "label2id") if name in config}
    made |= {"vocab_size": rows, "intermediate_size": columns, "hidden_size": config["n_embd"]}
    made |= {"num_hidden_layers": config["n_layer"], "num_attention_heads": config["n_head"]}
    made |= {"layer_norm_eps": config["layer_norm_epsilon"], "max_position_embeddings": config["n_positions"]}
    made["hidden_act"] = {"swiglu": "silu", "geglu": "gelu"}[config["activation_function"]]
    made["rope_parameters"] = {"rope_type": "default", "rope_theta": float(config["rotary_emb_base"])}
    named = {name.replace("bert.", "nomic_bert."): array for name, array in tensors.items()}
    if any(name.startswith("cls.") for name in named):
        # Its masked-LM head always has biases.
        named["cls.predictions.transform.dense.bias"] = np.zeros(config["n_embd"], np.float32)
        named["cls.predictions.bias"] = np.zeros(rows, np.float32)
    return made, named


def _new(config: Mapping[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """Its scaled base is another base with all angles divided, which transformers has."""
    made = {name: value for name, value in config.items() if name not in ("auto_map", "rope_theta", "rope_scaling")}
    made["model_type"] = "gte"
    made["architectures"] = [name.replace("New", "Gte") for name in config["architectures"]]
    theta, scaling = float(config["rope_theta"]), config["rope_scaling"]
    made["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    if scaling is not None:
        size, factor = config["hidden_size"] // config["num_attention_heads"], float(scaling["factor"])
        divisor = factor ** (2.0 / size)
        made["rope_parameters"] = {"rope_type": "linear", "rope_theta": theta * factor, "factor": divisor}
    words = {f"attention.{part}_proj": f"self_attn.{part}_proj" for part in "qkv"}
    named = {}
    for name, array in tensors.items():
        new = name.replace("new.", "gte.")
        for old, word in words.items():
            new = new.replace(old, word)
        named[new] = array
    return made, named


_FORMS = {"nomic_bert": _nomic, "new": _new}
