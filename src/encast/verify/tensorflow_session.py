"""A signature of a SavedModel in TensorFlow. The graph is a program of its maker, and it runs.

Operations that TensorFlow does not have itself are unknown to it here: no library of them is loaded.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from encast.verify.original import Takes
from encast.verify.session import Input, Session, usable_threads

__all__ = ["open_session"]

# Read when TensorFlow is imported. oneDNN rounds otherwise, and in bf16 if its own variable says so.
_SETTINGS = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "HIP_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
}


def open_session(source: str, takes: Takes) -> Session:
    os.environ.update(_SETTINGS)
    threads = usable_threads()
    os.environ["OMP_NUM_THREADS"] = str(threads)
    tf: Any = importlib.import_module("tensorflow")
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.set_visible_devices([], "GPU")
    tf.config.set_soft_device_placement(True)  # a graph may name the device that it was trained on
    # What the graph says, and not what an optimiser makes of it.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    loaded = tf.saved_model.load(source, tags=list(takes.tags) or None)
    signature = loaded.signatures[takes.signature]
    specs = signature.structured_input_signature[1]

    def run(given: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        found = signature(**{name: tf.constant(array, specs[name].dtype) for name, array in given.items()})
        return {name: np.asarray(found[name]) for name in signature.structured_outputs}

    run.loaded = loaded  # type: ignore[attr-defined]  # its variables live as long as it does
    return Session(
        version=str(tf.__version__),
        inputs={name: Input(np.dtype(spec.dtype.as_numpy_dtype), _dims(spec)) for name, spec in specs.items()},
        outputs={name: _dims(spec) for name, spec in signature.structured_outputs.items()},
        run=run,
    )


def _dims(spec: Any) -> list[int | None]:
    return [] if spec.shape.rank is None else spec.shape.as_list()
