"""What all classic BERT-family encoders share: the embedding sum and the post-norm layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from encast.archs.config import Config
from encast.archs.modules import Modules
from encast.errors import CheckpointError, UnsupportedModelError

__all__ = ["LayerPaths", "Sizes", "encoder_layer", "sum_embeddings"]

# A graph has about 17 nodes a layer, and layers that share their weights cost the checkpoint nothing.
MOST_LAYERS = 1024
WIDEST_HEAD = 1024
"""Columns of a head, for which attention kernels have scratch memory."""
WIDEST = 1 << 16
"""Columns that a product may sum over: 255 * 127 times as many fit an int32."""


@dataclass(frozen=True)
class Sizes:
    """The numbers that a config gives; the names are those of ``Graph.meta`` where they appear there.

    ``embedding`` is the width of the embedding tables, ``positions`` the rows of the position table, ``eps`` the layer
    norms' epsilon, ``activation`` that of the feed-forward part.
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    inner: int
    positions: int
    type_vocab: int
    eps: float
    activation: str
    embedding: int = field(default=0)

    def __post_init__(self) -> None:
        if not self.embedding:
            object.__setattr__(self, "embedding", self.hidden)

    @staticmethod
    def read(config: Config, *, eps: float = 1e-12, activation: str = "gelu", type_vocab: int | None = None) -> Sizes:
        """The fields as BERT's config names them; the defaults are those of the architecture."""
        return Sizes(
            vocab=config.count("vocab_size"),
            hidden=config.count("hidden_size"),
            layers=config.count("num_hidden_layers", most=MOST_LAYERS),
            heads=config.count("num_attention_heads"),
            inner=config.count("intermediate_size"),
            positions=config.count("max_position_embeddings", default=512),
            type_vocab=config.count("type_vocab_size", default=2) if type_vocab is None else type_vocab,
            eps=config.eps("layer_norm_eps", eps),
            activation=config.activation("hidden_act", default=activation),
        ).checked(config)

    def checked(self, config: Config) -> Sizes:
        """Itself, if the heads divide the hidden size, else raises ``CheckpointError``; ``UnsupportedModelError`` for
        sizes that the kernels do not have.
        """
        if self.hidden % self.heads:
            raise CheckpointError(
                f"{config.where}: the hidden size is {self.hidden} and the number of attention heads {self.heads}, "
                "which does not divide it: correct the file"
            )
        if self.hidden // self.heads > WIDEST_HEAD or max(self.hidden, self.inner, self.embedding) > WIDEST:
            raise UnsupportedModelError(
                f"{config.where}: {self.heads} heads of {self.hidden // self.heads} columns, {self.inner} inner ones, "
                f"tables of {self.embedding}; encast has heads of at most {WIDEST_HEAD} and all else of {WIDEST}"
            )
        return self


@dataclass(frozen=True)
class LayerPaths:
    """Where the parts of a layer stand below the layer's own path; the defaults are BERT's."""

    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    attention_output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    inner: str = "intermediate.dense"
    output: str = "output.dense"
    output_norm: str = "output.LayerNorm"


def sum_embeddings(
    encoder: Modules,
    sizes: Sizes,
    *,
    offset: int = 0,
    skip_id: int = -1,
    positions: bool = True,
    norm: str = "embeddings.LayerNorm",
) -> str:
    """Word, token-type and position rows added in this order, then layer norm: f32[tokens, embedding].

    With ``type_vocab`` 0 there is no token-type table, without ``positions`` none of those. ``offset`` and ``skip_id``
    are those of op ``position_ids``; ``norm`` is where the layer norm's tensors stand.
    """
    graph, dim = encoder.graph, sizes.embedding
    total = encoder.embedding("token_ids", "embeddings.word_embeddings", sizes.vocab, dim)
    if sizes.type_vocab:
        types = encoder.embedding("token_type_ids", "embeddings.token_type_embeddings", sizes.type_vocab, dim)
        total = graph.add("add", total, types, name="embeddings.word_and_token_type")
    if positions:
        ids = graph.add("position_ids", "token_ids", name="embeddings.position_ids", offset=offset, skip_id=skip_id)
        rows = encoder.embedding(ids, "embeddings.position_embeddings", sizes.positions, dim)
        total = graph.add("add", total, rows, name="embeddings.sum")
    return encoder.layer_norm(total, norm, dim, sizes.eps, name="embeddings.LayerNorm")


def encoder_layer(
    encoder: Modules,
    x: str,
    sizes: Sizes,
    *,
    layer: int,
    path: str,
    weights: str = "",
    paths: LayerPaths | None = None,
    relative: tuple[str, int] | None = None,
    score: Callable[[str, str], str] | None = None,
) -> str:
    """One post-norm layer: attention, add, norm, feed-forward, add, norm (Vaswani et al. 2017; Devlin et al. 2019).

    ``path`` names the nodes; ``weights`` is where the tensors stand if that differs (layers that share weights).
    ``relative``: a constant ``f32[buckets, heads]`` and the rule's greatest distance, added to the scaled scores.
    ``score`` makes the scores of the queries and keys that it is given; without it they are their scaled products.
    """
    paths = paths or LayerPaths()
    graph, hidden = encoder.graph, sizes.hidden

    def linear(x: str, part: str, size: int, inner: int) -> str:
        at = f"{weights or path}.{part}"
        return encoder.linear(x, at, size, inner, name=f"{path}.{part}", layer=layer)

    def add_and_norm(x: str, residual: str, part: str) -> str:
        total = graph.add("add", x, residual, name=f"{path}.{part}.sum", layer=layer)
        at = f"{weights or path}.{part}"
        return encoder.layer_norm(total, at, hidden, sizes.eps, name=f"{path}.{part}", layer=layer)

    query = linear(x, paths.query, hidden, hidden)
    key = linear(x, paths.key, hidden, hidden)
    value = linear(x, paths.value, hidden, hidden)
    at = f"{path}.attention"
    scores = score(query, key) if score is not None else _scaled_scores(encoder, query, key, sizes, at, layer)
    if relative is not None:
        table, reach = relative
        scores = graph.add("relative_bias", scores, table, name=f"{at}.biased_scores", layer=layer, max_distance=reach)
    probs = graph.add("softmax", scores, name=f"{at}.probs", layer=layer)
    context = graph.add("attention_context", probs, value, name=f"{at}.context", layer=layer)
    attended = add_and_norm(linear(context, paths.attention_output, hidden, hidden), x, paths.attention_norm)
    inner = linear(attended, paths.inner, sizes.inner, hidden)
    inner = encoder.activation(inner, sizes.activation, name=f"{path}.{paths.inner}.activation", layer=layer)
    return add_and_norm(linear(inner, paths.output, hidden, sizes.inner), attended, paths.output_norm)


def _scaled_scores(encoder: Modules, query: str, key: str, sizes: Sizes, at: str, layer: int) -> str:
    graph = encoder.graph
    scores = graph.add("attention_scores", query, key, name=f"{at}.scores", layer=layer, heads=sizes.heads)
    factor = 1.0 / math.sqrt(sizes.hidden // sizes.heads)
    return graph.add("scale", scores, name=f"{at}.scaled_scores", layer=layer, factor=factor)
