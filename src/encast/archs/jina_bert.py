"""JinaBERT v2 (Günther et al. 2023, "Jina Embeddings 2"): BERT with ALiBi to both sides and a gated feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np

from encast.archs.base import architecture
from encast.archs.config import Config
from encast.archs.encoder import Sizes, sum_embeddings
from encast.archs.gated import Biases, GatedEncoder, GatedPaths, gated_layer, read_sizes
from encast.archs.heads import predict_tokens, transform
from encast.archs.modules import Modules
from encast.archs.weights import Weights
from encast.errors import UnsupportedModelError

__all__ = ["JinaBert", "alibi_slopes"]

_PATHS = GatedPaths(
    attention=("attention.self.query", "attention.self.key", "attention.self.value"),
    attention_output="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    inner=("mlp.gated_layers",),
    output="mlp.wo",
    output_norm="mlp.layernorm",
)
_BIASES = Biases(attention=True, attention_output=True, inner=False, output=True)
_MOST_DISTANCES = 1 << 22
"""Of all heads to one side: no tensor bounds the table that attention reads."""
_KNOWN_CODE = r"jinaai/jina-bert-implementation--.*"
_ACTIVATIONS = {"geglu": "gelu", "reglu": "relu"}


@architecture("jina_bert")
class JinaBert(GatedEncoder):
    """Heads: those of BERT.

    Checkpoints say ``model_type: bert`` and ``position_embedding_type: alibi``. The activation is what
    ``feed_forward_type`` says, not ``hidden_act``, which the masked-LM head has.
    """

    prefix = "bert."
    stem = ("JinaBert",)
    code = ("JinaBert",)
    position_types = ("alibi",)
    markers: ClassVar[Mapping[str, str]] = {
        "classify": "classifier.weight",
        "tag": "classifier.weight",
        "answer": "qa_outputs.weight",
        "fill_mask": "cls.predictions.transform.dense.weight",
    }
    unread = (r"(bert\.)?pooler\.dense\.\w+", r"cls\..*", r"classifier\.\w+", r"qa_outputs\.\w+")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.head_activation = self.sizes.activation
        kind = config.text("feed_forward_type")
        if kind not in _ACTIVATIONS:
            raise UnsupportedModelError(
                f"{config.where}: feed_forward_type is {kind!r}; encast has JinaBERT with {sorted(_ACTIVATIONS)}"
            )
        self.sizes = replace(self.sizes, activation=_ACTIVATIONS[kind])
        heads, positions = self.sizes.heads, self.sizes.positions
        if heads & (heads - 1) and config.given("auto_map") and not config.all_texts_match("auto_map", _KNOWN_CODE):
            raise UnsupportedModelError(
                f"{config.where}: {heads} heads, no power of two, and auto_map names code that may have other slopes "
                "for them (jina-reranker-v1); encast has those of jinaai/jina-bert-implementation"
            )
        if heads * positions > _MOST_DISTANCES:
            raise UnsupportedModelError(
                f"{config.where}: {heads} heads and max_position_embeddings {positions}; encast has tables of at most "
                f"{_MOST_DISTANCES:,} distances: lower the positions, which no tensor depends on"
            )

    def read_sizes(self) -> Sizes:
        return read_sizes(self.config, positions=512, types=2, activation="gelu", least_types=1)

    @classmethod
    def foreign(cls, config: Config, weights: Weights) -> str:
        return "transformers has no JinaBERT without the model's own code, which encast does not run"

    def encode(self, encoder: Modules) -> str:
        norm = "encoder.layer.0.attention.self.layer_norm_q.weight"
        if encoder.has(norm):
            raise UnsupportedModelError(
                f"{self.config.where}: the checkpoint has {norm!r}, a layer norm of queries, which encast does "
                "not have (jina-embeddings-v2-base-code)"
            )
        slopes = encoder.graph.add_constant("alibi.slopes", alibi_slopes(self.sizes.heads))
        x = sum_embeddings(encoder, self.sizes, positions=False)
        for layer in range(self.sizes.layers):
            path = f"encoder.layer.{layer}"
            x = gated_layer(encoder, x, self.sizes, _PATHS, _BIASES, layer=layer, path=path, slopes=slopes)
        return x

    def fill_mask(self, encoder: Modules, head: Modules, x: str) -> str:
        at, sizes = "cls.predictions", self.sizes
        x = transform(
            head,
            x,
            sizes,
            sizes.hidden,
            dense=f"{at}.transform.dense",
            norm=f"{at}.transform.LayerNorm",
            activation=self.head_activation,
        )
        tied = self.config.flag("tie_word_embeddings", True)
        return predict_tokens(
            encoder, head, x, sizes, sizes.hidden, decoder=f"{at}.decoder", bias=f"{at}.bias", tied=tied
        )


def alibi_slopes(heads: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """``f32[heads]``: what a position of distance costs in each head (Press et al. 2022, "Train Short, Test Long").

    For a power of two they are ``2 ** (-8 / heads)`` and its powers. Other numbers take those of the power below, and
    then every second one of the power above, as the paper's code has it.
    """
    below = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8.0 * (head + 1) / below) for head in range(below)]
    between = [2.0 ** (-4.0 * (head + 1) / below) for head in range(0, 2 * below, 2)]
    return np.array([*first, *between[: heads - below]], np.float32)
