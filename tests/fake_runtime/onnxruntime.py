"""Stands in for ONNX Runtime, as ``fake_answers`` says; with the last hidden state it has a pooler's output."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from fake_answers import HOW, Model

__version__ = "9.9"
SessionOptions = SimpleNamespace
GraphOptimizationLevel = SimpleNamespace(ORT_DISABLE_ALL=0)


class InferenceSession:
    def __init__(self, path: str, options: Any, providers: list[str]) -> None:
        assert providers == ["CPUExecutionProvider"]
        self.model = Model(path)
        self.names = HOW.get("inputs", ["input_ids", "token_type_ids", "attention_mask"])

    def get_inputs(self) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(
                name=name, type="tensor(int64)", shape=[1 if name == "position_ids" else "batch", "sequence"]
            )
            for name in self.names
        ]

    def get_outputs(self) -> list[SimpleNamespace]:
        output = "logits" if "logits" in self.model.graph.outputs else "last_hidden_state"
        shapes = {"pooler_output": ["batch", 32], output: ["batch", "sequence", 32]}
        return [SimpleNamespace(name=name, shape=shape) for name, shape in shapes.items()]

    def run(self, names: list[str], feeds: Mapping[str, Any]) -> list[Any]:
        assert [*feeds] == self.names
        assert all(array.dtype == np.int64 for array in feeds.values())
        ids = feeds["input_ids"]
        assert "position_ids" not in feeds or feeds["position_ids"].tolist() == [[*range(ids.shape[1])]]
        rows = self.model.rows(names[1], ids, feeds.get("attention_mask", np.ones_like(ids)), feeds["token_type_ids"])
        return [np.zeros((len(ids), 32)) + 0.5, rows]
