"""Stands in for TensorFlow, as ``fake_answers`` says: a SavedModel's signature as google-research/bert has it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
from fake_answers import HOW, Model

__version__ = "9.9"
float32, int32 = np.float32, np.int32


class _Shape:
    def __init__(self, dims: list[int | None] | None) -> None:
        self.rank, self._dims = None if dims is None else len(dims), dims

    def as_list(self) -> list[int | None]:
        assert self._dims is not None
        return list(self._dims)


def _spec(dims: list[int | None] | None) -> Any:
    return SimpleNamespace(dtype=SimpleNamespace(as_numpy_dtype=np.int32), shape=_Shape(dims))


class _Signature:
    def __init__(self, path: str) -> None:
        self.model = Model(path)
        length = HOW.get("size", [None, None])[1]
        names = HOW.get("inputs", ["input_ids", "input_mask", "segment_ids", "label_ids"])
        self.dims = {name: [None] if name == "label_ids" else [None, length] for name in names}
        self.structured_input_signature = ((), {name: _spec(dims) for name, dims in self.dims.items()})
        self.gives = HOW.get("outputs", ["probabilities"])
        declared: dict[str, list[int | None] | None] = {
            "start_logits": [None, None],
            "end_logits": None,
            "labels": None,
        }
        self.structured_outputs = {name: _spec(declared.get(name, [None, None, 8])) for name in self.gives}

    def __call__(self, **given: Any) -> dict[str, Any]:
        assert [*given] == [*self.dims]
        assert all(array.dtype == np.int32 for array in given.values())
        ids = given["input_ids"]
        if "label_ids" in given:
            assert given["label_ids"].tolist() == [0] * len(ids)
        mask = given.get("input_mask", np.ones_like(ids))
        output = "logits" if "logits" in self.model.graph.outputs else "last_hidden_state"
        rows = self.model.rows(output, ids, mask, given["segment_ids"])
        odds = np.exp(rows - rows.max(axis=-1, keepdims=True))
        odds /= odds.sum(axis=-1, keepdims=True)
        forms = {
            "probabilities": lambda: odds,
            "log_probs": lambda: np.log(odds),
            "shares": lambda: 1 / (1 + np.exp(-rows)),
            "logits": lambda: rows,
            "sequence_output": lambda: rows,
            "start_logits": lambda: rows[..., 0],
            "end_logits": lambda: rows[..., 1],
            "labels": lambda: np.array([b"a label"] * len(ids)),
        }
        return {name: forms[name]() for name in self.gives}


def _load(path: str, tags: list[str] | None) -> Any:
    assert tags == ["serve"]
    return SimpleNamespace(signatures={"serving_default": _Signature(path)})


def _hide(devices: list[str], kind: str) -> None:
    assert (devices, kind, os.environ["CUDA_VISIBLE_DEVICES"]) == ([], "GPU", "-1")


def _nothing(_: Any) -> None:
    pass


def constant(array: Any, dtype: Any) -> Any:
    return np.asarray(array, dtype.as_numpy_dtype)


saved_model = SimpleNamespace(load=_load)
config = SimpleNamespace(
    threading=SimpleNamespace(set_intra_op_parallelism_threads=_nothing, set_inter_op_parallelism_threads=_nothing),
    set_visible_devices=_hide,
    set_soft_device_placement=_nothing,
    optimizer=SimpleNamespace(set_experimental_options=_nothing),
)
