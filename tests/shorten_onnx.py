"""Smaller ONNX files for tests, with onnx."""

from __future__ import annotations

from pathlib import Path

import onnx

__all__ = ["shorten"]


def shorten(path: Path) -> None:
    """Numbers in the place of names: modules' paths are three quarters of a small file of many nodes."""
    model = onnx.load(str(path))
    kept = {one.name for one in (*model.graph.input, *model.graph.output)}
    numbers: dict[str, str] = {}

    def short(name: str) -> str:
        return name if not name or name in kept else numbers.setdefault(name, str(len(numbers)))

    for node in model.graph.node:
        node.ClearField("name")
        node.input[:] = [short(name) for name in node.input]
        node.output[:] = [short(name) for name in node.output]
    for tensor in model.graph.initializer:
        tensor.name = short(tensor.name)
    model.graph.ClearField("value_info")
    onnx.save(model, str(path))
