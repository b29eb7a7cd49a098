"""RoBERTa (Liu et al. 2019), XLM-RoBERTa (Conneau et al. 2020) and CamemBERT (Martin et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from encast.archs.base import Architecture, architecture
from encast.archs.config import Config
from encast.archs.encoder import Sizes, encoder_layer, sum_embeddings
from encast.archs.heads import classify_first_token, predict_tokens, transform
from encast.archs.modules import Modules
from encast.archs.relative_keys import RELATIVE_KEYS, RelativeKeys

__all__ = ["Roberta", "RobertaHeads"]


class RobertaHeads(Architecture):
    """Dense, tanh and projection on the first token; masked LM with gelu (erf) whatever ``hidden_act`` says."""

    prefix = "roberta."
    markers: ClassVar[Mapping[str, str]] = {
        "classify": "classifier.out_proj.weight",
        "tag": "classifier.weight",
        "answer": "qa_outputs.weight",
        "fill_mask": "lm_head.dense.weight",
    }
    unread: ClassVar[tuple[str, ...]] = (r"lm_head\..*", r"classifier\.((dense|out_proj)\.)?\w+", r"qa_outputs\.\w+")

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


@architecture("roberta", "xlm-roberta", "camembert")
class Roberta(RobertaHeads):
    """BERT's layers; absolute positions start behind the padding id and skip padding tokens."""

    stem = ("Roberta", "XLMRoberta", "Camembert")
    position_types = ("absolute", *RELATIVE_KEYS)
    variants: ClassVar[Mapping[tuple[str, str], str]] = {("position_embedding_type", "rotary"): "xlm-roberta-flash"}
    coded: ClassVar[Mapping[str, str]] = {"XLMRobertaFlashConfig": "xlm-roberta-flash"}
    unread = (
        r"(roberta\.)?embeddings\.position_embeddings\.weight",  # there with relative positions too
        r"(roberta\.)?pooler\.dense\.\w+",
        *RobertaHeads.unread,
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.relative = RelativeKeys.read(config, self.sizes)
        # Position rows up to and including the padding id are never a counted token's.
        self.padding_id = config.count("pad_token_id", default=1, least=0, most=self.sizes.positions)

    def read_sizes(self) -> Sizes:
        return Sizes.read(self.config)

    def max_len(self) -> int:
        # Distances count padding tokens and begin nowhere.
        return self.sizes.positions if self.relative else self.sizes.positions - self.padding_id - 1

    def encode(self, encoder: Modules) -> str:
        offset, skip_id, absolute = self.padding_id + 1, self.padding_id, self.relative is None
        x = sum_embeddings(encoder, self.sizes, offset=offset, skip_id=skip_id, positions=absolute)
        for layer in range(self.sizes.layers):
            path = f"encoder.layer.{layer}"
            score = self.relative.score(encoder, self.sizes, layer=layer, path=path) if self.relative else None
            x = encoder_layer(encoder, x, self.sizes, layer=layer, path=path, score=score)
        return x
