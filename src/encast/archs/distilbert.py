"""DistilBERT (Sanh et al. 2019): BERT without token types and pooler, with names of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from encast.archs.base import Architecture, architecture
from encast.archs.encoder import MOST_LAYERS, LayerPaths, Sizes, encoder_layer, sum_embeddings
from encast.archs.heads import classify_first_token, predict_tokens, transform
from encast.archs.modules import Modules

__all__ = ["DistilBert"]

_PATHS = LayerPaths(
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    attention_output="attention.out_lin",
    attention_norm="sa_layer_norm",
    inner="ffn.lin1",
    output="ffn.lin2",
    output_norm="output_layer_norm",
)


@architecture("distilbert")
class DistilBert(Architecture):
    """Heads: dense, relu and classifier on the first token; masked LM with ``vocab_*`` modules.

    Sinusoidal positions need nothing special: checkpoints hold the table in either case.
    """

    prefix = "distilbert."
    stem = ("DistilBert",)
    markers: ClassVar[Mapping[str, str]] = {
        "classify": "pre_classifier.weight",
        "tag": "classifier.weight",
        "answer": "qa_outputs.weight",
        "fill_mask": "vocab_transform.weight",
    }
    unread = (r"vocab_(transform|layer_norm|projector)\.\w+", r"(pre_)?classifier\.\w+", r"qa_outputs\.\w+")

    def read_sizes(self) -> Sizes:
        config = self.config
        return Sizes(
            vocab=config.count("vocab_size"),
            hidden=config.count("dim", "hidden_size"),
            layers=config.count("n_layers", "num_hidden_layers", most=MOST_LAYERS),
            heads=config.count("n_heads", "num_attention_heads"),
            inner=config.count("hidden_dim"),
            positions=config.count("max_position_embeddings", default=512),
            type_vocab=0,
            # transformers takes 1e-12 whatever layer_norm_eps says; GluonNLP has one of its own.
            eps=config.eps("gluon_layer_norm_eps", 1e-12),
            activation=config.activation("activation", default="gelu"),
        ).checked(config)

    def encode(self, encoder: Modules) -> str:
        x = sum_embeddings(encoder, self.sizes)
        for layer in range(self.sizes.layers):
            path = f"transformer.layer.{layer}"
            x = encoder_layer(encoder, x, self.sizes, layer=layer, path=path, paths=_PATHS)
        return x

    def classify(self, encoder: Modules, head: Modules, x: str, labels: int) -> str:
        return classify_first_token(
            head,
            head,
            x,
            self.sizes.hidden,
            labels,
            dense_path="pre_classifier",
            out_path="classifier",
            activation="relu",
        )

    def fill_mask(self, encoder: Modules, head: Modules, x: str) -> str:
        sizes = self.sizes
        x = transform(
            head,
            x,
            sizes,
            sizes.hidden,
            dense="vocab_transform",
            norm="vocab_layer_norm",
            activation=sizes.activation,
        )
        tied = self.config.flag("tie_word_embeddings", True)
        return predict_tokens(encoder, head, x, sizes, sizes.hidden, decoder="vocab_projector", bias="", tied=tied)
