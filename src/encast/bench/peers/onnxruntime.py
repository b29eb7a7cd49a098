"""ONNX Runtime on a CPU: the plain export, its transformer optimiser's graph, dynamic and static int8; and on a GPU.

It has no bf16 products for x86.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from encast.bench.peers.base import OUTPUT, Feeds, PaddedPeer, States
from encast.bench.peers.pytorch import import_torch, load_encoder, quiet, tensors
from encast.errors import ResourceError, install_hint

__all__ = ["OnnxRuntime", "OnnxRuntimeOnCard"]

_OPSET = 17
_MODEL, _FUSIONS = "model.onnx", "fusions.json"


class OnnxRuntime(PaddedPeer):
    """Options: ``graph`` of f32 (plain or fused), ``quantisation`` of int8 (dynamic or static).

    Attention is exported in its plain form, the one that the optimiser knows. Static quantisation starts from a graph
    in which attention is not fused, because no quantised form of the fused operator takes static scales.
    """

    name = "ONNX Runtime"
    dtypes = ("f32", "int8")
    modules = ("onnxruntime",)
    needs = ("onnx", "onnxscript", "torch", "transformers")
    extra = "bench-onnxruntime"
    accepted: ClassVar = {"graph": ("fused", "plain"), "quantisation": ("dynamic", "static")}
    provider = "CPUExecutionProvider"
    provider_options: ClassVar[Mapping[str, str]] = {}

    def converted(self) -> Path:
        if self.dtype == "f32":
            return self._plain() if self.settings["graph"] == "plain" else self._fused()
        return self._dynamic() if self.settings["quantisation"] == "dynamic" else self._static()

    def open(self) -> None:
        runtime: Any = importlib.import_module("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.execution_mode = runtime.ExecutionMode.ORT_SEQUENTIAL
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.log_severity_level = 3  # what it fused itself, and could not, is no error
        providers = [(self.provider, self.provider_options)]
        self._session = runtime.InferenceSession(str(self.converted()), options, providers=providers)
        if (first := self._session.get_providers()[0]) != self.provider:  # it falls back with a warning
            raise ResourceError(f"{self.name}: {self.provider} does not start here, and {first} would take its place")

    def prepare(self, feeds: Feeds) -> States:
        run = self._session.run
        return lambda: run(None, feeds)[0]

    def facts(self) -> Mapping[str, Any]:
        options = self._session.get_session_options()
        facts: dict[str, Any] = {
            "version": importlib.import_module("onnxruntime").__version__,
            "threads": options.intra_op_num_threads,
            "interop_threads": options.inter_op_num_threads,
        }
        if self.dtype == "int8":
            facts |= {"quantisation": self.settings["quantisation"], "reduce_range": _saturates()}
        else:
            facts["graph"] = self.settings["graph"]
        fusions = self.converted().with_name(_FUSIONS)
        return {**facts, "fused": json.loads(fusions.read_text())} if fusions.exists() else facts

    def close(self) -> None:
        del self._session

    def _graph(self, form: str, make: Callable[[Path], None], **settings: Any) -> Path:
        packages = ("onnx", "onnxruntime", "torch", "transformers")
        return self.kept("onnx", make, packages, opset=_OPSET, form=form, **settings) / _MODEL

    def _plain(self) -> Path:
        """As torch exports it, sequences and length symbolic."""

        def make(folder: Path) -> None:
            torch, names = import_torch(), self.encoder.inputs
            with quiet(), torch.inference_mode():
                torch.onnx.export(
                    load_encoder(self.model.checkpoint, self.encoder, "eager"),
                    tensors(self.encoder.example(2, 16)),
                    str(folder / _MODEL),
                    input_names=list(names),
                    output_names=[OUTPUT],
                    dynamic_axes={name: {0: "seqs", 1: "length"} for name in (*names, OUTPUT)},
                    opset_version=_OPSET,
                    dynamo=False,  # the fusions are written for the graphs of this exporter
                )

        return self._graph("plain", make)

    def _fused(self, *, attention: bool = True) -> Path:
        """The optimiser's graph. ``fusions.json`` beside it says what was fused how often."""

        def make(folder: Path) -> None:
            optimizer: Any = importlib.import_module("onnxruntime.transformers.optimizer")
            options = importlib.import_module("onnxruntime.transformers.fusion_options").FusionOptions("bert")
            options.enable_attention = attention
            graph = optimizer.optimize_model(
                str(self._plain()),
                model_type="bert",
                num_heads=self.encoder.heads,
                hidden_size=self.encoder.hidden,
                optimization_options=options,
                opt_level=0,
            )
            graph.save_model_to_file(str(folder / _MODEL))
            fused = {name: count for name, count in graph.get_fused_operator_statistics().items() if count}
            (folder / _FUSIONS).write_text(json.dumps(fused))

        return self._graph("fused", make, attention=attention)

    def _dynamic(self) -> Path:
        """s8 weights with a scale a channel; activations are quantised as they come, a scale a tensor."""

        def make(folder: Path) -> None:
            quantisation: Any = importlib.import_module("onnxruntime.quantization")
            fused = self._fused()
            quantisation.quantize_dynamic(
                str(fused),
                str(folder / _MODEL),
                per_channel=True,
                reduce_range=_saturates(),
                weight_type=quantisation.QuantType.QInt8,
                extra_options={"DefaultTensorType": 1},  # f32, for fused operators that shape inference does not know
            )
            shutil.copy(fused.with_name(_FUSIONS), folder)

        return self._graph("dynamic", make, reduce_range=_saturates())

    def _static(self) -> Path:
        """QDQ: s8 weights with a scale a channel; u8 activations of products with weights, their ranges calibrated."""

        def make(folder: Path) -> None:
            quantisation: Any = importlib.import_module("onnxruntime.quantization")
            texts, fused = iter(self.calibration_feeds()), self._fused(attention=False)

            class Reader(quantisation.CalibrationDataReader):  # type: ignore[misc]
                def get_next(self) -> Feeds | None:
                    return next(texts, None)

            quantisation.quantize_static(
                str(fused),
                str(folder / _MODEL),
                Reader(),
                quant_format=quantisation.QuantFormat.QDQ,
                op_types_to_quantize=["MatMul"],
                per_channel=True,
                reduce_range=_saturates(),
                activation_type=quantisation.QuantType.QUInt8,
                weight_type=quantisation.QuantType.QInt8,
                calibrate_method=quantisation.CalibrationMethod.MinMax,
                # Products of two activations stay f32: they are a twentieth of the work and lose the most.
                extra_options={"MatMulConstBOnly": True, "DefaultTensorType": 1},
            )
            shutil.copy(fused.with_name(_FUSIONS), folder)

        return self._graph("static", make, reduce_range=_saturates(), calibration=self.calibration_digest())


