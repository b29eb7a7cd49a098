"""A small ModernBERT written as an ONNX file node by node, for tests that change parts of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx_files import input_bytes, model_bytes, node_bytes
from onnx_writer import GELU, HEADS, HIDDEN, INNER, VOCAB, Writer

__all__ = ["CONFIG", "ModernWriter"]

CONFIG = {
    "model_type": "modernbert",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "intermediate_size": INNER,
    "max_position_embeddings": 40,
    "norm_eps": 1e-5,
    "hidden_activation": "gelu",
    "local_attention": 12,
    "global_attn_every_n_layers": 2,
    "global_rope_theta": 1000.0,
    "local_rope_theta": 100.0,
}
"""Of what a ``ModernWriter`` without options writes."""


class ModernWriter(Writer):
    """A global layer and then a local one. ``bases``: of the two; ``reach``: keys to each side; ``scale``: of scores;
    ``cut``: how queries, keys and values are taken apart: ``split``, ``gather``, ``slice`` or ``heads``; ``swapped``:
    whether the second half of the gated product is the gate; ``beta``: what a norm adds, None for no input.

    ``wrong``: one thing that is written another way.
    """

    def __init__(
        self,
        *,
        bases: Sequence[float] = (1000.0, 100.0),
        reach: int = 6,
        scale: float | None = None,
        heads: int = HEADS,
        cut: str = "split",
        swapped: bool = False,
        beta: float | None = None,
        eps: float = 1e-5,
        wrong: str = "",
    ) -> None:
        super().__init__(act=GELU)
        self.bases, self.reach, self.cut, self.swapped, self.beta = bases, reach, cut, swapped, beta
        self.eps, self.wrong = eps, wrong
        self.heads, self.size = heads, HIDDEN // heads
        self.weights["heads"] = np.array([0, 0, heads, -1])
        self.weights["scale"] = np.array(self.size**-0.5 if scale is None else scale, np.float32)
        self.weights |= {"minus inf": np.array(-np.inf, np.float32), "zero": np.array(0.0, np.float32)}
        for name in ("start", "step", "place"):
            self.weights[name] = np.array({"start": 0, "step": 1, "place": 1}[name])

    def numbers(self, *values: int) -> str:
        return self.shape_of_rows("i", list(values))

    def positions_of(self) -> str:
        length = self.add("Gather", self.add("Shape", "input_ids"), "place", axis=0)
        return self.add("Range", "start", length, "step")

    def cosines(self, base: float) -> tuple[str, str]:
        inverse = base ** (-np.arange(0, self.size, 2) / self.size)
        if self.wrong == "frequency":
            inverse[1] *= 1.001
        name = f"inverse {base}"
        self.weights[name] = inverse.astype(np.float32)[None]
        columns = self.add("Unsqueeze", self.add("Cast", self.positions_of(), to=1), self.numbers(1))
        half = self.add("Mul", columns, name)
        if self.wrong == "interleaved":
            pairs = self.add("Unsqueeze", half, self.numbers(2))
            whole = self.add("Reshape", self.add("Concat", pairs, pairs, axis=2), self.numbers(-1, self.size))
        else:
            whole = self.add("Concat", half, half, axis=1)
        made = []
        for op in ("Cos", "Sin"):
            angles = self.add(op, whole)
            if self.wrong == "amplitude":
                self.weights["larger"] = np.array(1.01, np.float32)
                angles = self.add("Mul", angles, "larger")
            made.append(self.add("Unsqueeze", angles, self.numbers(0, 1)))
            if self.wrong == "by head":
                self.weights["heads' own"] = np.array([1.0, 1.01], np.float32).reshape(1, 2, 1, 1)
                made[-1] = self.add("Mul", made[-1], "heads' own")
        return made[0], made[1]

    def turned(self, x: str, base: float, other: str) -> str:
        """``x`` by its positions; ``other``: the rows that are turned where that is what is wrong."""
        cosines, sines = self.cosines(base)
        middle, last = self.numbers(self.size // 2), self.numbers(3)
        if self.cut == "heads":
            first, second = f"{x} first", f"{x} second"
            halves = self.numbers(self.size // 2, self.size // 2)
            self.nodes.append(node_bytes("Split", [x, halves], [first, second], axis=-1))
        else:
            first = self.add("Slice", x, self.numbers(0), middle, last)
            second = self.add("Slice", x, middle, self.numbers(1 << 40), last)
        if self.wrong != "not negated":
            second = self.add("Neg", second)
        x = other if self.wrong == "crossed" else x
        pair = (first, second) if self.wrong == "halves" else (second, first)
        return self.add("Add", self.add("Mul", x, cosines), self.add("Mul", self.add("Concat", *pair, axis=-1), sines))

    def packed(self, x: str) -> list[str]:
        """Queries, keys and values, [batch, heads, sequence, columns] each."""
        product = self.add("MatMul", x, self.weight(HIDDEN, 3 * HIDDEN))
        parts = []
        if self.cut == "slice":
            ends = [(place * HIDDEN, (place + 1) * HIDDEN) for place in range(3)]
            parts = [self.add("Slice", product, self.numbers(a), self.numbers(b), self.numbers(2)) for a, b in ends]
            parts = [self.add("Reshape", one, "heads") for one in parts]
        else:
            axis, sizes = (3, (self.heads, 3)) if self.wrong == "head by head" else (2, (3, self.heads))
            whole = self.add("Reshape", product, self.numbers(0, 0, *sizes, self.size))
            if self.cut == "gather":
                for place in range(3):
                    self.weights[f"at {place}"] = np.array(place)
                    parts.append(self.add("Gather", whole, f"at {place}", axis=axis))
            else:
                names = [f"{product} {place}" for place in range(3)]
                self.nodes.append(node_bytes("Split", [whole, self.numbers(1, 1, 1)], names, axis=axis))
                parts = [self.add("Squeeze", name, self.numbers(axis)) for name in names]
        return [self.add("Transpose", one, perm=[0, 2, 1, 3]) for one in parts]

    def hidden(self, reach: int | None) -> str:
        """What is added to scores: 0 or minus infinity, [batch, 1, sequence, sequence]."""
        seen = self.add("Cast", self.add("Unsqueeze", "attention_mask", self.numbers(1, 2)), to=9)
        if reach is not None:
            places = self.positions_of()
            rows, columns = (self.add("Unsqueeze", places, self.numbers(axis)) for axis in (1, 0))
            distance = self.add("Sub", rows, columns)
            if self.wrong != "one-sided":
                distance = self.add("Abs", distance)
            seen = self.add("And", seen, self.add("LessOrEqual", distance, self.numbers(reach)))
        return self.add("Where", seen, "zero", "minus inf")

    def modern_attention(self, x: str, base: float, reach: int | None) -> str:
        q, k, v = self.packed(x)
        q, k = self.turned(q, base, k), self.turned(k, base, q)
        scores = self.add("Mul", self.add("MatMul", q, self.add("Transpose", k, perm=[0, 1, 3, 2])), "scale")
        probs = self.add("Softmax", self.add("Add", scores, self.hidden(reach)), axis=-1)
        context = self.add("Transpose", self.add("MatMul", probs, v), perm=[0, 2, 1, 3])
        return self.add("MatMul", self.add("Reshape", context, "flat"), self.weight(HIDDEN, HIDDEN))

    def feed_forward(self, x: str) -> str:
        product = self.add("MatMul", x, self.weight(HIDDEN, 2 * INNER))
        names = [f"{product} gate", f"{product} up"]
        self.nodes.append(node_bytes("Split", [product, self.numbers(INNER, INNER)], names, axis=-1))
        gate, up = names[::-1] if self.swapped else names
        inner = self.add("Mul", self.play(self.act, gate), up)
        return self.add("MatMul", inner, self.weight(INNER, HIDDEN))

    def layer_norm(self, x: str) -> str:
        inputs = [x, self.weight(HIDDEN)]
        if self.beta is not None:
            name = f"beta {self.beta}"
            self.weights[name] = np.full(HIDDEN, self.beta, np.float32)
            inputs.append(name)
        return self.add("LayerNormalization", *inputs, epsilon=self.eps)

    def encoder(self) -> str:
        x = self.layer_norm(self.add("Gather", self.weight(VOCAB, HIDDEN), "input_ids"))
        for layer, base in enumerate(self.bases):
            read = self.layer_norm(x) if layer else x
            x = self.add("Add", x, self.modern_attention(read, base, self.reach if layer else None))
            x = self.add("Add", x, self.feed_forward(self.layer_norm(x)))
        return self.layer_norm(x)

    def beside(self, folder: Path, **changes: Any) -> Path:
        """Writes the file and its config.json with ``changes`` into ``folder``."""
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
        return self.write(folder / "net.onnx")

    def finish(self, path: Path, **options: Any) -> Path:
        inputs = [input_bytes(name) for name in ("input_ids", "attention_mask")]
        path.write_bytes(model_bytes(self.nodes, self.weights, inputs, **options))
        return path
