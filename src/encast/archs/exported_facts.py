"""The sizes that an exported graph has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from encast.archs.comparison import alike
from encast.archs.encoder import MOST_LAYERS
from encast.archs.export_like import ExportLike, OutputLike
from encast.archs.exported_heads import above
from encast.errors import UnsupportedModelError
from encast.ir import Graph, Node

__all__ = ["Facts", "facts_of"]

_POSITIONS = ("relative_scores", "rotary")
"""Ops of attention that know of positions: a graph with them may have no table."""


@dataclass(frozen=True)
class Facts:
    """The sizes of an exported graph, by the names of ``Sizes``; ``positions`` is 0 where there is no table of them."""

    vocab: int
    embedding: int
    hidden: int
    layers: int
    heads: int
    inner: int
    positions: int
    skip_id: int
    type_vocab: int
    eps: float
    activation: str
    distinct: tuple[int, ...] = field(default=())
    """For each layer the first one with the same weights."""

    def config(self, model_type: str) -> dict[str, Any]:
        """The fields of config.json that say so."""
        shared: dict[str, Any] = {"vocab_size": self.vocab}
        if self.positions:
            shared["max_position_embeddings"] = self.positions
        if model_type == "distilbert":
            return shared | {
                "dim": self.hidden,
                "n_layers": self.layers,
                "n_heads": self.heads,
                "hidden_dim": self.inner,
                "activation": self.activation,
                # What DistilBERT's layer norms have in transformers is fixed; the graph is compared with that.
            }
        fields = shared | {
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.inner,
            "hidden_act": self.activation,
            "layer_norm_eps": self.eps,
        }
        if model_type == "eurobert":
            fields["rms_norm_eps"] = fields.pop("layer_norm_eps")
        elif model_type == "modernbert":
            fields["norm_eps"] = fields.pop("layer_norm_eps")
            fields["hidden_activation"] = fields.pop("hidden_act")
        elif model_type != "mpnet":
            fields["type_vocab_size"] = self.type_vocab
        if model_type in ("electra", "albert"):
            fields["embedding_size"] = self.embedding
        if model_type in ("roberta", "xlm-roberta", "camembert") and self.skip_id >= 0:
            fields["pad_token_id"] = self.skip_id
        return fields


def facts_of(export: ExportLike, output: OutputLike) -> Facts:
    """The sizes of the encoder that an output is made by; raises ``UnsupportedModelError`` where none makes it."""
    graph = export.graph
    nodes = above(graph, output.value)

    def table(ids: Callable[[str], bool]) -> tuple[int, int]:
        shapes = [
            graph.type_of(node.inputs[1]).shape for node in nodes if node.op == "embedding" and ids(node.inputs[0])
        ]
        return (int(shapes[0][0]), int(shapes[0][1])) if shapes else (0, 0)

    positions = {node.outputs[0]: node for node in nodes if node.op == "position_ids"}
    scores = [node for node in nodes if node.op == "attention_scores"]
    norms = [node for node in nodes if node.op in ("layer_norm", "rms_norm")]
    words, _ = table(lambda ids: ids == "token_ids")
    rows, _ = table(lambda ids: ids in positions)
    inside = any(node.op in _POSITIONS for node in nodes)
    missing = [
        what
        for what, there in (
            ("a table of words", words),
            ("a table of positions", rows or inside),
            ("attention", scores),
            ("layer norms", norms),
        )
        if not there
    ]
    if missing:
        raise UnsupportedModelError(
            f"{export.where}: the output {output.name!r} is made without {', '.join(missing)}; encoders of the BERT "
            "family have words, positions, attention and layer norms"
        )
    if len(scores) > MOST_LAYERS:
        raise UnsupportedModelError(
            f"{export.where}: the output {output.name!r} is made with {len(scores)} attentions; encoders have at most "
            f"{MOST_LAYERS} layers"
        )
    # The first activation behind the first attention is that of the feed-forward part.
    after = nodes[nodes.index(scores[0]) :]
    acts = [node for node in after if node.op in ("activation", "gated_activation")]
    inner = int(graph.type_of(acts[0].outputs[0]).shape[1]) if acts else 1
    weights = [graph.constants[_producer(graph, node.inputs[0]).inputs[1]].array for node in scores]
    distinct = tuple(
        next(first for first in range(layer + 1) if alike(weights[first], weights[layer]))
        for layer in range(len(scores))
    )
    return Facts(
        vocab=words,
        embedding=table(lambda ids: ids == "token_ids")[1],
        hidden=int(graph.type_of(scores[0].inputs[0]).shape[1]),
        layers=len(scores),
        heads=int(scores[0].attrs["heads"]),
        inner=inner,
        positions=rows,
        skip_id=int(next(iter(positions.values())).attrs["skip_id"]) if positions else -1,
        type_vocab=table(lambda ids: ids == "token_type_ids")[0],
        eps=float(norms[0].attrs["eps"]),
        activation=str(acts[0].attrs["kind"]) if acts else "gelu",
        distinct=distinct,
    )


def _producer(graph: Graph, value: str) -> Node:
    node = graph.producer(value)
    while node is not None and node.op != "linear":
        node = graph.producer(node.inputs[0])
    if node is None:
        raise UnsupportedModelError("the queries of an attention are made by no product with a weight")
    return node
