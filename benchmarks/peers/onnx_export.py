"""ONNX Runtime's form of a model, as its documentation recommends for a transformer on a CPU: its optimiser's fused
graph and, for int8, dynamic quantisation with a scale a channel.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peers.models import Model, torch_model

__all__ = ["export"]


def export(model: Model, work: Path, dtype: str) -> Path:
    """The path of the f32 or int8 graph; both are made together."""
    packages = ("onnx", "onnxruntime", "torch", "transformers")
    settings = {"model": model.name, **{name: version(name) for name in packages}}
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    folder = work / "onnxruntime" / f"{model.name}-{key}"
    if not (folder / "settings.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _make(model, work, folder)
        (folder / "settings.json").write_text(json.dumps(settings, indent=2) + "\n")  # last: the export is whole
    return folder / f"{dtype}.onnx"


def _make(model: Model, work: Path, folder: Path) -> None:
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers import optimizer

    names = ["input_ids", "attention_mask", *(["token_type_ids"] if model.kind != "distilbert" else [])]
    ones = torch.ones(2, 16, dtype=torch.long)
    given: tuple[Any, ...] = (ones, ones, torch.zeros_like(ones))[: len(names)]
    raw, fused, quantised = (folder / f"{stem}.onnx" for stem in ("raw", "f32", "int8"))
    torch.onnx.export(
        torch_model(model, model.checkpoint(work), "eager"),
        given,
        str(raw),
        input_names=names,
        output_names=["out"],
        dynamic_axes={name: {0: "batch", 1: "length"} for name in (*names, "out")},
        opset_version=17,
        dynamo=False,
    )
    graph = optimizer.optimize_model(
        str(raw), model_type="bert", num_heads=model.heads, hidden_size=model.hidden, opt_level=0
    )
    found = graph.get_fused_operator_statistics()["Attention"]
    if found != model.layers:
        raise SystemExit(f"ONNX Runtime's optimiser fused {found} of {model.layers} attentions of {model.name}")
    graph.save_model_to_file(str(fused))
    quantize_dynamic(
        str(fused),
        str(quantised),
        per_channel=True,
        weight_type=QuantType.QInt8,
        extra_options={"DefaultTensorType": 1},
    )
    raw.unlink()
