"""ALBERT (Lan et al. 2020): narrow embeddings, and layers that share their weights in groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from encast.archs.base import Architecture, architecture
from encast.archs.config import Config
from encast.archs.encoder import MOST_LAYERS, LayerPaths, Sizes, encoder_layer, sum_embeddings
from encast.archs.heads import classify_first_token, predict_tokens, transform
from encast.archs.modules import Modules
from encast.archs.relative_keys import RELATIVE_KEYS, RelativeKeys
from encast.errors import CheckpointError

__all__ = ["Albert"]

_PATHS = LayerPaths(
    query="attention.query",
    key="attention.key",
    value="attention.value",
    attention_output="attention.dense",
    attention_norm="attention.LayerNorm",
    inner="ffn",
    output="ffn_output",
    output_norm="full_layer_layer_norm",
)


@architecture("albert")
class Albert(Architecture):
    """Every executed layer has nodes of its own (``encoder.layer.3...``); the constants of a group exist once.

    Heads: pooler (dense, tanh) and classifier; masked LM at the embeddings' width.
    """

    prefix = "albert."
    stem = ("Albert",)
    suffixes: ClassVar[Mapping[str, str]] = {"ForPreTraining": "fill_mask"}
    markers: ClassVar[Mapping[str, str]] = {
        "classify": "classifier.weight",
        "tag": "classifier.weight",
        "answer": "qa_outputs.weight",
        "fill_mask": "predictions.dense.weight",
    }
    position_types = ("absolute", *RELATIVE_KEYS)
    unread = (
        r"(albert\.)?embeddings\.position_embeddings\.weight",  # there with relative positions too
        r"(albert\.)?pooler\.\w+",
        r"predictions\..*",
        r"sop_classifier\..*",
        r"classifier\.\w+",
        r"qa_outputs\.\w+",
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        layers = self.sizes.layers
        self.groups = config.count("num_hidden_groups", default=1, most=layers)
        self.inner_layers = config.count("inner_group_num", default=1, most=MOST_LAYERS)
        if layers * self.inner_layers > MOST_LAYERS:
            raise CheckpointError(
                f"{config.where}: num_hidden_layers {layers} times inner_group_num {self.inner_layers} are more than "
                f"{MOST_LAYERS} layers: correct the file"
            )

    def read_sizes(self) -> Sizes:
        sizes = Sizes.read(self.config, activation="gelu_new")
        return replace(sizes, embedding=self.config.count("embedding_size", default=128)).checked(self.config)

    def encode(self, encoder: Modules) -> str:
        sizes = self.sizes
        # What transformers up to version 4 computes: it divides the scores alone.
        relative = RelativeKeys.read(self.config, sizes, scaled=False)
        x = sum_embeddings(encoder, sizes, positions=relative is None)
        x = encoder.linear(x, "encoder.embedding_hidden_mapping_in", sizes.hidden, sizes.embedding)
        for step in range(sizes.layers):
            group = int(step / (sizes.layers / self.groups))
            for inner in range(self.inner_layers):
                layer = step * self.inner_layers + inner
                shared = f"encoder.albert_layer_groups.{group}.albert_layers.{inner}"
                path = f"encoder.layer.{layer}"
                score = None
                if relative:
                    table = f"{shared}.attention.distance_embedding"
                    score = relative.score(encoder, sizes, layer=layer, path=path, table=table)
                x = encoder_layer(encoder, x, sizes, layer=layer, path=path, weights=shared, paths=_PATHS, score=score)
        return x

    def classify(self, encoder: Modules, head: Modules, x: str, labels: int) -> str:
        return classify_first_token(
            encoder, head, x, self.sizes.hidden, labels, dense_path="pooler", out_path="classifier", activation="tanh"
        )

    def fill_mask(self, encoder: Modules, head: Modules, x: str) -> str:
        at, sizes = "predictions", self.sizes
        x = transform(
            head,
            x,
            sizes,
            sizes.embedding,
            dense=f"{at}.dense",
            norm=f"{at}.LayerNorm",
            activation=sizes.activation,
        )
        tied = self.config.flag("tie_word_embeddings", True)
        return predict_tokens(
            encoder, head, x, sizes, sizes.embedding, decoder=f"{at}.decoder", bias=f"{at}.bias", tied=tied
        )
