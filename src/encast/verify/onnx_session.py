"""An ONNX file in ONNX Runtime."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from encast.verify.original import Takes
from encast.verify.session import Input, Session, usable_threads

__all__ = ["open_session"]


def open_session(source: str, takes: Takes) -> Session:
    runtime: Any = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = usable_threads()
    # What the file says, and not what an optimiser makes of it: fused integer products round where the file does not.
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = runtime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    outputs = {one.name: list(one.shape or ()) for one in session.get_outputs()}

    def run(given: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        return dict(zip(outputs, session.run([*outputs], dict(given)), strict=True))

    return Session(
        version=str(runtime.__version__),
        inputs={
            one.name: Input(np.dtype(np.int32 if "int32" in one.type else np.int64), list(one.shape or ()))
            for one in session.get_inputs()
        },
        outputs=outputs,
        run=run,
    )