class OnnxRuntimeOnCard(OnnxRuntime):
    """With its CUDA provider: the optimiser's graph, for f16 narrowed by the optimiser too. In and out are i64 and f32
    on the host."""

    dtypes = ("f32", "f16")
    extra = "bench-onnxruntime-cuda"
    accepted: ClassVar = {"device": ("cuda",)}
    provider = "CUDAExecutionProvider"
    provider_options: ClassVar[Mapping[str, str]] = {"use_tf32": "0"}  # it is f32 then, as the others' is

    @classmethod
    def missing(cls) -> str | None:
        if (why := super().missing()) is not None:
            return why
        if cls.provider not in importlib.import_module("onnxruntime").get_available_providers():
            return f"this onnxruntime has no {cls.provider}; in an environment without it, {install_hint(cls.extra)}"
        return None

    def open(self) -> None:
        # Those that pip has installed, which nothing else has loaded in this process.
        importlib.import_module("onnxruntime").preload_dlls()
        super().open()

    def converted(self) -> Path:
        return self._fused() if self.dtype == "f32" else self._f16()

    def _f16(self) -> Path:
        def make(folder: Path) -> None:
            onnx: Any = importlib.import_module("onnx")
            model: Any = importlib.import_module("onnxruntime.transformers.onnx_model").OnnxModel
            fused = self._fused()
            graph = model(onnx.load(str(fused)))
            graph.convert_float_to_float16(keep_io_types=True)
            graph.save_model_to_file(str(folder / _MODEL))
            shutil.copy(fused.with_name(_FUSIONS), folder)

        return self._graph("f16", make)

    def facts(self) -> Mapping[str, Any]:
        version = importlib.import_module("onnxruntime").__version__
        fused = json.loads(self.converted().with_name(_FUSIONS).read_text())
        return {"version": version, "provider": self.provider, **self.provider_options, "fused": fused}


def _saturates() -> bool:
    """Whether this processor's products of bytes saturate at 16 bits: x86 without VNNI. Weights have 7 bits then."""
    try:
        found = re.search(r"^flags\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return False
    return found is not None and not {"avx512_vnni", "avx_vnni"} & set(found[1].split())
