"""A small BERT written as an ONNX file node by node, for tests that change parts of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx_files import input_bytes, model_bytes, node_bytes

__all__ = [
    "GELU",
    "GELU_TANH",
    "HEADS",
    "HIDDEN",
    "INNER",
    "INPUTS",
    "NORM",
    "POSITIONS",
    "SILU",
    "VOCAB",
    "Steps",
    "Writer",
]

HIDDEN, HEADS, INNER, VOCAB, POSITIONS = 8, 2, 12, 30, 16
INPUTS = [input_bytes(name) for name in ("input_ids", "attention_mask", "token_type_ids")]

GELU = [
    ("Div", ["x", "root2"], "a", {}),
    ("Erf", ["a"], "b", {}),
    ("Add", ["b", "one"], "c", {}),
    ("Mul", ["x", "c"], "d", {}),
    ("Mul", ["d", "half"], "y", {}),
]
GELU_TANH = [
    ("Pow", ["x", "three"], "a", {}),
    ("Mul", ["a", "cubic"], "b", {}),
    ("Add", ["x", "b"], "c", {}),
    ("Mul", ["c", "root"], "d", {}),
    ("Tanh", ["d"], "e", {}),
    ("Add", ["one", "e"], "f", {}),
    ("Mul", ["half", "x"], "g", {}),
    ("Mul", ["g", "f"], "y", {}),
]
SILU = [("Sigmoid", ["x"], "a", {}), ("Mul", ["x", "a"], "y", {})]
NORM = [
    ("ReduceMean", ["x"], "m", {"axes": [-1]}),
    ("Sub", ["x", "m"], "c", {}),
    ("Mul", ["c", "c"], "p", {}),
    ("ReduceMean", ["p"], "v", {"axes": [-1]}),
    ("Add", ["v", "eps"], "e", {}),
    ("Sqrt", ["e"], "s", {}),
    ("Div", ["c", "s"], "d", {}),
    ("Mul", ["d", "GAMMA"], "g", {}),
    ("Add", ["g", "BETA"], "y", {}),
]
Steps = Sequence[tuple[str, list[str], str, dict[str, Any]]]


class Writer:
    """A BERT of one layer as ONNX nodes; tests change single parts of it."""

    def __init__(self, *, act: Steps = GELU, mask: str = "add", norm: Steps | None = None, gemm: bool = False) -> None:
        self.random = np.random.RandomState(0)
        self.nodes: list[bytes] = []
        self.weights: dict[str, np.ndarray[Any, Any]] = {}
        numbers = {"one": 1.0, "half": 0.5, "three": 3.0, "eps": 1e-12, "cubic": 0.044715}
        numbers |= {"ten": 10.0, "minus ten": -10.0}
        numbers |= {"root2": 2**0.5, "root": (2 / np.pi) ** 0.5, "low": -1e9, "dim": (HIDDEN / HEADS) ** 0.5}
        for name, value in numbers.items():
            self.weights[name] = np.array(value, np.float32)
        self.positions = POSITIONS
        self.weights |= {"true": np.array(True), "false": np.array(False)}
        self.weights |= {"heads": np.array([0, 0, HEADS, -1])}
        self.weights |= {"flat": np.array([0, 0, HIDDEN]), "first": np.array([0]), "second": np.array([1])}
        self.act, self.mask, self.norm, self.gemm = act, mask, norm, gemm
        self.count = 0

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        self.count += 1
        name = f"v{self.count}"
        self.nodes.append(node_bytes(op, inputs, [name], **attributes))
        return name

    def weight(self, *shape: int) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = self.random.standard_normal(shape).astype(np.float32)
        return name

    def play(self, steps: Steps, x: str, **names: str) -> str:
        made = {"x": x, **names}
        for op, inputs, output, attributes in steps:
            made[output] = self.add(op, *(made.get(one, one) for one in inputs), **attributes)
        return made["y"]

    def linear(self, x: str, inner: int, size: int) -> str:
        weight, bias = self.weight(inner, size), self.weight(size)
        if self.gemm:
            flat = self.add("Reshape", x, self.shape_of_rows("rows", [-1, inner]))
            return self.add("Reshape", self.add("Gemm", flat, weight, bias), self.back(x, size))
        return self.add("Add", self.add("MatMul", x, weight), bias)

    def shape_of_rows(self, name: str, shape: list[int]) -> str:
        key = f"{name}{shape}"
        self.weights[key] = np.array(shape)
        return key

    def back(self, x: str, size: int) -> str:
        front = self.add("Slice", self.add("Shape", x), "first", self.shape_of_rows("two", [2]))
        return self.add("Concat", front, self.shape_of_rows("size", [size]), axis=0)

    def layer_norm(self, x: str) -> str:
        gamma, beta = self.weight(HIDDEN), self.weight(HIDDEN)
        if self.norm is not None:
            return self.play(self.norm, x, GAMMA=gamma, BETA=beta)
        return self.add("LayerNormalization", x, gamma, beta, epsilon=1e-12)

    def word_ids(self) -> str:
        return "input_ids"

    def type_ids(self) -> str:
        return "token_type_ids"

    def position_ids(self) -> str:
        self.weights["ids"] = np.arange(self.positions)[None]
        length = self.add("Slice", self.add("Shape", "input_ids"), "second", self.shape_of_rows("end", [2]))
        return self.add("Slice", "ids", "first", length, "second")

    def embeddings(self) -> str:
        positions = self.position_ids()
        words = self.add("Gather", self.weight(VOCAB, HIDDEN), self.word_ids())
        types = self.add("Gather", self.weight(2, HIDDEN), self.type_ids())
        rows = self.add("Gather", self.weight(self.positions, HIDDEN), positions)
        return self.layer_norm(self.add("Add", self.add("Add", words, types), rows))

    def masked(self, scores: str) -> str:
        wide = self.add("Unsqueeze", "attention_mask", self.shape_of_rows("axes", [1, 2]))
        if self.mask == "where":
            padding = self.add("Equal", wide, "first")
            return self.add("Where", padding, "low", scores)
        real = self.add("Cast", wide, to=1)
        return self.add("Add", scores, self.add("Mul", self.add("Sub", "one", real), "low"))

    def attention(self, x: str) -> str:
        q, k, v = (self.add("Reshape", self.linear(x, HIDDEN, HIDDEN), "heads") for _ in range(3))
        q, v = (self.add("Transpose", one, perm=[0, 2, 1, 3]) for one in (q, v))
        scores = self.add("MatMul", q, self.add("Transpose", k, perm=[0, 2, 3, 1]))
        probs = self.add("Softmax", self.masked(self.add("Div", scores, "dim")), axis=-1)
        context = self.add("Transpose", self.add("MatMul", probs, v), perm=[0, 2, 1, 3])
        return self.linear(self.add("Reshape", context, "flat"), HIDDEN, HIDDEN)

    def encoder(self) -> str:
        return self.layer(self.embeddings())

    def layer(self, x: str) -> str:
        x = self.layer_norm(self.add("Add", self.attention(x), x))
        inner = self.play(self.act, self.linear(x, HIDDEN, INNER))
        return self.layer_norm(self.add("Add", self.linear(inner, INNER, HIDDEN), x))

    def write(self, path: Path, **options: Any) -> Path:
        self.nodes.append(node_bytes("Identity", [self.encoder()], ["out"]))
        return self.finish(path, **options)

    def finish(self, path: Path, **options: Any) -> Path:
        path.write_bytes(model_bytes(self.nodes, self.weights, INPUTS, **options))
        return path
