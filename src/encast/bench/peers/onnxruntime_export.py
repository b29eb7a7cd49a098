"""A checkpoint as ONNX graphs for ONNX Runtime: plain, fused by its transformer optimiser, and quantised from that.

Attention is exported in its plain form, the one that the optimiser knows. Static quantisation starts from a graph in
which attention is not fused, because no quantised form of the fused operator takes static scales.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from encast.batch import Batch
from encast.bench.cache import cached, content_hash
from encast.bench.peers.base import ModelFiles
from encast.bench.peers.torch_encoder import import_torch, load_encoder, quiet, tensors
from encast.bench.peers.transformer import OUTPUT, Encoder, Feeds, versions
from encast.errors import InputError

__all__ = ["dynamic_int8_graph", "fused_graph", "plain_graph", "static_int8_graph"]

OPSET = 17
_PACKAGES = ("onnx", "onnxruntime", "torch", "transformers")


def plain_graph(model: ModelFiles, encoder: Encoder, cache: Path) -> Path:
    """The folder of ``model.onnx`` as torch exports it, sequences and length symbolic."""

    def make(folder: Path) -> None:
        torch = import_torch()
        axes = {0: "seqs", 1: "length"}
        with quiet(), torch.inference_mode():
            torch.onnx.export(
                load_encoder(model.checkpoint, encoder, "eager"),
                tensors(encoder.example(2, 16)),
                str(folder / "model.onnx"),
                input_names=list(encoder.inputs),
                output_names=[OUTPUT],
                dynamic_axes=dict.fromkeys((*encoder.inputs, OUTPUT), axes),
                opset_version=OPSET,
                dynamo=False,  # the fusions are written for the graphs of this exporter
            )

    return cached(cache, "onnx", _key(model, form="plain"), make)


def fused_graph(model: ModelFiles, encoder: Encoder, cache: Path, *, attention: bool = True) -> Path:
    """The folder of the optimiser's graph. ``fusions.json`` says what was fused how often."""

    def make(folder: Path) -> None:
        optimizer: Any = importlib.import_module("onnxruntime.transformers.optimizer")
        options = importlib.import_module("onnxruntime.transformers.fusion_options").FusionOptions("bert")
        options.enable_attention = attention
        graph = optimizer.optimize_model(
            str(plain_graph(model, encoder, cache) / "model.onnx"),
            model_type="bert",
            num_heads=encoder.heads,
            hidden_size=encoder.hidden,
            optimization_options=options,
            opt_level=0,
        )
        graph.save_model_to_file(str(folder / "model.onnx"))
        fused = {name: count for name, count in graph.get_fused_operator_statistics().items() if count}
        (folder / "fusions.json").write_text(json.dumps(fused))

    return cached(cache, "onnx", _key(model, form="fused", attention=attention), make)


def dynamic_int8_graph(model: ModelFiles, encoder: Encoder, cache: Path, *, reduce_range: bool) -> Path:
    """s8 weights with a scale a channel; activations are quantised as they come, a scale a tensor.

    ``reduce_range``: weights of 7 bits, for processors whose products of bytes saturate at 16 bits.
    """

    def make(folder: Path) -> None:
        quantisation: Any = importlib.import_module("onnxruntime.quantization")
        quantisation.quantize_dynamic(
            str(fused_graph(model, encoder, cache) / "model.onnx"),
            str(folder / "model.onnx"),
            per_channel=True,
            reduce_range=reduce_range,
            weight_type=quantisation.QuantType.QInt8,
            extra_options={"DefaultTensorType": 1},  # f32, for fused operators that shape inference does not know
        )

    return cached(cache, "onnx", _key(model, form="dynamic", reduce_range=reduce_range), make)


def static_int8_graph(model: ModelFiles, encoder: Encoder, cache: Path, *, reduce_range: bool) -> Path:
    """QDQ: s8 weights with a scale a channel; activations of products with weights u8, ranges seen in calibration."""
    if not model.calibration:
        raise InputError(
            f"{model.name} has no calibration sequences, which static quantisation takes its ranges from; use dynamic "
            "quantisation, or a model with them"
        )

    def make(folder: Path) -> None:
        quantisation: Any = importlib.import_module("onnxruntime.quantization")
        quantisation.quantize_static(
            str(fused_graph(model, encoder, cache, attention=False) / "model.onnx"),
            str(folder / "model.onnx"),
            _reader(quantisation.CalibrationDataReader, encoder, model.calibration),
            quant_format=quantisation.QuantFormat.QDQ,
            op_types_to_quantize=["MatMul"],
            per_channel=True,
            reduce_range=reduce_range,
            activation_type=quantisation.QuantType.QUInt8,
            weight_type=quantisation.QuantType.QInt8,
            calibrate_method=quantisation.CalibrationMethod.MinMax,
            # Products of two activations stay f32: they are a twentieth of the work and lose the most.
            extra_options={"MatMulConstBOnly": True, "DefaultTensorType": 1},
        )

    digest = content_hash({"sequences": model.calibration})
    return cached(cache, "onnx", _key(model, form="static", reduce_range=reduce_range, calibration=digest), make)


def _reader(base: Any, encoder: Encoder, sequences: Sequence[Sequence[int]]) -> Any:
    class Reader(base):  # type: ignore[misc]
        def __init__(self) -> None:
            self._feeds = _batches(encoder, sequences)

        def get_next(self) -> Feeds | None:
            return next(self._feeds, None)

    return Reader()


def _batches(encoder: Encoder, sequences: Sequence[Sequence[int]]) -> Iterator[Feeds]:
    """One sequence at a time: what stands in padding must not widen a range."""
    for ids in sequences:
        yield encoder.feeds(Batch.of([ids]))


def _key(model: ModelFiles, **settings: Any) -> dict[str, Any]:
    return {"model": model.sha, "opset": OPSET, **settings, **versions(*_PACKAGES)}
