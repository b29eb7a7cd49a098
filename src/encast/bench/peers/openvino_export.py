"""A checkpoint as OpenVINO's IR: converted from torch once, quantised by NNCF as its guide for transformers says."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from encast.batch import Batch
from encast.bench.cache import cached, content_hash
from encast.bench.peers.base import ModelFiles
from encast.bench.peers.torch_encoder import load_encoder, quiet, tensors
from encast.bench.peers.transformer import OUTPUT, Encoder, versions
from encast.errors import InputError

__all__ = ["int8_graph", "wide_graph"]


def wide_graph(model: ModelFiles, encoder: Encoder, cache: Path, attention: str) -> Path:
    """The folder of ``model.xml`` with f32 weights, which the plugin narrows when bf16 is asked for.

    ``attention`` is the form in which torch states it (``auto``: transformers' choice); the forms are equally fast.
    """

    def make(folder: Path) -> None:
        openvino: Any = importlib.import_module("openvino")
        given = dict(zip(encoder.inputs, tensors(encoder.example(2, 16)), strict=True))
        with quiet():
            graph = openvino.convert_model(
                load_encoder(model.checkpoint, encoder, None if attention == "auto" else attention),
                example_input=given,
                input=[(name, openvino.PartialShape([-1, -1]), openvino.Type.i64) for name in given],
            )
        graph.outputs[0].get_tensor().set_names({OUTPUT})
        openvino.save_model(graph, folder / "model.xml", compress_to_fp16=False)

    return cached(cache, "openvino", _key(model, "openvino", form="wide", attention=attention), make)


def int8_graph(model: ModelFiles, encoder: Encoder, cache: Path, attention: str, preset: str) -> Path:
    """The folder of NNCF's graph. ``preset``: ``performance`` or ``mixed`` (activations with zero points).

    ``performance`` was 1 to 2 % faster and as accurate: MiniLM's embeddings have a mean cosine of 0.9972 to f32,
    0.9978 with ``mixed``.
    """
    if not model.calibration:
        raise InputError(
            f"{model.name} has no calibration sequences, which NNCF takes the ranges of activations from; use a model "
            "with them"
        )

    def make(folder: Path) -> None:
        openvino: Any = importlib.import_module("openvino")
        nncf: Any = importlib.import_module("nncf")
        wide = openvino.Core().read_model(wide_graph(model, encoder, cache, attention) / "model.xml")
        # One sequence at a time: what stands in padding must not widen a range.
        rows = [encoder.feeds(Batch.of([ids])) for ids in model.calibration]
        graph = nncf.quantize(
            wide,
            nncf.Dataset(rows),
            model_type=nncf.ModelType.TRANSFORMER,
            preset=nncf.QuantizationPreset(preset),
            target_device=nncf.TargetDevice.CPU,
            subset_size=len(rows),
        )
        openvino.save_model(graph, folder / "model.xml", compress_to_fp16=False)

    calibration = content_hash({"sequences": model.calibration})
    key = _key(model, "openvino", "nncf", form="int8", attention=attention, preset=preset, calibration=calibration)
    return cached(cache, "openvino", key, make)


def _key(model: ModelFiles, *packages: str, **settings: Any) -> dict[str, Any]:
    return {"model": model.sha, **settings, **versions("torch", "transformers", *packages)}
