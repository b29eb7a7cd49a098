"""OpenVINO's CPU plugin, given what was fastest for it.

A graph reshaped to the batch's own shape beats the dynamic one by 5 % (MiniLM int8, 32x128) to 20 % (1x128). Inputs
lie in tensors that are set once: 0.04 ms a call less than passing a dictionary to ``infer``. int8 graphs compute what
is not quantised in f32 or bf16, whichever is faster for the shape.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from encast.bench.peers.base import OUTPUT, Feeds, Float32, PaddedPeer, Shape, States
from encast.bench.peers.pytorch import load_encoder, quiet, tensors
from encast.errors import InputError, ResourceError

__all__ = ["OpenVino", "fastest", "sparse_products"]

_HINTS = {"f32": ("f32",), "bf16": ("bf16",), "int8": ("f32", "bf16")}
_MODEL = "model.xml"
_STATIC_SHAPES = 8
"""So many get a graph of their own; further ones share the dynamic graph."""
_PRESET = "performance"
"""Of NNCF. It was 1 to 2 % faster than ``mixed`` (activations with zero points) and as accurate: MiniLM's embeddings
have a mean cosine of 0.9972 to f32, 0.9978 with ``mixed``."""
_TRIAL_SECONDS = 1.5
"""Of each candidate's calls; their turns alternate. Two precisions of OpenVINO, 1.8 % apart at 33 ms a call on a shared
machine: 9 calls of each chose the faster one in 86 % of trials by their median and in 93 % by their lower quartile, 20
calls in 90 to 100 %. Runs that choose otherwise compare with another peer."""

_TRIAL_LEAST = 3


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
    """The checkpoint is converted from torch once, and quantised by NNCF as its guide for transformers says.

    Options: ``sparse_rate`` of int8, the share of zeros from which on a weight is packed without them. Its products
    unpack it and multiply the zeros as others do, so what is saved is reading. The plugin has such products for AMX
    alone. Where it has none it takes dense ones and says nothing, so what it compiled is looked at.
    """

    name = "OpenVINO"
    dtypes = ("f32", "bf16", "int8")
    modules = ("openvino",)
    needs = ("nncf", "torch", "transformers")
    extra = "bench-openvino"
    accepted: ClassVar = {"sparse_rate": 1}

    def converted(self) -> Path:
        return self._int8() if self.dtype == "int8" else self._wide()

    def open(self) -> None:
        if self._sparse and self.dtype != "int8":
            raise InputError(f"OpenVINO stores weights without zeros in int8; leave sparse_rate out for {self.dtype}")
        openvino: Any = importlib.import_module("openvino")
        self._core = openvino.Core()
        self._sparse_products = 0
        capabilities = self._core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        self._hints = tuple(hint for hint in _HINTS[self.dtype] if hint == "f32" or "BF16" in capabilities)
        if not self._hints:
            raise ResourceError(
                "OpenVINO names no BF16 among what this processor can do, as it does with AVX512_BF16 or AMX, and "
                "would simulate it or take f32; take openvino-f32 or openvino-int8"
            )
        self._path = self.converted()
        self._requests: dict[Shape, _Request] = {}
        self._dynamic = self._compile(self._core.read_model(self._path), self._hints[0])
        self._any = self._dynamic.create_infer_request()

    def prepare(self, feeds: Feeds) -> States:
        shape = next(iter(feeds.values())).shape
        if shape not in self._requests:
            if len(self._requests) >= _STATIC_SHAPES:
                return lambda: self._any.infer(feeds, share_inputs=True)[0]
            self._requests[shape] = self._request(shape, self._hint(shape, feeds))
        return self._requests[shape].states(feeds)

    def facts(self) -> Mapping[str, Any]:
        facts: dict[str, Any] = {"version": importlib.import_module("openvino").__version__}
        for name in ("INFERENCE_NUM_THREADS", "NUM_STREAMS", "PERFORMANCE_HINT", "ENABLE_CPU_PINNING"):
            value = self._dynamic.get_property(name)
            facts[name.lower()] = value if isinstance(value, int | bool) else str(value).rpartition(".")[2]
        if self.dtype == "int8":
            facts |= {"quantisation": "NNCF", "preset": _PRESET}
        if self._sparse:
            facts |= {"sparse_rate": self.settings["sparse_rate"], "sparse_products": self._sparse_products}
        facts["static_shapes"] = {f"{rows}x{columns}": made.hint for (rows, columns), made in self._requests.items()}
        facts["dynamic_shape"] = self._hints[0]
        return facts

    def close(self) -> None:
        self._requests.clear()
        del self._any, self._dynamic, self._core

    def _wide(self) -> Path:
        """With f32 weights, which the plugin narrows when bf16 is asked for.

        Attention is in the form of transformers' choice, SDPA wherever the architecture has it.
        """

        def make(folder: Path) -> None:
            openvino: Any = importlib.import_module("openvino")
            given = dict(zip(self.encoder.inputs, tensors(self.encoder.example(2, 16)), strict=True))
            with quiet():
                graph = openvino.convert_model(
                    load_encoder(self.model.checkpoint, self.encoder),
                    example_input=given,
                    input=[(name, openvino.PartialShape([-1, -1]), openvino.Type.i64) for name in given],
                )
            graph.outputs[0].get_tensor().set_names({OUTPUT})
            openvino.save_model(graph, folder / _MODEL, compress_to_fp16=False)

        return self.kept("openvino", make, ("torch", "transformers", "openvino"), form="wide") / _MODEL

    def _int8(self) -> Path:
        """NNCF's graph."""

        def make(folder: Path) -> None:
            openvino: Any = importlib.import_module("openvino")
            nncf: Any = importlib.import_module("nncf")
            texts = self.calibration_feeds()
            graph = nncf.quantize(
                openvino.Core().read_model(self._wide()),
                nncf.Dataset(texts),
                model_type=nncf.ModelType.TRANSFORMER,
                preset=nncf.QuantizationPreset(_PRESET),
                target_device=nncf.TargetDevice.CPU,
                subset_size=len(texts),
            )
            openvino.save_model(graph, folder / _MODEL, compress_to_fp16=False)

        packages = ("torch", "transformers", "openvino", "nncf")
        settings = {"form": "int8", "preset": _PRESET, "calibration": self.calibration_digest()}
        return self.kept("openvino", make, packages, **settings) / _MODEL

    @property
    def _sparse(self) -> bool:
        return bool(self.settings["sparse_rate"] < 1)

    def _compile(self, graph: Any, hint: str) -> Any:
        settings: dict[str, Any] = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
            "INFERENCE_NUM_THREADS": self.threads,
            "INFERENCE_PRECISION_HINT": hint,
        }
        if self._sparse:
            settings["CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE"] = float(self.settings["sparse_rate"])
        return self._core.compile_model(graph, "CPU", settings)

    def _hint(self, shape: Shape, feeds: Feeds) -> str:
        """The precision in which the shape is fastest; tried once on a processor, and kept."""
        if len(self._hints) == 1:
            return self._hints[0]
        settings = {
            "dtype": self.dtype,
            "processor": self._core.get_property("CPU", "FULL_DEVICE_NAME"),
            "threads": self.threads,
            "shape": shape,
            **({"sparse_rate": self.settings["sparse_rate"]} if self._sparse else {}),
        }

        def make(folder: Path) -> None:
            self.tried = True
            found = fastest({hint: self._request(shape, hint).states(feeds) for hint in self._hints})
            (folder / "hint").write_text(found)

        return (self.kept("openvino-hint", make, ("openvino",), **settings) / "hint").read_text()

    def _request(self, shape: Shape, hint: str) -> _Request:
        openvino: Any = importlib.import_module("openvino")
        graph = self._core.read_model(self._path)
        graph.reshape({name: openvino.PartialShape(list(shape)) for name in self.encoder.inputs})
        compiled = self._compile(graph, hint)
        if self._sparse:
            self._sparse_products = sparse_products(compiled)
            if not self._sparse_products:
                raise ResourceError(
                    "OpenVINO compiled no product with sparse weights: it has some for AMX alone, and for weights with "
                    f"{self.settings['sparse_rate']:.0%} of zeros and more here; take openvino-int8"
                )
        request = compiled.create_infer_request()
        inputs = {name: np.zeros(shape, np.int64) for name in self.encoder.inputs}
        for name, array in inputs.items():
            request.set_tensor(name, openvino.Tensor(array, shared_memory=True))
        return _Request(request.infer, inputs, request.get_output_tensor(0), hint)


def sparse_products(compiled: Any) -> int:
    """The products of a compiled model whose kernel is one for sparse weights, by the plugin's own account."""
    kinds = (node.get_rt_info()["primitiveType"] for node in compiled.get_runtime_model().get_ops())
    return sum("sparse" in (kind if isinstance(kind, str) else kind.astype(str)) for kind in kinds)


def fastest(candidates: Mapping[str, States]) -> str:
    """The name of the call of the smallest lower quartile, the first of equals.

    A quartile, since a neighbour on the machine only ever slows.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for call in candidates.values():
        call()
    end = time.perf_counter() + _TRIAL_SECONDS * len(candidates)
    while time.perf_counter() < end or min(map(len, times.values())) < _TRIAL_LEAST:
        for name, call in candidates.items():
            call()  # the other's threads go to sleep meanwhile
            begun = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begun)
    return min(times, key=lambda name: float(np.percentile(times[name], 25)))
