"""Plain graphs in the form that architectures build, small and with switches for the near misses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from encast.batch import Batch
from encast.ir import FusionPromise, Graph, GraphMeta
from encast.ir.types import ValueType

META = GraphMeta(
    arch="bert",
    task="embed",
    hidden=32,
    layers=2,
    heads=2,
    vocab=50,
    type_vocab=2,
    max_len=24,
    labels=None,
    problem_type=None,
    similarity="cosine",
    expected={
        "qkv": FusionPromise(1, 0),
        "attention": FusionPromise(1, 0),
        "linear_activation": FusionPromise(1, 0),
        "add_layer_norm": FusionPromise(2, 0),
        "embed_layer_norm": FusionPromise(0, 1),
    },
    math="fast",
    dtype="f32",
)
"""Facts for tests to ``replace`` those that they are about."""


class Builder:
    """Builds a post-norm encoder; every weight is random with non-zero biases and norms away from one."""

    def __init__(
        self,
        *,
        hidden: int = 32,
        heads: int = 2,
        inner: int = 64,
        layers: int = 2,
        vocab: int = 50,
        type_vocab: int = 2,
        max_len: int = 24,
        seed: int = 0,
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.hidden, self.heads, self.inner, self.layers = hidden, heads, inner, layers
        self.vocab, self.type_vocab, self.max_len = vocab, type_vocab, max_len
        self.graph = Graph()
        self.graph.meta = replace(
            META,
            hidden=hidden,
            layers=layers,
            heads=heads,
            vocab=vocab,
            type_vocab=type_vocab,
            max_len=max_len,
        )
        self.graph.add_input("token_ids", ValueType("i32", ("tokens",)))

    def array(self, *shape: int, scale: float = 1.0, offset: float = 0.0) -> np.ndarray[Any, Any]:
        return (self.random.standard_normal(shape) * scale + offset).astype(np.float32)

    def constant(self, name: str, *shape: int, scale: float = 1.0, offset: float = 0.0) -> str:
        if name in self.graph.constants:
            return name
        return self.graph.add_constant(name, self.array(*shape, scale=scale, offset=offset))

    def linear(self, x: str, name: str, outputs: int, layer: int = -1, weights: str = "", bias: bool = True) -> str:
        inputs = int(self.graph.type_of(x).shape[1])
        weights = weights or name
        operands = [self.constant(f"{weights}.weight", outputs, inputs, scale=1 / np.sqrt(inputs))]
        if bias:
            operands.append(self.constant(f"{weights}.bias", outputs, scale=0.3))
        return self.graph.add("linear", x, *operands, name=name, layer=layer, activation="none")

    def norm(self, x: str, name: str, layer: int = -1, weights: str = "") -> str:
        weights = weights or name
        size = int(self.graph.type_of(x).shape[1])
        gamma = self.constant(f"{weights}.weight", size, scale=0.2, offset=1.3)
        beta = self.constant(f"{weights}.bias", size, scale=0.2)
        return self.graph.add("layer_norm", x, gamma, beta, name=name, layer=layer, eps=1e-12)

    def embeddings(self, *, positions: bool = True, order: str = "wtp", skip_id: int = -1) -> str:
        graph, hidden = self.graph, self.hidden
        terms = {"w": ("token_ids", "word", self.vocab)}
        if self.type_vocab:
            graph.add_input("token_type_ids", ValueType("i32", ("tokens",)))
            terms["t"] = ("token_type_ids", "token_type", self.type_vocab)
        if positions:
            offset = 0 if skip_id < 0 else skip_id + 1
            ids = graph.add("position_ids", "token_ids", name="embeddings.ids", offset=offset, skip_id=skip_id)
            terms["p"] = (ids, "position", self.max_len + offset)
        total = ""
        for kind in order:
            if kind not in terms:
                continue
            ids, table, rows = terms[kind]
            constant = self.constant(f"embeddings.{table}.weight", rows, hidden)
            row = graph.add("embedding", ids, constant, name=f"embeddings.{table}")
            total = graph.add("add", total, row, name=f"embeddings.sum_{kind}") if total else row
        return self.norm(total, "embeddings.LayerNorm")

    def attention(
        self, x: str, path: str, layer: int, *, weights: str = "", relative: bool = False, scale: str = "scores"
    ) -> str:
        """``scale``: where the factor stands: ``scores``, ``q`` or ``none``."""
        graph, weights = self.graph, weights or path
        q, k, v = (
            self.linear(x, f"{path}.self.{part}", self.hidden, layer, f"{weights}.self.{part}")
            for part in ("query", "key", "value")
        )
        factor = float(1 / np.sqrt(self.hidden / self.heads))
        if scale == "q":
            q = graph.add("scale", q, name=f"{path}.scaled_q", layer=layer, factor=factor)
        scores = graph.add("attention_scores", q, k, name=f"{path}.scores", layer=layer, heads=self.heads)
        if scale == "scores":
            scores = graph.add("scale", scores, name=f"{path}.scaled", layer=layer, factor=factor)
        if relative:
            table = self.constant("encoder.relative.weight", 8, self.heads)
            scores = graph.add("relative_bias", scores, table, name=f"{path}.biased", layer=layer, max_distance=16)
        probs = graph.add("softmax", scores, name=f"{path}.probs", layer=layer)
        return graph.add("attention_context", probs, v, name=f"{path}.context", layer=layer)

    def layer(self, x: str, layer: int, *, shared: bool = False, activation: str = "gelu", **attention: Any) -> str:
        graph, path = self.graph, f"encoder.layer.{layer}"
        weights = "encoder.shared" if shared else path
        context = self.attention(x, f"{path}.attention", layer, weights=f"{weights}.attention", **attention)
        out = self.linear(context, f"{path}.attention.output", self.hidden, layer, f"{weights}.attention.output")
        total = graph.add("add", out, x, name=f"{path}.attention.sum", layer=layer)
        attended = self.norm(total, f"{path}.attention.norm", layer, f"{weights}.attention.norm")
        inner = self.linear(attended, f"{path}.inner", self.inner, layer, f"{weights}.inner")
        inner = graph.add("activation", inner, name=f"{path}.activation", layer=layer, kind=activation)
        out = self.linear(inner, f"{path}.output", self.hidden, layer, f"{weights}.output")
        total = graph.add("add", out, attended, name=f"{path}.sum", layer=layer)
        return self.norm(total, f"{path}.norm", layer, f"{weights}.norm")


def encoder(*, order: str = "wtp", positions: bool = True, skip_id: int = -1, **options: Any) -> Graph:
    """A whole embedding model; ``options`` go to ``Builder`` (sizes) and ``Builder.layer`` (the rest)."""
    sizes = {"hidden", "heads", "inner", "layers", "vocab", "type_vocab", "max_len", "seed"}
    builder = Builder(**{key: value for key, value in options.items() if key in sizes})
    layer_options = {key: value for key, value in options.items() if key not in sizes}
    x = builder.embeddings(order=order, positions=positions, skip_id=skip_id)
    for layer in range(builder.layers):
        x = builder.layer(x, layer, **layer_options)
    builder.graph.outputs["last_hidden_state"] = x
    pooled = builder.graph.add("pooling", x, name="pooling", modes=["mean"])
    builder.graph.outputs["embedding"] = builder.graph.add("normalize", pooled, name="normalize")
    return builder.graph


def masked_lm(**options: Any) -> Graph:
    """An encoder whose decoder multiplies by the word table."""
    builder = Builder(**options)
    graph = builder.graph
    x = builder.layer(builder.embeddings(), 0)
    graph.meta = replace(graph.meta, layers=1, task="fill_mask")
    graph.add_input("select", ValueType("i32", ("selected",)))
    rows = graph.add("select_rows", x, "select", name="cls.select")
    bias = builder.constant("cls.decoder.bias", builder.vocab)
    logits = graph.add("linear", rows, "embeddings.word.weight", bias, name="cls.decoder", activation="none")
    graph.outputs = {"last_hidden_state": x, "logits": logits}
    return graph


def batch(graph: Graph, *, seed: int = 1, lengths: tuple[int, ...] = (7, 1, 20, 3)) -> Batch:
    random = np.random.default_rng(seed)
    ids = [random.integers(0, graph.meta.vocab, length).tolist() for length in lengths]
    types = [random.integers(0, max(1, graph.meta.type_vocab), length).tolist() for length in lengths]
    return Batch.of(ids, types)
