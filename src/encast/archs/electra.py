"""ELECTRA (Clark et al. 2020): BERT's encoder, its embeddings possibly narrower than its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from encast.archs.base import Architecture, architecture
from encast.archs.encoder import Sizes, encoder_layer, sum_embeddings
from encast.archs.heads import classify_first_token, predict_tokens, transform
from encast.archs.modules import Modules
from encast.archs.relative_keys import RELATIVE_KEYS, RelativeKeys

__all__ = ["Electra"]


@architecture("electra")
class Electra(Architecture):
    """Heads: dense, gelu and projection on the first token; the generator's masked LM, at the embeddings' width.

    The discriminator's own head (is this token replaced?) is not a task of encast: ``ElectraForPreTraining`` gives
    its encoder.
    """

    prefix = "electra."
    stem = ("Electra",)
    suffixes: ClassVar[Mapping[str, str]] = {"ForPreTraining": "features"}
    markers: ClassVar[Mapping[str, str]] = {
        "classify": "classifier.out_proj.weight",
        "tag": "classifier.weight",
        "answer": "qa_outputs.weight",
        "fill_mask": "generator_predictions.dense.weight",
    }
    position_types = ("absolute", *RELATIVE_KEYS)
    unread = (
        r"(electra\.)?embeddings\.position_embeddings\.weight",  # there with relative positions too
        r"discriminator_predictions\..*",
        r"generator_(predictions|lm_head)\..*",
        r"classifier\.((dense|out_proj)\.)?\w+",
        r"qa_outputs\.\w+",
    )

    def read_sizes(self) -> Sizes:
        sizes = Sizes.read(self.config)
        return replace(sizes, embedding=self.config.count("embedding_size", default=128)).checked(self.config)

    def encode(self, encoder: Modules) -> str:
        sizes = self.sizes
        relative = RelativeKeys.read(self.config, sizes)
        x = sum_embeddings(encoder, sizes, positions=relative is None)
        if sizes.embedding != sizes.hidden:
            x = encoder.linear(x, "embeddings_project", sizes.hidden, sizes.embedding)
        for layer in range(sizes.layers):
            path = f"encoder.layer.{layer}"
            score = relative.score(encoder, sizes, layer=layer, path=path) if relative else None
            x = encoder_layer(encoder, x, sizes, layer=layer, path=path, score=score)
        return x

    def classify(self, encoder: Modules, head: Modules, x: str, labels: int) -> str:
        return classify_first_token(
            head,
            head,
            x,
            self.sizes.hidden,
            labels,
            dense_path="classifier.dense",
            out_path="classifier.out_proj",
            activation="gelu",
        )

    def fill_mask(self, encoder: Modules, head: Modules, x: str) -> str:
        at, sizes = "generator_predictions", self.sizes
        x = transform(head, x, sizes, sizes.embedding, dense=f"{at}.dense", norm=f"{at}.LayerNorm", activation="gelu")
        tied = self.config.flag("tie_word_embeddings", True)
        return predict_tokens(encoder, head, x, sizes, sizes.embedding, decoder="generator_lm_head", bias="", tied=tied)
