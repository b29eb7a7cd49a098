"""encast, OpenVINO and ONNX Runtime behind one door: a call on a fixed batch of ids, or on a list of texts.

Everything a service would do once is done before the call; what it must do for every request is inside of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from peers.models import MODELS, Shape, inputs

__all__ = ["Backend", "open_backend"]

Call = Callable[[], Any]

TRIAL_SECONDS = 0.6


class Backend(Protocol):
    """A loaded model. Both methods return a call, and what was chosen for it in words."""

    def prepare(self, shape: Shape) -> tuple[Call, str]:
        """A call that gives the last hidden states ``f32[sequences * length, hidden]`` of the fixed batch."""

    def prepare_texts(self, texts: list[str], settings: dict[str, Any]) -> tuple[Call, str]:
        """A call from texts to embeddings ``f32[texts, hidden]``; ``settings`` are the backend's own."""


def open_backend(backend: str, **options: Any) -> Backend:
    """``backend``: encast, openvino or onnxruntime; ``options`` are its class's arguments."""
    classes: dict[str, type[Backend]] = {"encast": Encast, "openvino": OpenVino, "onnxruntime": OnnxRuntime}
    return classes[backend](**options)


class Encast:
    def __init__(self, model: str, path: str, threads: int) -> None:
        import encast

        self.engine = encast.load(path, threads=threads)

    def prepare(self, shape: Shape) -> tuple[Call, str]:
        ids = inputs(shape).reshape(-1)
        cu_seqlens = np.arange(0, ids.size + 1, shape[1], dtype=np.int32)
        return lambda: self.engine.forward_packed(ids, cu_seqlens), "packed"

    def prepare_texts(self, texts: list[str], settings: dict[str, Any]) -> tuple[Call, str]:
        return lambda: self.engine.embed(texts), "Engine.embed"


class OpenVino:
    """``hints``: values of INFERENCE_PRECISION_HINT, of which the fastest for a shape is taken."""

    def __init__(self, model: str, path: str, threads: int, hints: Sequence[str], tokenizer: str | None = None) -> None:
        import openvino

        self.model, self.path, self.hints, self.tokenizer = MODELS[model], path, hints, tokenizer
        self.core = openvino.Core()
        self.embedders: dict[tuple[str, str], Any] = {}  # by hint and mode
        self.threads = threads

    def prepare(self, shape: Shape) -> tuple[Call, str]:
        return _fastest({f"hint {hint}, static shape": self._static(shape, hint) for hint in self.hints})

    def _static(self, shape: Shape, hint: str) -> Call:
        import openvino

        from peers.openvino_export import feeds

        ids = inputs(shape)
        given = feeds(self.model, ids, np.ones_like(ids))
        # A reshaped graph beats the dynamic one by 5 % (32x128) to 20 % (1x128) on MiniLM int8.
        graph = self.core.read_model(self.path)
        graph.reshape({name: openvino.PartialShape(list(shape)) for name in given})
        request = self.compile(graph, hint).create_infer_request()
        # Tensors set once: 0.04 ms less a call than passing a dictionary to infer().
        for name, array in given.items():
            request.set_tensor(name, openvino.Tensor(array))
        output = request.get_output_tensor(0)

        def call() -> Any:
            request.infer()
            return output.data.reshape(-1, self.model.hidden)

        return call

    def prepare_texts(self, texts: list[str], settings: dict[str, Any]) -> tuple[Call, str]:
        """``settings``: ``batch``, ``hint`` and ``mode``, see ``openvino_texts``."""
        from peers.openvino_texts import Embedder

        batch, hint, mode = settings["batch"], settings["hint"], settings["mode"]
        if (hint, mode) not in self.embedders:
            self.embedders[hint, mode] = Embedder(self, hint, mode)
        return lambda: self.embedders[hint, mode](texts, batch), f"{mode}, hint {hint}, batches of {batch}"

    def compile(self, graph: Any, hint: str, streams: int = 1) -> Any:
        """The compiled model: one stream with the latency hint, more with the throughput hint."""
        settings = {
            "PERFORMANCE_HINT": "LATENCY" if streams == 1 else "THROUGHPUT",
            "NUM_STREAMS": streams,
            "INFERENCE_NUM_THREADS": self.threads,
            "INFERENCE_PRECISION_HINT": hint,
        }
        return self.core.compile_model(graph, "CPU", settings)


class OnnxRuntime:
    def __init__(self, model: str, path: str, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.model = MODELS[model]
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def prepare(self, shape: Shape) -> tuple[Call, str]:
        from peers.openvino_export import feeds

        ids = inputs(shape)
        given = feeds(self.model, ids, np.ones_like(ids))
        return lambda: self.session.run(None, given)[0].reshape(ids.size, -1), "fused graph"

    def prepare_texts(self, texts: list[str], settings: dict[str, Any]) -> tuple[Call, str]:
        raise NotImplementedError("texts are compared with OpenVINO, the faster of the two")


def _fastest(calls: dict[str, Call]) -> tuple[Call, str]:
    """The call with the smallest median time, and its name."""
    if len(calls) == 1:
        ((name, call),) = calls.items()
        return call, name
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + TRIAL_SECONDS * len(calls)
    while time.perf_counter() < end or min(map(len, times.values())) < 3:
        for name, call in calls.items():
            call()
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    best = min(times, key=lambda name: float(np.median(times[name])))
    return calls[best], best
