"""NomicBERT (Nussbaum et al. 2024): rotary positions, SwiGLU; as its own code spells it and as transformers does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from encast.archs.base import architecture
from encast.archs.config import Config
from encast.archs.encoder import MOST_LAYERS, Sizes, sum_embeddings
from encast.archs.gated import (
    MOST_POSITIONS,
    OWN_NAMES,
    Biases,
    GatedEncoder,
    GatedPaths,
    gated_layer,
    need_pairs,
    read_flash_rotary,
    read_rotary,
    read_sizes,
)
from encast.archs.heads import predict_tokens, transform
from encast.archs.modules import Modules
from encast.archs.weights import Weights
from encast.errors import UnsupportedModelError

__all__ = ["NomicBert"]

_OWN = GatedPaths(
    attention=("attn.Wqkv",),
    attention_output="attn.out_proj",
    attention_norm="norm1",
    # Only the second one goes through the activation.
    inner=("mlp.fc12", "mlp.fc11"),
    output="mlp.fc2",
    output_norm="norm2",
)
_OWN_WITHOUT_GATE = GatedPaths(
    attention=("attn.Wqkv",),
    attention_output="attn.out_proj",
    attention_norm="norm1",
    inner=("mlp.fc1",),
    output="mlp.fc2",
    output_norm="norm2",
    gated=False,
)
_TRANSFORMERS = GatedPaths(
    attention=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.o_proj",
    attention_norm="post_attention_layernorm",
    inner=("mlp.gate_proj", "mlp.up_proj"),
    output="mlp.down_proj",
    output_norm="post_mlp_layernorm",
)
_OWN_LAYERS = "encoder.layers"
_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "gelu": "gelu"}
_INNER_MULTIPLE = 256
"""The model's own code rounds the width of a gated feed-forward up to a multiple of this."""


