"""BERT (Devlin et al. 2019): learned positions, token types, pooler; also MiniLM, E5, BGE and their kin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from encast.archs.base import Architecture, architecture
from encast.archs.encoder import Sizes, encoder_layer, sum_embeddings
from encast.archs.heads import classify_first_token, predict_tokens, transform
from encast.archs.modules import Modules
from encast.archs.relative_keys import RELATIVE_KEYS, RelativeKeys

__all__ = ["Bert"]


@architecture("bert")
class Bert(Architecture):
    """Heads: pooler (dense, tanh) and classifier; masked LM with its own transform and a tied decoder."""

    prefix = "bert."
    stem = ("Bert",)
    suffixes: ClassVar[Mapping[str, str]] = {"ForPreTraining": "fill_mask"}
    markers: ClassVar[Mapping[str, str]] = {
        "classify": "classifier.weight",
        "tag": "classifier.weight",
        "answer": "qa_outputs.weight",
        "fill_mask": "cls.predictions.transform.dense.weight",
    }
    variants: ClassVar[Mapping[tuple[str, str], str]] = {("position_embedding_type", "alibi"): "jina_bert"}
    position_types = ("absolute", *RELATIVE_KEYS)
    unread = (
        r"(bert\.)?embeddings\.position_embeddings\.weight",  # there with relative positions too
        r"(bert\.)?pooler\.dense\.\w+",
        r"cls\..*",
        r"classifier\.\w+",
        r"qa_outputs\.\w+",
    )

    def read_sizes(self) -> Sizes:
        return Sizes.read(self.config)

    def encode(self, encoder: Modules) -> str:
        relative = RelativeKeys.read(self.config, self.sizes)
        x = sum_embeddings(encoder, self.sizes, positions=relative is None)
        for layer in range(self.sizes.layers):
            path = f"encoder.layer.{layer}"
            score = relative.score(encoder, self.sizes, layer=layer, path=path) if relative else None
            x = encoder_layer(encoder, x, self.sizes, layer=layer, path=path, score=score)
        return x

    def classify(self, encoder: Modules, head: Modules, x: str, labels: int) -> str:
        return classify_first_token(
            encoder,
            head,
            x,
            self.sizes.hidden,
            labels,
            dense_path="pooler.dense",
            out_path="classifier",
            activation="tanh",
        )

    def fill_mask(self, encoder: Modules, head: Modules, x: str) -> str:
        at, sizes = "cls.predictions", self.sizes
        x = transform(
            head,
            x,
            sizes,
            sizes.hidden,
            dense=f"{at}.transform.dense",
            norm=f"{at}.transform.LayerNorm",
            activation=sizes.activation,
        )
        tied = self.config.flag("tie_word_embeddings", True)
        return predict_tokens(
            encoder, head, x, sizes, sizes.hidden, decoder=f"{at}.decoder", bias=f"{at}.bias", tied=tied
        )
