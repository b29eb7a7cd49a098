"""DeBERTa v2 and v3 (He et al. 2021): scores that know of distances, by projected tables of relative positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import numpy as np

from encast.archs.base import Architecture, architecture
from encast.archs.config import Config
from encast.archs.encoder import MOST_LAYERS, WIDEST, LayerPaths, Sizes, encoder_layer
from encast.archs.heads import classify_first_token, predict_tokens, transform
from encast.archs.modules import Modules
from encast.archs.weights import Weights
from encast.errors import UnsupportedModelError
from encast.ir import FusionPromise, Graph

__all__ = ["DebertaV2"]

_SELF = "attention.self"
_PATHS = LayerPaths(query=f"{_SELF}.query_proj", key=f"{_SELF}.key_proj", value=f"{_SELF}.value_proj")
_SIDES = {"c2p": "query", "p2c": "key"}
"""Content to position: the query's row by a vector of the distance; position to content: the key's."""
_LEGACY, _LM = "cls.predictions", "lm_predictions.lm_head"
_MOST_POSITIONS = 1 << 13


@architecture("deberta-v2")
class DebertaV2(Architecture):
    """Heads: dense and activation on the first token, then the labels; masked LM in two forms, see ``fill_mask``.

    The table of relative positions, normalised where ``norm_rel_ebd`` says so, is projected by each layer:
    by its own query and key projections (``share_att_key``), or by projections of positions alone. A convolution over
    the embeddings may be added behind the first layer (``conv_kernel_size``).
    """

    prefix = "deberta."
    stem = ("DebertaV2",)
    told_by_graph = False
    markers: ClassVar[Mapping[str, str]] = {
        "classify": "classifier.weight",
        "tag": "classifier.weight",
        "answer": "qa_outputs.weight",
        "fill_mask": f"{_LEGACY}.transform.dense.weight",
    }
    unread = (
        r"(deberta\.)?embeddings\.position_embeddings\.weight",  # there without position_biased_input too
        r"pooler\.dense\.\w+",
        r"cls\..*",
        r"lm_predictions\..*",
        r"mask_predictions\..*",  # which tokens ELECTRA's way of training replaced
        r"classifier\.\w+",
        r"qa_outputs\.\w+",
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.absolute = config.flag("position_biased_input", True)
        sizes = self.sizes
        config.refuse_unless("attention_head_size", sizes.hidden // sizes.heads)
        config.refuse_unless("pooler_hidden_size", sizes.hidden)
        self.sides = config.words("pos_att_type")
        _need_words(config, "pos_att_type", self.sides, tuple(_SIDES))
        norms = config.words("norm_rel_ebd")
        _need_words(config, "norm_rel_ebd", norms, ("none", "layer_norm"))
        self.relative = config.flag("relative_attention", False)
        self.shared = config.flag("share_att_key", False)
        self.norm_table = "layer_norm" in norms
        self.span, self.max_distance = _read_span(config, sizes.positions)
        self.conv_width = config.count("conv_kernel_size", default=0, least=0, most=sizes.positions)
        if self.conv_width:
            config.refuse_unless("conv_groups", 1)
            if self.conv_width % 2 == 0 or self.conv_width * sizes.hidden > WIDEST:
                raise UnsupportedModelError(
                    f"{config.where}: conv_kernel_size is {self.conv_width}; encast has windows of an odd number of "
                    f"tokens, which have a middle, of at most {WIDEST} columns together"
                )
        self.legacy = config.flag("legacy", True)

    def read_sizes(self) -> Sizes:
        config = self.config
        hidden = config.count("hidden_size")
        return Sizes(
            vocab=config.count("vocab_size"),
            hidden=hidden,
            layers=config.count("num_hidden_layers", most=MOST_LAYERS),
            heads=config.count("num_attention_heads"),
            inner=config.count("intermediate_size"),
            # Without a table of positions no tensor bounds it, and those of distances are made for all of them.
            positions=config.count("max_position_embeddings", default=512, most=_MOST_POSITIONS),
            type_vocab=config.count("type_vocab_size", default=0, least=0),
            eps=config.eps("layer_norm_eps", 1e-7),
            activation=config.activation("hidden_act", default="gelu"),
            embedding=config.count("embedding_size", default=hidden),
        ).checked(config)

    @classmethod
    def has_head(cls, task: str, weights: Weights) -> bool:
        return super().has_head(task, weights) or (task == "fill_mask" and f"{_LM}.dense.weight" in weights)

    def promises(self, graph: Graph) -> dict[str, FusionPromise]:
        return {**super().promises(graph), "add_layer_norm": FusionPromise(2, int(self.conv_width > 0))}

    def encode(self, encoder: Modules) -> str:
        embedded = x = self._embed(encoder)
        table = self._positions(encoder)
        for layer in range(self.sizes.layers):
            path = f"encoder.layer.{layer}"
            x = encoder_layer(
                encoder,
                x,
                self.sizes,
                layer=layer,
                path=path,
                paths=_PATHS,
                score=partial(self._scores, encoder, table, layer),
            )
            if layer == 0 and self.conv_width:
                x = self._convolve(encoder, embedded, x)
        return x

    def classify(self, encoder: Modules, head: Modules, x: str, labels: int) -> str:
        return classify_first_token(
            head,
            head,
            x,
            self.sizes.hidden,
            labels,
            dense_path="pooler.dense",
            out_path="classifier",
            activation=self.config.activation("pooler_hidden_act", default="gelu"),
        )

    def fill_mask(self, encoder: Modules, head: Modules, x: str) -> str:
        """With ``legacy`` BERT's head, as wide as the tables; else the released one, which has the words' own table."""
        sizes, at = self.sizes, _LEGACY if self.legacy else _LM
        dense = f"{at}.transform.dense" if self.legacy else f"{at}.dense"
        other = f"{_LM}.dense.weight" if self.legacy else f"{_LEGACY}.transform.dense.weight"
        if not head.has(f"{dense}.weight") and head.has(other):
            raise UnsupportedModelError(
                f"{self.config.where}: legacy is {str(self.legacy).lower()}, which says that the masked-LM head is "
                f"{dense!r}; the checkpoint has {other!r}: set legacy to {str(not self.legacy).lower()}"
            )
        if not self.legacy and sizes.embedding != sizes.hidden:
            raise UnsupportedModelError(
                f"{self.config.where}: embedding_size is {sizes.embedding} and hidden_size {sizes.hidden}; the "
                "masked-LM head without legacy multiplies by the table of words, and needs both alike"
            )
        width = sizes.embedding if self.legacy else sizes.hidden
        norm = f"{at}.transform.LayerNorm" if self.legacy else f"{at}.LayerNorm"
        x = transform(head, x, sizes, width, dense=dense, norm=norm, activation=sizes.activation)
        tied = not self.legacy or self.config.flag("tie_word_embeddings", True)
        return predict_tokens(encoder, head, x, sizes, width, decoder=f"{at}.decoder", bias=f"{at}.bias", tied=tied)

    def _embed(self, encoder: Modules) -> str:
        """Word, position and token-type rows added as far as there are tables, projected to the hidden size, norm."""
        graph, sizes, dim = encoder.graph, self.sizes, self.sizes.embedding
        x = encoder.embedding("token_ids", "embeddings.word_embeddings", sizes.vocab, dim)
        if self.absolute:
            ids = graph.add("position_ids", "token_ids", name="embeddings.position_ids", offset=0, skip_id=-1)
            rows = encoder.embedding(ids, "embeddings.position_embeddings", sizes.positions, dim)
            x = graph.add("add", x, rows, name="embeddings.word_and_position")
        if sizes.type_vocab:
            types = encoder.embedding("token_type_ids", "embeddings.token_type_embeddings", sizes.type_vocab, dim)
            x = graph.add("add", x, types, name="embeddings.sum")
        if dim != sizes.hidden:
            x = encoder.linear(x, "embeddings.embed_proj", sizes.hidden, dim, bias=False)
        return encoder.layer_norm(x, "embeddings.LayerNorm", sizes.hidden, sizes.eps)

    def _positions(self, encoder: Modules) -> str:
        """The table of relative positions, f32[2 * span, hidden], or "" where no score reads it."""
        hidden, table, norm = self.sizes.hidden, "encoder.rel_embeddings.weight", "encoder.LayerNorm"
        if self.relative and self.sides:
            rows = encoder.constant(table, 2 * self.span, hidden)
            return encoder.layer_norm(rows, norm, hidden, self.sizes.eps) if self.norm_table else rows
        # transformers makes and saves both all the same.
        if self.relative and encoder.has(table):
            encoder.array(table, 2 * self.span, hidden)
        for name in (f"{norm}.weight", f"{norm}.bias") if self.norm_table else ():
            if encoder.has(name):
                encoder.array(name, hidden)
        return ""

    def _scores(self, encoder: Modules, table: str, layer: int, query: str, key: str) -> str:
        """Content by content, content by position, position by content, all scaled by their number."""
        graph, sizes, at = encoder.graph, self.sizes, f"encoder.layer.{layer}.attention"
        scores = graph.add("attention_scores", query, key, name=f"{at}.scores", layer=layer, heads=sizes.heads)
        for side in _SIDES if table else ():
            if side not in self.sides:
                continue
            # What the queries meet are keys of positions, and the other way round.
            part = {"c2p": "key", "p2c": "query"}[side]
            path = f"encoder.layer.{layer}.{_SELF}.{'' if self.shared else 'pos_'}{part}_proj"
            name = f"encoder.layer.{layer}.{_SELF}.pos_{part}"
            # Of no layer: it is made at compile time, once, and no token is multiplied by it.
            made = encoder.linear(table, path, sizes.hidden, sizes.hidden, name=name)
            scores = graph.add(
                "relative_scores",
                scores,
                {"c2p": query, "p2c": key}[side],
                made,
                name=f"{at}.{side}_scores",
                layer=layer,
                of=_SIDES[side],
                max_distance=self.max_distance,
            )
        factor = 1.0 / math.sqrt(sizes.hidden // sizes.heads * (1 + len(set(self.sides))))
        return graph.add("scale", scores, name=f"{at}.scaled_scores", layer=layer, factor=factor)

    def _convolve(self, encoder: Modules, embedded: str, x: str) -> str:
        """A convolution over the tokens' embeddings, activation, added to the first layer's output, norm."""
        graph, hidden, width, at = encoder.graph, self.sizes.hidden, self.conv_width, "encoder.conv"
        # [out, in, token of the window] becomes a product with the window's rows side by side.
        weight = encoder.array(f"{at}.conv.weight", hidden, hidden, width).transpose(0, 2, 1).reshape(hidden, -1)
        name = graph.add_constant(f"{at}.conv.weight[window]", np.ascontiguousarray(weight))
        rows = graph.add("window_rows", embedded, name=f"{at}.window", width=width)
        made = graph.add(
            "linear", rows, name, encoder.constant(f"{at}.conv.bias", hidden), name=f"{at}.conv", activation="none"
        )
        kind = self.config.activation("conv_act", default="tanh")
        made = encoder.activation(made, kind, name=f"{at}.conv.activation")
        total = graph.add("add", x, made, name=f"{at}.sum")
        return encoder.layer_norm(total, f"{at}.LayerNorm", hidden, self.sizes.eps)


def _need_words(config: Config, field: str, found: list[str], known: tuple[str, ...]) -> None:
    for word in found:
        if word not in known:
            raise UnsupportedModelError(
                f"{config.where}: {field} has {word!r}, which encast does not have; it has {list(known)}"
            )


def _read_span(config: Config, positions: int) -> tuple[int, int]:
    """Half of the rows of the table, and the distance up to which buckets are logarithmic, 0: there are none."""
    buckets = config.count("position_buckets", default=-1, least=-1, most=_MOST_POSITIONS)
    furthest = config.count("max_relative_positions", default=-1, least=-1, most=_MOST_POSITIONS)
    if furthest < 1:
        furthest = positions
    if buckets < 1:
        return furthest, 0
    if buckets < 4 or furthest - 1 <= buckets // 2:
        raise UnsupportedModelError(
            f"{config.where}: position_buckets is {buckets} and the largest distance {furthest}; encast has at least 4 "
            "buckets, of which the exact half ends before that distance"
        )
    return buckets, furthest
