"""MPNet (Song et al. 2020): no token types, positions behind the padding id, one relative bias for all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from encast.archs.base import Architecture, architecture
from encast.archs.config import Config
from encast.archs.encoder import LayerPaths, Sizes, encoder_layer, sum_embeddings
from encast.archs.heads import classify_first_token, predict_tokens, transform
from encast.archs.modules import Modules

__all__ = ["MPNet"]

_PATHS = LayerPaths(
    query="attention.attn.q",
    key="attention.attn.k",
    value="attention.attn.v",
    attention_output="attention.attn.o",
    attention_norm="attention.LayerNorm",
)
# Fixed in transformers, whatever the config says.
_PADDING_ID = 1
_BUCKETS, _MAX_DISTANCE = 32, 128


@architecture("mpnet")
class MPNet(Architecture):
    """Heads: dense, tanh and projection on the first token; masked LM with gelu (erf)."""

    prefix = "mpnet."
    stem = ("MPNet",)
    markers: ClassVar[Mapping[str, str]] = {
        "classify": "classifier.out_proj.weight",
        "tag": "classifier.weight",
        "answer": "qa_outputs.weight",
        "fill_mask": "lm_head.dense.weight",
    }
    unread = (
        r"(mpnet\.)?pooler\.dense\.\w+",
        r"lm_head\..*",
        r"classifier\.((dense|out_proj)\.)?\w+",
        r"qa_outputs\.\w+",
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        config.refuse_unless("relative_attention_num_buckets", _BUCKETS)

    def read_sizes(self) -> Sizes:
        return Sizes.read(self.config, type_vocab=0)

    def max_len(self) -> int:
        return self.sizes.positions - _PADDING_ID - 1

    def encode(self, encoder: Modules) -> str:
        sizes = self.sizes
        x = sum_embeddings(encoder, sizes, offset=_PADDING_ID + 1, skip_id=_PADDING_ID)
        table = encoder.constant("encoder.relative_attention_bias.weight", _BUCKETS, sizes.heads)
        for layer in range(sizes.layers):
            path = f"encoder.layer.{layer}"
            relative = (table, _MAX_DISTANCE)
            x = encoder_layer(encoder, x, sizes, layer=layer, path=path, paths=_PATHS, relative=relative)
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
            activation="tanh",
        )

    def fill_mask(self, encoder: Modules, head: Modules, x: str) -> str:
        sizes = self.sizes
        x = transform(head, x, sizes, sizes.hidden, dense="lm_head.dense", norm="lm_head.layer_norm", activation="gelu")
        tied = self.config.flag("tie_word_embeddings", True)
        return predict_tokens(
            encoder, head, x, sizes, sizes.hidden, decoder="lm_head.decoder", bias="lm_head.bias", tied=tied
        )