@architecture("nomic_bert")
class NomicBert(GatedEncoder):
    """Heads: those of BERT.

    A config in the words of GPT-2 (``n_embd``) is that of the model's own code, whose fields say where biases are; one
    in BERT's words is that of transformers, where the layers have none. Either may come with the tensors' names of
    either: transformers saves those of the model's own code.
    """

    prefix = "nomic_bert."
    other_prefixes = ("bert.",)
    stem = ("NomicBert",)
    code = ("NomicBert",)
    suffixes: ClassVar[Mapping[str, str]] = {"ForPreTraining": "fill_mask"}
    markers: ClassVar[Mapping[str, str]] = {
        "classify": "classifier.weight",
        "tag": "classifier.weight",
        "answer": "qa_outputs.weight",
        "fill_mask": "cls.predictions.transform.dense.weight",
    }
    unread = (r"((nomic_)?bert\.)?pooler\.dense\.\w+", r"cls\..*", r"classifier\.\w+", r"qa_outputs\.\w+")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        need_pairs(config, self.sizes)
        self.biases, self.head_bias, self.longest = Biases(), True, self.sizes.positions
        if not _is_own(config):
            self.rotary = read_rotary(config, 1000.0, self.sizes.hidden // self.sizes.heads)
            return
        _refuse_other_arithmetic(config, self.sizes)
        self.rotary = read_flash_rotary(config, self.sizes.hidden // self.sizes.heads)
        attention, inner = config.flag("qkv_proj_bias", True), config.flag("mlp_fc1_bias", True)
        self.biases = Biases(attention, attention, inner, config.flag("mlp_fc2_bias", True))
        self.head_bias = inner
        # Beyond the trained positions the base would depend on the longest text of the batch.
        if config.given("rotary_scaling_factor"):
            config.above_zero("rotary_scaling_factor")
            self.longest = min(self.longest, config.count("max_trained_positions", default=2048))

    def read_sizes(self) -> Sizes:
        config = self.config
        if not _is_own(config):
            return read_sizes(config, positions=2048, types=2, activation="silu", least_types=1)
        kind = config.text("activation_function") or "gelu_new"
        if kind not in _ACTIVATIONS:
            raise UnsupportedModelError(
                f"{config.where}: activation_function is {kind!r}, which encast does not have in this model; it has "
                f"{sorted(_ACTIVATIONS)}"
            )
        inner = config.count("n_inner", "intermediate_size")
        return Sizes(
            vocab=_rounded_up(config.count("vocab_size"), config.count("pad_vocab_size_multiple", default=1)),
            hidden=config.count("n_embd", "hidden_size"),
            layers=config.count("n_layer", "num_hidden_layers", most=MOST_LAYERS),
            heads=config.count("n_head", "num_attention_heads"),
            inner=inner if kind == "gelu" else _rounded_up(inner, _INNER_MULTIPLE),
            positions=config.count("n_positions", default=1024, most=MOST_POSITIONS),
            type_vocab=config.count("type_vocab_size", default=2, least=0),
            eps=config.eps("layer_norm_epsilon", 1e-5),
            activation=_ACTIVATIONS[kind],
        ).checked(config)

    @classmethod
    def foreign(cls, config: Config, weights: Weights) -> str:
        if any(weights.any_below(f"{prefix}{_OWN_LAYERS}.") for prefix in ("", cls.prefix, *cls.other_prefixes)):
            return OWN_NAMES
        return ""

    def max_len(self) -> int:
        return self.longest

    def encode(self, encoder: Modules) -> str:
        own = encoder.below(f"{_OWN_LAYERS}.") or encoder.below("emb_ln.")
        at, paths = "layers", _TRANSFORMERS
        if own:
            at, paths = _OWN_LAYERS, _OWN
            if self.config.text("activation_function") == "gelu" and _is_own(self.config):
                paths = _OWN_WITHOUT_GATE
        norm = "emb_ln" if own else "embeddings.LayerNorm"
        x = sum_embeddings(encoder, self.sizes, positions=False, norm=norm)
        for layer in range(self.sizes.layers):
            path = f"{at}.{layer}"
            x = gated_layer(encoder, x, self.sizes, paths, self.biases, layer=layer, path=path, rotary=self.rotary)
        return x

    def fill_mask(self, encoder: Modules, head: Modules, x: str) -> str:
        at, sizes = "cls.predictions", self.sizes
        # transformers gives the head of a checkpoint without biases new ones, and saves them.
        has_bias = self.head_bias or head.has(f"{at}.transform.dense.bias")
        x = transform(
            head,
            x,
            sizes,
            sizes.hidden,
            dense=f"{at}.transform.dense",
            norm=f"{at}.transform.layer_norm",
            activation=sizes.activation,
            bias=has_bias,
        )
        tied = self.config.flag("tie_word_embeddings", True)
        bias = f"{at}.bias" if has_bias else None
        return predict_tokens(encoder, head, x, sizes, sizes.hidden, decoder=f"{at}.decoder", bias=bias, tied=tied)


def _is_own(config: Config) -> bool:
    return config.given("n_embd")


def _rounded_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _refuse_other_arithmetic(config: Config, sizes: Sizes) -> None:
    """Fields of the model's own code that would make another model."""
    for switch in ("prenorm", "parallel_block", "use_rms_norm", "causal", "rotary_head_dim"):
        config.refuse_unless(switch, False)
    if not config.given("rotary_emb_fraction"):
        raise UnsupportedModelError(
            f"{config.where}: rotary_emb_fraction is missing, which means a table of positions; encast has this model "
            "with rotary positions, of 1.0"
        )
    config.refuse_unless("rotary_emb_fraction", 1.0, 1)
    config.refuse_unless("num_heads_kv", sizes.heads)
    # The words of transformers, which it may have written into the same file.
    config.refuse_unless("layer_norm_eps", sizes.eps)
    config.refuse_unless("hidden_act", sizes.activation)
    # nomic-embed-text-v2-moe has experts in every second layer.
    config.refuse_unless("moe_every_n_layers", 0, -1)
