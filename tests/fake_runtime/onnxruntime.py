"""Stands in for ONNX Runtime: answers by the reference, each row of the batch as far as its mask says.

``FAKE_RUNTIME`` (JSON) says what it does besides: ``inputs`` of its session, ``share`` of the answers that is added to
them, ``add``: outputs besides the last hidden state, ``raises``, ``sleeps``, ``size``: of the only batch that it takes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from encast.archs import build_graph
from encast.backends.reference import Reference
from encast.batch import Batch
from encast.importers import open_checkpoint

__version__ = "9.9"
SessionOptions = SimpleNamespace
GraphOptimizationLevel = SimpleNamespace(ORT_DISABLE_ALL=0)
_HOW = json.loads(os.environ.get("FAKE_RUNTIME", "{}"))


class InferenceSession:
    def __init__(self, path: str, options: Any, providers: list[str]) -> None:
        if "raises" in _HOW:
            raise RuntimeError(_HOW["raises"])
        time.sleep(_HOW.get("sleeps", 0))
        assert providers == ["CPUExecutionProvider"]
        self.reference = Reference(build_graph(open_checkpoint(path)))
        self.names = _HOW.get("inputs", ["input_ids", "token_type_ids", "attention_mask"])

    def get_inputs(self) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(
                name=name, type="tensor(int64)", shape=[1 if name == "position_ids" else "batch", "sequence"]
            )
            for name in self.names
        ]

    def get_outputs(self) -> list[SimpleNamespace]:
        output = "logits" if "logits" in self.reference.graph.outputs else "last_hidden_state"
        shapes = {"pooler_output": ["batch", 32], output: ["batch", "sequence", 32]}
        return [SimpleNamespace(name=name, shape=shape) for name, shape in shapes.items()]

    def run(self, names: list[str], feeds: Mapping[str, Any]) -> list[Any]:
        assert [*feeds] == self.names
        assert all(array.dtype == np.int64 for array in feeds.values())
        ids = feeds["input_ids"]
        assert "position_ids" not in feeds or feeds["position_ids"].tolist() == [[*range(ids.shape[1])]]
        assert list(ids.shape) == _HOW.get("size", list(ids.shape))
        mask = feeds.get("attention_mask", np.ones_like(ids))
        assert mask.any(axis=1).all()
        width = self.reference.graph.type_of(self.reference.graph.outputs[names[1]]).shape[1]
        rows = np.full((*ids.shape, width), 7.0)
        for row, one, types, used in zip(rows, ids, feeds["token_type_ids"], mask, strict=True):
            length = int(used.sum())
            row[:length] = self.reference.run(names[1], Batch.of([one[:length].tolist()], [types[:length].tolist()]))
        pooled = np.zeros((len(ids), 32))
        return [pooled + 0.5, rows * (1 + float(_HOW.get("share", 0)))]
