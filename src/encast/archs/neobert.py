"""NeoBERT (Le Breton et al. 2025): pre-norm by the root mean square, rotary positions, SwiGLU, no biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from encast.archs.base import architecture
from encast.archs.config import Config
from encast.archs.encoder import MOST_LAYERS, Sizes
from encast.archs.gated import (
    MOST_POSITIONS,
    Biases,
    GatedPaths,
    PreNormEncoder,
    Rotary,
    need_pairs,
    pre_norm_layer,
    projections_of_heads,
    read_rotary,
)
from encast.archs.heads import classify_first_token, predict_tokens
from encast.archs.modules import Modules
from encast.archs.weights import Weights
from encast.errors import UnsupportedModelError

__all__ = ["NeoBert"]

_PACKED = GatedPaths(
    attention=("qkv",),
    attention_output="wo",
    attention_norm="attention_norm",
    inner=("ffn.w12",),
    output="ffn.w3",
    output_norm="ffn_norm",
)
_APART = replace(_PACKED, inner=("ffn.w1", "ffn.w2"))
_LAYERS = "transformer_encoder"
_THETA = 10_000.0
_INNER_MULTIPLE = 8


@architecture("neobert")
class NeoBert(PreNormEncoder):
    """Heads: dense, tanh and projection on the first token; masked LM by a decoder of its own alone.

    The code on the hub packs the gate and what it is multiplied with into one tensor; that of xformers may keep two.
    """

    prefix = "model."
    stem = ("NeoBERT",)
    classes: ClassVar[Mapping[str, str]] = {"NeoBERT": "features", "NeoBERTLMHead": "fill_mask"}
    code = ("NeoBERT", "NeoBERTHF")
    exported = False
    markers: ClassVar[Mapping[str, str]] = {
        "classify": "dense.weight",
        "tag": "classifier.weight",
        "answer": "qa_outputs.weight",
        "fill_mask": "decoder.weight",
    }
    unread = (r"decoder\.\w+", r"dense\.\w+", r"classifier\.\w+", r"qa_outputs\.\w+")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        need_pairs(config, self.sizes)
        size = self.sizes.hidden // self.sizes.heads
        config.refuse_unless("dim_head", size)
        # What the code that it was trained with may have otherwise.
        for switch in ("rms_norm", "rope"):
            config.refuse_unless(switch, True)
        config.refuse_unless("ngpt", False)
        config.refuse_unless("hidden_act", "SwiGLU", "swiglu")
        # Its code has one base and reads no field of it.
        if read_rotary(config, _THETA, size) != Rotary(_THETA):
            raise UnsupportedModelError(
                f"{config.where}: rope_theta, rope_parameters or rope_scaling say other angles than those of the base "
                f"{_THETA:g}, the only ones that NeoBERT's code has: remove the fields"
            )

    def read_sizes(self) -> Sizes:
        config = self.config
        # Two thirds, because a gate makes three products of two.
        inner = 2 * config.count("intermediate_size", least=2) // 3
        return Sizes(
            vocab=config.count("vocab_size"),
            hidden=config.count("hidden_size"),
            layers=config.count("num_hidden_layers", most=MOST_LAYERS),
            heads=config.count("num_attention_heads"),
            inner=-(-inner // _INNER_MULTIPLE) * _INNER_MULTIPLE,
            positions=config.count("max_length", default=1024, most=MOST_POSITIONS),
            type_vocab=0,
            eps=config.eps("norm_eps", 1e-6),
            activation="silu",
        ).checked(config)

    @classmethod
    def foreign(cls, config: Config, weights: Weights) -> str:
        return "transformers has no NeoBERT without the model's own code, which encast does not run"

    def encode(self, encoder: Modules) -> str:
        sizes = self.sizes
        x = encoder.embedding("token_ids", "encoder", sizes.vocab, sizes.hidden)
        for layer in range(sizes.layers):
            x = self._layer(encoder, x, layer, f"{_LAYERS}.{layer}")
        return encoder.rms_norm(x, "layer_norm", sizes.hidden, sizes.eps)

    def classify(self, encoder: Modules, head: Modules, x: str, labels: int) -> str:
        hidden = self.sizes.hidden
        return classify_first_token(
            head, head, x, hidden, labels, dense_path="dense", out_path="classifier", activation="tanh"
        )

    def fill_mask(self, encoder: Modules, head: Modules, x: str) -> str:
        return predict_tokens(
            encoder,
            head,
            x,
            self.sizes,
            self.sizes.hidden,
            decoder="decoder",
            bias="decoder.bias",
            # Nothing ties it, whatever the config says.
            tied=False,
            words="encoder",
        )

    def _layer(self, encoder: Modules, x: str, layer: int, path: str) -> str:
        sizes = self.sizes
        paths = _APART if encoder.has(f"{path}.ffn.w1.weight") else _PACKED

        def project(read: str) -> list[str]:
            return projections_of_heads(encoder, read, f"{path}.{paths.attention[0]}", sizes, layer=layer)

        at, rotary = f"{path}.attention", Rotary(_THETA)
        return pre_norm_layer(encoder, x, sizes, paths, Biases(), project, layer=layer, path=path, at=at, rotary=rotary)
