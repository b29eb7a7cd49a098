"""ONNX Runtime on a CPU: the plain export, its transformer optimiser's graph, dynamic and static int8.

It has no bf16 products for x86.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from encast.bench.cache import seconds_to_make
from encast.bench.peers import onnxruntime_export as graphs
from encast.bench.peers.base import Float32
from encast.bench.peers.transformer import Choices, Feeds, PaddedPeer, not_installed

__all__ = ["OnnxRuntime"]


class OnnxRuntime(PaddedPeer):
    """Options: ``graph`` of f32 (plain or fused), ``quantisation`` of int8 (dynamic or static)."""

    name = "ONNX Runtime"
    dtypes = ("f32", "int8")
    modules = ("onnxruntime",)
    defaults: ClassVar[Mapping[str, Any]] = {"graph": "fused", "quantisation": "dynamic"}
    choices: ClassVar[Choices] = {
        "graph": ("plain", "fused"),
        "quantisation": ("dynamic", "static"),
    }

    @classmethod
    def missing(cls) -> str | None:
        return not_installed("bench-onnxruntime", "onnxruntime", "onnx", "onnxscript", "torch", "transformers")

    def export(self) -> Mapping[str, Any]:
        folder = self._folder()
        return {"seconds": seconds_to_make(folder), "path": str(folder / "model.onnx")}

    def open(self) -> None:
        runtime: Any = importlib.import_module("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.execution_mode = runtime.ExecutionMode.ORT_SEQUENTIAL
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.log_severity_level = 3  # what it fused itself, and could not, is no error
        path = str(self._folder() / "model.onnx")
        self._session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def compute(self, feeds: Feeds) -> Float32:
        states: Float32 = self._session.run(None, feeds)[0]
        return states

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
        fusions = self._folder(fused_only=True) / "fusions.json"
        return {**facts, "fused": json.loads(fusions.read_text())} if fusions.exists() else facts

    def close(self) -> None:
        del self._session

    def _folder(self, fused_only: bool = False) -> Path:
        made = (self.model, self.encoder, self.cache)
        if self.dtype == "f32" and self.settings["graph"] == "plain":
            return graphs.plain_graph(*made)
        if self.dtype == "f32" or fused_only:
            static = self.dtype == "int8" and self.settings["quantisation"] == "static"
            return graphs.fused_graph(*made, attention=not static)
        if self.settings["quantisation"] == "static":
            return graphs.static_int8_graph(*made, reduce_range=_saturates())
        return graphs.dynamic_int8_graph(*made, reduce_range=_saturates())


def _saturates() -> bool:
    """Whether this processor's products of bytes saturate at 16 bits: x86 without VNNI."""
    try:
        found = re.search(r"^flags\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return False
    return found is not None and not {"avx512_vnni", "avx_vnni"} & set(found[1].split())
