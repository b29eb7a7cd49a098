"""GTE (Zhang et al. 2024, "mGTE"): rotary positions, GeGLU; as Alibaba-NLP/new-impl spells it and as transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from encast.archs.base import architecture
from encast.archs.config import Config
from encast.archs.encoder import Sizes, sum_embeddings
from encast.archs.gated import Biases, GatedEncoder, GatedPaths, gated_layer, need_pairs, read_rotary, read_sizes
from encast.archs.heads import predict_tokens, transform
from encast.archs.modules import Modules
from encast.archs.weights import Weights

__all__ = ["Gte"]

_OWN = GatedPaths(
    attention=("attention.qkv_proj",),
    attention_output="attention.o_proj",
    attention_norm="attn_ln",
    inner=("mlp.up_gate_proj",),
    output="mlp.down_proj",
    output_norm="mlp_ln",
    up_first=True,
)
_OWN_PARTS = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
_TRANSFORMERS = GatedPaths(
    attention=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.o_proj",
    attention_norm="post_attention_layernorm",
    inner=("mlp.gate_proj", "mlp.up_proj"),
    output="mlp.down_proj",
    output_norm="post_mlp_layernorm",
)
_BIASES = Biases(attention=True, attention_output=True, inner=False, output=True)
_OWN_LAYERS = "encoder.layer"


@architecture("gte", "new")
class Gte(GatedEncoder):
    """Heads: BERT's pooler and classifier; masked LM with its own dense and norm and a tied decoder.

    ``new`` is the name of Alibaba-NLP/new-impl, ``gte`` that of transformers and of copies of that code. The tensors'
    names are those of either, whatever the config says: transformers saves those of new-impl.
    """

    prefix = "gte."
    other_prefixes = ("new.",)
    stem = ("Gte", "New")
    code = ("Gte", "New")
    position_types = ("rope",)
    markers: ClassVar[Mapping[str, str]] = {
        "classify": "classifier.weight",
        "tag": "classifier.weight",
        "answer": "qa_outputs.weight",
        "fill_mask": "lm_head.dense.weight",
    }
    unread = (r"((gte|new)\.)?pooler\.dense\.\w+", r"lm_head\..*", r"classifier\.\w+", r"qa_outputs\.\w+")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        need_pairs(config, self.sizes)
        config.refuse_unless("layer_norm_type", "layer_norm")
        config.refuse_unless("logn_attention_scale", False)
        base = 10_000.0 if _is_own(config) else 160_000.0
        self.rotary = read_rotary(config, base, self.sizes.hidden // self.sizes.heads)
        self.packed = config.flag("pack_qkv", True)

    def read_sizes(self) -> Sizes:
        positions = 2048 if _is_own(self.config) else 8192
        return read_sizes(self.config, positions=positions, types=1, activation="gelu")

    @classmethod
    def foreign(cls, config: Config, weights: Weights) -> str:
        if config.is_text("model_type", "gte"):
            if not any(weights.any_below(f"{one}{_OWN_LAYERS}.") for one in ("", cls.prefix, *cls.other_prefixes)):
                return ""
            return (
                "these tensors have the names of the model's own code; open it with transformers, and save it with "
                "save_pretrained(..., save_original_format=False)"
            )
        return "transformers has no model_type 'new' without the model's own code, which encast does not run"

    def encode(self, encoder: Modules) -> str:
        at, paths = "layers", _TRANSFORMERS
        if _has_own_names(encoder):
            at, paths = _OWN_LAYERS, _OWN if self.packed else replace(_OWN, attention=_OWN_PARTS)
        x = sum_embeddings(encoder, self.sizes, positions=False)
        for layer in range(self.sizes.layers):
            path = f"{at}.{layer}"
            x = gated_layer(encoder, x, self.sizes, paths, _BIASES, layer=layer, path=path, rotary=self.rotary)
        return x

    def fill_mask(self, encoder: Modules, head: Modules, x: str) -> str:
        sizes = self.sizes
        x = transform(
            head,
            x,
            sizes,
            sizes.hidden,
            dense="lm_head.dense",
            norm="lm_head.norm" if _has_own_names(encoder) else "lm_head.layer_norm",
            # transformers has gelu here whatever the layers have.
            activation=sizes.activation if _is_own(self.config) else "gelu",
        )
        tied = self.config.flag("tie_word_embeddings", True)
        bias = "lm_head.decoder.bias"
        return predict_tokens(encoder, head, x, sizes, sizes.hidden, decoder="lm_head.decoder", bias=bias, tied=tied)


def _is_own(config: Config) -> bool:
    return config.is_text("model_type", "new") or config.given("auto_map")


def _has_own_names(encoder: Modules) -> bool:
    return encoder.below(f"{_OWN_LAYERS}.")
