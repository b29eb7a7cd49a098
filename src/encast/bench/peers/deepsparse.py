"""DeepSparse 1.8: encast's graph written as ONNX, compiled for each shape. Dense weights in f32 and static int8.

It needs an environment of its own, for it takes NumPy before 2 and an old ONNX alone.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from encast.batch import Batch
from encast.bench.cache import cached, seconds_to_make
from encast.bench.peers.base import ModelFiles
from encast.bench.peers.deepsparse_onnx import INPUTS, calibrate, write
from encast.bench.peers.interpreted import Inputs, InterpretedPeer, Program, inputs_of, only_apart
from encast.bench.peers.transformer import Shape, States
from encast.errors import InputError

__all__ = ["DeepSparse"]

_RANGES = "ranges.json"


class DeepSparse(InterpretedPeer):
    """int8: the products with weights. Activations have the extremes over ``ModelFiles.calibration`` as range."""

    name = "DeepSparse"
    dtypes = ("f32", "int8")
    modules = ("deepsparse",)

    def __init__(self, model: ModelFiles, dtype: str, threads: int, cache: Path, **options: Any) -> None:
        super().__init__(model, dtype, threads, cache, **options)
        os.environ.update(NM_DISABLE_ANALYTICS="1", OMP_NUM_THREADS=str(threads))

    @classmethod
    def missing(cls) -> str | None:
        return only_apart("deepsparse", "deepsparse", "deepsparse==1.8.0", python="python3.11")

    def export(self) -> Mapping[str, Any]:
        """For int8 the ranges of activations; the ONNX graphs are written when a shape is compiled."""
        if self.dtype != "int8":
            return {}
        self.open()
        return {"seconds": seconds_to_make(self._folder), "path": str(self._folder)}

    def start(self) -> None:
        self._deepsparse: Any = importlib.import_module("deepsparse")
        self._ranges: dict[str, tuple[float, float]] | None = None
        self._engines: dict[Shape, Any] = {}
        if self.dtype == "int8":
            key = {"model": self.model.sha, "calibration": self.model.calibration}
            self._folder = cached(self.cache, "deepsparse-ranges", key, self._calibrate)
            read = json.loads((self._folder / _RANGES).read_text(encoding="utf-8"))
            self._ranges = {name: (float(low), float(high)) for name, (low, high) in read.items()}

    def compile(self, shape: Shape) -> Program:
        with tempfile.TemporaryDirectory(prefix="encast-deepsparse-") as folder:
            file = Path(folder) / "model.onnx"
            write(file, self.graph, shape, self._ranges)
            # Without batch_size the shapes of the file stay: token ids are one axis of rows and columns.
            engine = self._deepsparse.Engine(str(file), batch_size=None, num_cores=self.threads)
        self._engines[shape] = engine
        names = [name for name in INPUTS if name in engine.input_names]

        def program(inputs: Inputs) -> States:
            arrays = {name: array.astype(np.int64) for name, array in vars(inputs).items() if name != "bias"}
            given = [np.ascontiguousarray({**arrays, "bias": inputs.bias}[name]) for name in names]
            return lambda: engine.run(given, val_inp=False)[0]

        return program

    def _calibrate(self, folder: Path) -> None:
        if not self.model.calibration:
            raise InputError(
                f"{self.name} int8 quantises activations by their ranges over calibration texts, of which the model "
                f"{self.model.name} has none; give it some, or measure f32"
            )
        ranges: dict[str, tuple[float, float]] = {}
        for ids in self.model.calibration:
            inputs = inputs_of(self.encoder.feeds(Batch.of([ids])))
            calibrate(self.graph, (1, len(ids)), vars(inputs), ranges)
        (folder / _RANGES).write_text(json.dumps(ranges, indent=1) + "\n", encoding="utf-8")

    def facts(self) -> Mapping[str, Any]:
        facts: dict[str, Any] = {
            "version": self._deepsparse.__version__,
            "num_cores": self.threads,
            "supported_ops": min((engine.fraction_of_supported_ops for engine in self._engines.values()), default=None),
        }
        if self.dtype == "int8":
            facts |= {"int8": "products with weights, static", "calibrated_on": len(self.model.calibration)}
        return facts
