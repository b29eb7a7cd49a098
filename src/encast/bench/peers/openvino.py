"""OpenVINO's CPU plugin, given what was fastest for it.

A graph reshaped to the batch's own shape beats the dynamic one by 5 % (MiniLM int8, 32x128) to 20 % (1x128). Inputs
lie in tensors that are set once: 0.04 ms a call less than passing a dictionary to ``infer``. int8 graphs compute what
is not quantised in f32 or bf16, whichever is faster for the shape.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from encast.bench.cache import cached, seconds_to_make
from encast.bench.peers import openvino_export as graphs
from encast.bench.peers.base import Float32
from encast.bench.peers.transformer import Choices, Feeds, PaddedPeer, Shape, States, not_installed
from encast.bench.peers.trial import fastest
from encast.errors import InputError, ResourceError

__all__ = ["OpenVino"]

_HINTS = {"f32": ("f32",), "bf16": ("bf16",), "int8": ("f32", "bf16")}


class _Request(NamedTuple):
    """An inference request with its tensors. All batches of one shape share it, as in a service."""

    infer: Any
    inputs: dict[str, np.ndarray[Any, Any]]
    output: Any
    hint: str

    def states(self, feeds: Feeds) -> States:
        pairs = [(self.inputs[name], array) for name, array in feeds.items()]

        def call() -> Float32:
            for tensor, array in pairs:
                np.copyto(tensor, array)
            self.infer()
            states: Float32 = self.output.data
            return states

        return call


class OpenVino(PaddedPeer):
    """Options: ``attention`` in the conversion (auto: SDPA where the architecture has it); ``preset`` of NNCF;
    ``static_shapes``: so many shapes get a graph of their own, further ones share the dynamic graph.
    """

    name = "OpenVINO"
    dtypes = ("f32", "bf16", "int8")
    modules = ("openvino",)
    defaults: ClassVar[Mapping[str, Any]] = {"attention": "auto", "preset": "performance", "static_shapes": 8}
    choices: ClassVar[Choices] = {
        "attention": ("auto", "sdpa", "eager"),
        "preset": ("performance", "mixed"),
    }

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        most = self.settings["static_shapes"]
        if not isinstance(most, int) or isinstance(most, bool) or most < 0:
            raise InputError(f"{self.name}: static_shapes is {most!r}; a whole number of at least 0 is needed")

    @classmethod
    def missing(cls) -> str | None:
        return not_installed("bench-openvino", "openvino", "nncf", "torch", "transformers")

    def export(self) -> Mapping[str, Any]:
        folder = self._folder()
        return {"seconds": seconds_to_make(folder), "path": str(folder / "model.xml")}

    def open(self) -> None:
        openvino: Any = importlib.import_module("openvino")
        self._core = openvino.Core()
        capabilities = self._core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        self._hints = tuple(hint for hint in _HINTS[self.dtype] if hint == "f32" or "BF16" in capabilities)
        if not self._hints:
            raise ResourceError(
                "OpenVINO names no BF16 among what this processor can do, as it does with AVX512_BF16 or AMX, and "
                "would simulate it or take f32; take openvino-f32 or openvino-int8"
            )
        self._path = self._folder() / "model.xml"
        self._requests: dict[Shape, _Request] = {}
        self._dynamic = self._compile(self._core.read_model(self._path), self._hints[0])
        self._any = self._dynamic.create_infer_request()

    def compute(self, feeds: Feeds) -> Float32:
        states: Float32 = self._any.infer(feeds, share_inputs=True)[0]
        return states

    def prepare(self, feeds: Feeds) -> States:
        shape = next(iter(feeds.values())).shape
        if shape not in self._requests:
            if len(self._requests) >= self.settings["static_shapes"]:
                return lambda: self.compute(feeds)
            self._requests[shape] = self._request(shape, self._hint(shape, feeds))
        return self._requests[shape].states(feeds)

    def facts(self) -> Mapping[str, Any]:
        facts: dict[str, Any] = {"version": importlib.import_module("openvino").__version__}
        for name in ("INFERENCE_NUM_THREADS", "NUM_STREAMS", "PERFORMANCE_HINT", "ENABLE_CPU_PINNING"):
            value = self._dynamic.get_property(name)
            facts[name.lower()] = value if isinstance(value, int | bool) else str(value).rpartition(".")[2]
        facts["attention"] = self.settings["attention"]
        if self.dtype == "int8":
            facts |= {"quantisation": "NNCF", "preset": self.settings["preset"]}
        facts["static_shapes"] = {f"{rows}x{columns}": made.hint for (rows, columns), made in self._requests.items()}
        facts["dynamic_shape"] = self._hints[0]
        return facts

    def close(self) -> None:
        self._requests.clear()
        del self._any, self._dynamic, self._core

    def _folder(self) -> Path:
        attention = self.settings["attention"]
        if self.dtype == "int8":
            return graphs.int8_graph(self.model, self.encoder, self.cache, attention, self.settings["preset"])
        return graphs.wide_graph(self.model, self.encoder, self.cache, attention)

    def _compile(self, graph: Any, hint: str) -> Any:
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
            "INFERENCE_NUM_THREADS": self.threads,
            "INFERENCE_PRECISION_HINT": hint,
        }
        return self._core.compile_model(graph, "CPU", settings)

    def _hint(self, shape: Shape, feeds: Feeds) -> str:
        """The precision in which the shape is fastest; tried once on a processor, and kept."""
        if len(self._hints) == 1:
            return self._hints[0]
        key = {
            "model": self.model.sha,
            "dtype": self.dtype,
            "settings": self.settings,
            "openvino": importlib.import_module("openvino").__version__,
            "processor": self._core.get_property("CPU", "FULL_DEVICE_NAME"),
            "threads": self.threads,
            "shape": shape,
        }

        def make(folder: Path) -> None:
            self.tried = True
            found = fastest({hint: self._request(shape, hint).states(feeds) for hint in self._hints})
            (folder / "hint").write_text(found)

        return (cached(self.cache, "openvino-hint", key, make) / "hint").read_text()

    def _request(self, shape: Shape, hint: str) -> _Request:
        openvino: Any = importlib.import_module("openvino")
        graph = self._core.read_model(self._path)
        graph.reshape({name: openvino.PartialShape(list(shape)) for name in self.encoder.inputs})
        request = self._compile(graph, hint).create_infer_request()
        inputs = {name: np.zeros(shape, np.int64) for name in self.encoder.inputs}
        for name, array in inputs.items():
            request.set_tensor(name, openvino.Tensor(array, shared_memory=True))
        return _Request(request.infer, inputs, request.get_output_tensor(0), hint)
