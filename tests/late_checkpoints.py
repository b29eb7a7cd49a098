"""Random checkpoints of token embeddings (ColBERT), in the layouts of PyLate and of stanford-futuredata/ColBERT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import make_checkpoint
from safetensors.numpy import load_file, save_file

__all__ = ["LAYOUTS", "make_late_checkpoint", "projections"]

LAYOUTS = ("pylate", "stanford")
_PREFIXES = {"bert": "bert.", "roberta": "roberta.", "xlm-roberta": "roberta.", "distilbert": "distilbert."}
_PREFIXES["xlm-roberta-flash"] = "roberta."


def make_late_checkpoint(
    folder: Path,
    arch: str = "bert",
    layout: str = "pylate",
    *,
    dims: tuple[int, ...] = (24,),
    attend: bool = False,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Path:
    """A checkpoint whose queries have 12 tokens and documents 20; the markers are the tokens ``q`` and ``d``.

    ``dims``: widths of the dense layers, of which stanford's layout has one. ``attend``: whether the masks that fill a
    query are seen. ``settings``: fields that replace or join those of the layout's file, None for one to leave out.
    ``options``: of ``make_checkpoint``.
    """
    options = {"layers": 2, "hidden": 32, "heads": 2, **options}
    make_checkpoint(folder, arch, "features", **options)
    _add_markers(folder)
    width, weights = options["hidden"], []
    for index, dim in enumerate(dims):
        weights.append((np.random.RandomState(index).randn(dim, width) / width**0.5).astype(np.float32))
        width = dim
    if layout == "pylate":
        _write_pylate(folder, weights, attend, settings or {})
    else:
        _write_stanford(folder, weights[0], _PREFIXES[arch], attend, settings or {})
    return folder


def projections(folder: Path) -> list[np.ndarray[Any, Any]]:
    """The weights of the dense layers of a made checkpoint, ``f32[out, in]``."""
    if (folder / "modules.json").exists():
        return [load_file(path / "model.safetensors")["linear.weight"] for path in sorted(folder.glob("*_Dense"))]
    return [load_file(folder / "model.safetensors")["linear.weight"]]


def _add_markers(folder: Path) -> None:
    """Makes two pieces of the vocabulary the markers ``[Q] `` and ``[D] ``, as PyLate adds them to a tokenizer."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    model = tokenizer["model"]
    vocab = {token: index for index, (token, _) in enumerate(model["vocab"])} if model["type"] == "Unigram" else {
        **model["vocab"]
    }  # fmt: skip
    names = dict(zip(("[Q] ", "[D] "), sorted(vocab, key=vocab.__getitem__)[-2:], strict=True))
    for marker, token in names.items():
        if model["type"] == "Unigram":
            model["vocab"][vocab[token]][0] = marker
        else:
            model["vocab"][marker] = model["vocab"].pop(token)
            # Of byte-level BPE the last pieces are those of the last merges.
            if "merges" in model:
                model["merges"] = [merge for merge in model["merges"] if _merged(merge) != token]
        tokenizer["added_tokens"].append(
            {
                "id": vocab[token], "content": marker, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": True, "special": False,
            }
        )  # fmt: skip
    path.write_text(json.dumps(tokenizer))
    for name in ("vocab.txt", "vocab.json", "merges.txt"):
        (folder / name).unlink(missing_ok=True)


def _merged(merge: Any) -> str:
    return "".join(merge.split(" ") if isinstance(merge, str) else merge)


def _write(path: Path, given: dict[str, Any], settings: Mapping[str, Any]) -> None:
    merged = {**given, **settings}
    path.write_text(json.dumps({name: value for name, value in merged.items() if value is not None}))


def _write_pylate(folder: Path, weights: list[Any], attend: bool, settings: Mapping[str, Any]) -> None:
    modules = [("", "sentence_transformers.models.Transformer")]
    for index, weight in enumerate(weights, 1):
        name = f"{index}_Dense"
        modules.append((name, "pylate.models.Dense.Dense"))
        (folder / name).mkdir(exist_ok=True)
        config = {"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": False}
        config["activation_function"] = "torch.nn.modules.linear.Identity"
        (folder / name / "config.json").write_text(json.dumps(config))
        save_file({"linear.weight": weight}, folder / name / "model.safetensors")
    (folder / "modules.json").write_text(
        json.dumps([{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(modules)])
    )
    # The length that was used last, which PyLate replaces by those below.
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 7, "do_lower_case": False}))
    given = {
        "__version__": {"pytorch": "2.4.0"}, "prompts": {}, "default_prompt_name": None, "similarity_fn_name": "MaxSim",
        "query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 12, "document_length": 20,
        "attend_to_expansion_tokens": attend, "skiplist_words": [".", ",", "!"], "do_query_expansion": True,
    }  # fmt: skip
    _write(folder / "config_sentence_transformers.json", given, settings)


def _write_stanford(folder: Path, weight: Any, prefix: str, attend: bool, settings: Mapping[str, Any]) -> None:
    tensors = {prefix + name: array for name, array in load_file(folder / "model.safetensors").items()}
    save_file({**tensors, "linear.weight": weight}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    given = {
        "query_token_id": "[Q] ", "doc_token_id": "[D] ", "query_token": "[Q]", "doc_token": "[D]", "ncells": None,
        "nbits": 1, "similarity": "cosine", "bsize": 32, "lr": 1e-05, "relu": False, "nway": 64, "query_maxlen": 12,
        "attend_to_mask_tokens": attend, "interaction": "colbert", "dim": weight.shape[0], "doc_maxlen": 20,
        "mask_punctuation": True, "checkpoint": "somewhere", "meta": {"hostname": "somewhere"},
    }  # fmt: skip
    _write(folder / "artifact.metadata", given, settings)
