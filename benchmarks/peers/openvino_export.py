"""OpenVINO's form of a model: converted from torch once, quantised by NNCF as its transformer guide says, kept as IR.

Random-weight models are calibrated on random ids of the lengths that they are timed at, the real MiniLM on texts.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from peers.models import Model, inputs, torch_model

__all__ = ["export"]

SAMPLES = 300
RANDOM_SAMPLES = 24


def export(
    model: Model,
    work: Path,
    dtype: str,
    *,
    texts: list[list[int]] | None,
    attention: str = "sdpa",
    preset: str = "performance",
) -> Path:
    """The IR's path: f32 weights for f32 and bf16 (the plugin narrows them when it loads), NNCF's graph for int8.

    ``texts``: token ids of the texts to calibrate a real model on. ``attention``: the form in which torch states
    attention. ``preset``: NNCF's.
    """
    settings: dict[str, Any] = {
        "model": model.name,
        "attention": attention,
        **{name: version(name) for name in ("openvino", "nncf", "torch", "transformers")},
    }
    if dtype == "int8":
        digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest() if model.real else RANDOM_SAMPLES
        settings |= {"preset": preset, "calibration": digest}
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    kind = "int8" if dtype == "int8" else "f32"
    path = work / "openvino" / f"{model.name}-{kind}-{key}.xml"
    if path.with_suffix(".json").exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    import openvino

    if dtype == "int8":
        wide = openvino.Core().read_model(export(model, work, "f32", texts=texts, attention=attention))
        graph = _quantise(model, wide, texts, preset)
    else:
        graph = _convert(model, work, attention)
    openvino.save_model(graph, path, compress_to_fp16=False)
    path.with_suffix(".json").write_text(json.dumps(settings, indent=2) + "\n")  # last: the export is whole
    return path


def feeds(model: Model, ids: Any, mask: Any) -> dict[str, Any]:
    """What the exported graphs take, by name, in int64 as exporters leave it."""
    given = {"input_ids": ids.astype(np.int64), "attention_mask": mask.astype(np.int64)}
    if model.kind != "distilbert":
        given["token_type_ids"] = np.zeros(ids.shape, np.int64)
    return given


def _convert(model: Model, work: Path, attention: str) -> Any:
    import openvino
    import torch

    example = inputs((2, 16))
    given = {name: torch.from_numpy(array) for name, array in feeds(model, example, np.ones_like(example)).items()}
    graph = openvino.convert_model(
        torch_model(model, model.checkpoint(work), attention),
        example_input=given,
        input=[(name, openvino.PartialShape([-1, -1]), openvino.Type.i64) for name in given],
    )
    graph.outputs[0].get_tensor().set_names({"last_hidden_state"})
    return graph


def _quantise(model: Model, graph: Any, texts: list[list[int]] | None, preset: str) -> Any:
    import nncf

    if model.real:
        if not texts:
            raise SystemExit(f"{model.name} has real weights: texts to calibrate it on are needed (--data)")
        batches = [np.array([ids], np.int32) for ids in texts[:SAMPLES]]
    else:
        lengths = sorted({length for _, length in model.shapes})
        batches = [inputs((1, lengths[index % len(lengths)]), seed=index + 1) for index in range(RANDOM_SAMPLES)]
    data = nncf.Dataset([feeds(model, ids, np.ones_like(ids)) for ids in batches])
    return nncf.quantize(
        graph,
        data,
        model_type=nncf.ModelType.TRANSFORMER,
        preset=nncf.QuantizationPreset(preset),
        target_device=nncf.TargetDevice.CPU,
        subset_size=len(batches),
    )
