"""XLM-RoBERTa in the layout of jinaai/xlm-roberta-flash-implementation, with rotary positions (jina-colbert-v2) or a
table of them (jina-reranker-v2).

Its layers are those of flash-attention's BERT: queries, keys and values in one tensor, norms behind, no gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from encast.archs.base import architecture
from encast.archs.config import Config
from encast.archs.encoder import Sizes, sum_embeddings
from encast.archs.gated import Biases, GatedPaths, Rotary, gated_layer, need_pairs, read_flash_rotary, read_sizes
from encast.archs.modules import Modules
from encast.archs.roberta import RobertaHeads
from encast.archs.weights import Weights
from encast.errors import CheckpointError, UnsupportedModelError

__all__ = ["BIASES", "FLASH_PATHS", "XlmRobertaFlash"]

FLASH_PATHS = GatedPaths(
    attention=("mixer.Wqkv",),
    attention_output="mixer.out_proj",
    attention_norm="norm1",
    inner=("mlp.fc1",),
    output="mlp.fc2",
    output_norm="norm2",
    gated=False,
)
_CONFIG, _TYPES = "XLMRobertaFlashConfig", ("xlm-roberta", "xlm-roberta-flash")
BIASES = Biases(attention=True, attention_output=True, inner=True, output=True)
_ACTIVATIONS = {"gelu": "gelu", **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh")}
"""Its code has no others."""


@architecture("xlm-roberta-flash")
class XlmRobertaFlash(RobertaHeads):
    """Checkpoints say ``model_type: xlm-roberta``; ``auto_map`` or ``position_embedding_type`` tells them apart."""

    stem = ("XLMRoberta",)
    code = ("XLMRoberta", "XLMRobertaFlash")
    classes: ClassVar[Mapping[str, str]] = {"XLMRobertaLoRA": "features"}
    exported = False
    told_by_graph = False
    position_types = ("absolute", "rotary")
    unread = (r"(roberta\.)?pooler\.dense\.\w+", *RobertaHeads.unread)
    rotary: Rotary | None = None
    padding_id = 0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.own_class() not in ("", _CONFIG):
            config.refuse_unless("auto_map")
        if (config.text("model_type") or _TYPES[0]) not in _TYPES:
            raise UnsupportedModelError(
                f"{config.where}: model_type is {config.text('model_type')!r}, and position_embedding_type is rotary "
                f"or auto_map names {_CONFIG}; encast has these for {' and '.join(_TYPES)}"
            )
        if not config.is_text("position_embedding_type", "rotary"):
            self.padding_id = config.count("pad_token_id", default=1, least=0, most=self.sizes.positions)
            return
        need_pairs(config, self.sizes)
        size = self.sizes.hidden // self.sizes.heads
        config.refuse_unless("rotary_emb_dim", size)
        self.rotary = read_flash_rotary(config, size)

    def read_sizes(self) -> Sizes:
        config = self.config
        kind = config.text("hidden_act") or "gelu"
        if kind not in _ACTIVATIONS:
            raise UnsupportedModelError(
                f"{config.where}: hidden_act is {kind!r}, which this model's code refuses; it may be "
                f"{sorted(_ACTIVATIONS)}"
            )
        if not config.given("layer_norm_eps"):
            raise CheckpointError(
                f"{config.where}: layer_norm_eps is missing, for which versions of this model's code take other "
                "numbers: add it, 1e-5 most likely"
            )
        sizes = read_sizes(config, positions=512, types=2, activation=_ACTIVATIONS[kind])
        multiple = config.count("pad_vocab_size_multiple", default=1)
        return replace(sizes, vocab=-(-sizes.vocab // multiple) * multiple)

    @classmethod
    def foreign(cls, config: Config, weights: Weights) -> str:
        return "transformers has other names for these tensors, and no rotary positions, without the model's own code"

    def max_len(self) -> int:
        return self.sizes.positions if self.rotary else self.sizes.positions - self.padding_id - 1

    def encode(self, encoder: Modules) -> str:
        absolute, pad = self.rotary is None, self.padding_id
        x = sum_embeddings(encoder, self.sizes, offset=pad + 1, skip_id=pad, positions=absolute, norm="emb_ln")
        for layer in range(self.sizes.layers):
            path = f"encoder.layers.{layer}"
            x = gated_layer(encoder, x, self.sizes, FLASH_PATHS, BIASES, layer=layer, path=path, rotary=self.rotary)
        return x
