"""TensorRT on a GPU, by its own API: an engine for the very shape, replayed as a CUDA graph.

Since version 11 all networks are strongly typed: TensorRT computes in the types that the graph states, and no flag of
the builder changes them. So the model is exported in the dtype that is measured. In opset 23 attention is an operator,
which TensorRT computes in one kernel where it has one.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from encast.batch import Batch
from encast.bench.cache import seconds_to_make
from encast.bench.peers.base import OUTPUT, Call, CheckpointPeer, Shape, versions
from encast.bench.peers.card import HostCopy, captured, why_no_card
from encast.bench.peers.pytorch import import_torch, load_encoder, quiet, tensors
from encast.errors import ResourceError, install_hint

__all__ = ["TensorRT"]

_OPSET = 23
_OLDEST = 11
_ENGINE = "engine.plan"


class TensorRT(CheckpointPeer):
    """Engines are built when a shape is first bound, and kept: by shape, card and version.

    Ids are page-locked, and rows of padding are left out on the card, before they are copied.

    ``builder_optimization_level`` is TensorRT's: from 0 to 5, how long it looks for faster kernels.
    """

    name = "TensorRT"
    dtypes = ("f32", "f16")
    modules = ("tensorrt", "torch")
    needs = ("onnx", "onnxscript", "transformers")
    extra = "bench-tensorrt"
    accepted: ClassVar = {"device": ("cuda",), "builder_optimization_level": 3}
    device = "cuda"

    @classmethod
    def missing(cls) -> str | None:
        # The card first: without a driver TensorRT may not even be imported.
        if (why := super().missing() or why_no_card()) is not None:
            return why
        version = str(importlib.import_module("tensorrt").__version__)
        if int(version.partition(".")[0]) < _OLDEST:
            return f"TensorRT {version} may compute in other dtypes than its graph has; {install_hint(cls.extra)}"
        return None

    def open(self) -> None:
        self._trt: Any = importlib.import_module("tensorrt")
        self._log: Any = _log(self._trt)
        self._runtime = self._trt.Runtime(self._log)
        torch = import_torch()
        self._type = {"f32": torch.float32, "f16": torch.float16}[self.dtype]
        self._opened: dict[Shape, tuple[Any, dict[str, Any]]] = {}
        self._seconds: dict[str, float] = {}

    def bind(self, batch: Batch) -> Call:
        self.check(batch)
        torch, feeds = import_torch(), self.encoder.feeds(batch)
        mask = feeds["attention_mask"]
        context, memory = self._for_shape((mask.shape[0], mask.shape[1]))
        states = memory[OUTPUT].view(mask.size, self.encoder.hidden)
        # None: no padding, so that all rows are copied as they lie.
        rows = None if mask.all() else torch.from_numpy(np.flatnonzero(mask)).to(self.device)
        given = {name: torch.from_numpy(array) for name, array in feeds.items()}
        if self.device == "cuda":
            given = {name: tensor.pin_memory() for name, tensor in given.items()}

        def run(stream: int) -> Any:
            for name, tensor in given.items():
                memory[name].copy_(tensor, non_blocking=True)
            if not context.execute_async_v3(stream):
                raise self._failed("cannot run its engine")
            return states if rows is None else states.index_select(0, rows)

        replay, to_host = captured(run, self.device), HostCopy(self.device)
        return lambda: to_host(replay())

    def _for_shape(self, shape: Shape) -> tuple[Any, dict[str, Any]]:
        """The context of the shape's engine, and the tensors on the card that it reads and writes, by name."""
        if shape not in self._opened:
            torch = import_torch()
            engine = self._runtime.deserialize_cuda_engine(self._engine(shape))
            context = None if engine is None else engine.create_execution_context()
            if context is None:
                raise self._failed("cannot open its engine")
            memory = {name: torch.empty(shape, dtype=torch.int64, device=self.device) for name in self.encoder.inputs}
            memory[OUTPUT] = torch.empty((*shape, self.encoder.hidden), dtype=self._type, device=self.device)
            for name, tensor in memory.items():
                if not context.set_tensor_address(name, tensor.data_ptr()):
                    raise self._failed(f"takes no memory for {name}")
            self._opened[shape] = context, memory
        return self._opened[shape]

    def _engine(self, shape: Shape) -> bytes:
        settings = {
            "dtype": self.dtype,
            "shape": shape,
            "opset": _OPSET,
            "level": self.settings["builder_optimization_level"],
            "tensorrt": self._trt.__version__,
            "card": self._card(),
        }
        packages = ("onnx", "onnxscript", "torch", "transformers")
        folder = self.kept("tensorrt", lambda into: self._build(into, shape), packages, **settings)
        self._seconds["x".join(map(str, shape))] = round(seconds_to_make(folder), 1)
        return (folder / _ENGINE).read_bytes()

    def _build(self, folder: Path, shape: Shape) -> None:
        self.tried = True
        builder = self._trt.Builder(self._log)
        network = builder.create_network()
        config = builder.create_builder_config()
        config.builder_optimization_level = int(self.settings["builder_optimization_level"])
        config.clear_flag(self._trt.BuilderFlag.TF32)  # f32 is f32 then, as the others' is
        parser = self._trt.OnnxParser(network, self._log)
        with tempfile.TemporaryDirectory(dir=folder) as exported:
            if not parser.parse_from_file(str(self._export(Path(exported), shape))):
                raise self._failed("cannot read the graph")
            engine = builder.build_serialized_network(network, config)
        if engine is None:
            raise self._failed("cannot build an engine")
        (folder / _ENGINE).write_bytes(engine)

    def _export(self, folder: Path, shape: Shape) -> Path:
        """The graph of the very shape: what follows from sizes is in it as constants."""
        torch, onnx, file = import_torch(), importlib.import_module("onnx"), folder / "model.onnx"
        with quiet(), torch.inference_mode():
            torch.onnx.export(
                load_encoder(self.model.checkpoint, self.encoder).to(self._type),
                tensors(self.encoder.example(*shape)),
                str(file),
                input_names=list(self.encoder.inputs),
                output_names=[OUTPUT],
                opset_version=_OPSET,
                dynamo=True,
                verbose=False,
            )
        model: Any = onnx.load(str(file), load_external_data=False)
        for node in model.graph.node:
            if node.op_type == "Attention":
                # TensorRT's parser reads it: where no kernel computes all of attention, several may. Else it gives up.
                node.attribute.append(onnx.helper.make_attribute("TRT_decomposable", 1))
        file.write_bytes(model.SerializeToString())
        return file

    def _card(self) -> str:
        return str(import_torch().cuda.get_device_name())

    def _failed(self, what: str) -> ResourceError:
        return ResourceError(f"{self.name} {self._trt.__version__} {what}: {self._log.last or 'it gives no reason'}")

    def facts(self) -> Mapping[str, Any]:
        torch = import_torch()
        return {
            "version": str(self._trt.__version__),
            "torch": str(torch.__version__),
            **versions("transformers"),
            "card": self._card(),
            "cuda": torch.version.cuda,
            "tf32": False,
            **self.settings,
            "build_seconds": self._seconds,
        }

    def close(self) -> None:
        self._opened.clear()  # contexts and engines before the runtime that made them
        del self._runtime


def _log(trt: Any) -> Any:
    """A logger that keeps the last error in ``last``; TensorRT's own writes it to where no report looks."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.last = ""

        def log(self, severity: Any, msg: str) -> None:
            if severity in (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR):
                self.last = msg

    return Log()
