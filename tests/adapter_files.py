"""A made checkpoint with adapters beside its weights, in the layout of jina-embeddings-v3."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import make_checkpoint
from safetensors.numpy import load_file, save_file

__all__ = ["ADAPTERS", "INSTRUCTIONS", "RANK", "make_adapted", "merged"]

Array = np.ndarray[Any, Any]
ADAPTERS = ("retrieval.query", "retrieval.passage", "text-matching")
INSTRUCTIONS = {"retrieval.query": "for the ", "retrieval.passage": "that was ", "text-matching": ""}
RANK, ALPHA = 3, 2
_FACTORS = "parametrizations.weight.0"


def make_adapted(folder: Path, head: str = "embed") -> Path:
    """Every weight that Jina's code gives adapters: of linear layers (the pooler's too) and embeddings, no norms."""
    made = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 60, "type_vocab": 1, "seed": 3}
    pooled = {"pooling": ("mean",), "normalize": True} if head == "embed" else {}
    make_checkpoint(folder, "xlm-roberta-flash", head, **made, **pooled)
    stored, rng = load_file(folder / "model.safetensors"), np.random.default_rng(8)
    stored |= {"pooler.dense.weight": np.ones((16, 16), "f4"), "pooler.dense.bias": np.ones(16, "f4")}
    tensors = {}
    for bare, array in stored.items():
        name = f"roberta.{bare}"
        path = name.removesuffix(".weight")
        if name == path or array.ndim != 2:
            tensors[name] = array
            continue
        first, second = (len(ADAPTERS), RANK, array.shape[1]), (len(ADAPTERS), array.shape[0], RANK)
        if "embeddings." in path:
            first, second = (len(ADAPTERS), array.shape[0], RANK), (len(ADAPTERS), RANK, array.shape[1])
        tensors[f"{path}.parametrizations.weight.original"] = array
        for end, shape in (("lora_A", first), ("lora_B", second)):
            tensors[f"{path}.{_FACTORS}.{end}"] = (0.3 * rng.standard_normal(shape)).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["XLMRobertaLoRA"]
    config["auto_map"]["AutoModel"] = "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA"
    config |= {"lora_adaptations": list(ADAPTERS), "lora_rank": RANK, "lora_alpha": ALPHA, "lora_dropout_p": 0.0}
    config |= {"task_instructions": INSTRUCTIONS, "load_trained_adapters": True}
    (folder / "config.json").write_text(json.dumps(config))
    if pooled:
        entries = json.loads((folder / "modules.json").read_text())
        entries[0] |= {"type": "custom_st.Transformer", "kwargs": ["task"]}
        (folder / "modules.json").write_text(json.dumps(entries))
        settings = {"prompts": INSTRUCTIONS, "default_prompt_name": None, "similarity_fn_name": "cosine"}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder


def merged(tensors: Mapping[str, Array], index: int) -> dict[str, Array]:
    """The tensors with one adapter in the weights, in f64, as the model's code adds it: ``B A``, of tables ``A B``."""
    made = {}
    for name, array in tensors.items():
        path, marker, last = name.partition(".parametrizations.weight.")
        if not marker:
            made[name] = array
        elif last == "original":
            first, second = (
                tensors[f"{path}.{_FACTORS}.{end}"][index].astype(np.float64) for end in ("lora_A", "lora_B")
            )
            product = first @ second if "embeddings." in path else second @ first
            made[f"{path}.weight"] = array.astype(np.float64) + product * (ALPHA / RANK)
    return made
