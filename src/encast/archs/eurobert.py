"""EuroBERT (Boizard et al. 2025): pre-norm by the root mean square, rotary positions, SwiGLU; heads may share keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from encast.archs.base import architecture
from encast.archs.config import Config
from encast.archs.encoder import MOST_LAYERS, Sizes
from encast.archs.gated import MOST_POSITIONS, Biases, GatedPaths, PreNormEncoder, Rotary, need_pairs, pre_norm_layer
from encast.archs.heads import predict_tokens
from encast.archs.modules import Modules
from encast.archs.weights import Weights
from encast.errors import CheckpointError

__all__ = ["EuroBert"]

_PATHS = GatedPaths(
    attention=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.o_proj",
    attention_norm="input_layernorm",
    inner=("mlp.gate_proj", "mlp.up_proj"),
    output="mlp.down_proj",
    output_norm="post_attention_layernorm",
)
_POOLINGS = ("bos", "mean", "late")


@architecture("eurobert")
class EuroBert(PreNormEncoder):
    """Heads: dense, gelu and projection, on the first token (``classifier_pooling`` bos), on the mean over the tokens
    (mean), or on every token, whose scores are averaged (late); masked LM by a decoder alone.

    Keys and values of ``num_key_value_heads`` are those of several heads each: their rows are repeated.
    """

    prefix = "model."
    stem = ("EuroBert",)
    code = ("EuroBert", "EuroBertPreTrained")
    markers: ClassVar[Mapping[str, str]] = {
        "classify": "dense.weight",
        "tag": "classifier.weight",
        "answer": "qa_outputs.weight",
        "fill_mask": "lm_head.weight",
    }
    unread = (r"lm_head\.\w+", r"dense\.\w+", r"classifier\.\w+", r"qa_outputs\.\w+")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        sizes = self.sizes
        need_pairs(config, sizes)
        given = config.given("num_key_value_heads")  # null is as many as heads
        self.groups = config.count("num_key_value_heads", most=sizes.heads) if given else sizes.heads
        if sizes.heads % self.groups:
            raise CheckpointError(
                f"{config.where}: num_key_value_heads is {self.groups}, which does not divide the {sizes.heads} "
                "attention heads: correct the file"
            )
        self.attention_bias = config.flag("attention_bias", False)
        self.mlp_bias = config.flag("mlp_bias", False)
        # Of products that are summed in slices: another order, which only training at that size has.
        config.refuse_unless("pretraining_tp", 1)
        config.refuse_unless("sliding_window")
        self.rotary = _read_rotary(config)

    def read_sizes(self) -> Sizes:
        config = self.config
        return Sizes(
            vocab=config.count("vocab_size"),
            hidden=config.count("hidden_size"),
            layers=config.count("num_hidden_layers", most=MOST_LAYERS),
            heads=config.count("num_attention_heads"),
            inner=config.count("intermediate_size"),
            positions=config.count("max_position_embeddings", default=8192, most=MOST_POSITIONS),
            type_vocab=0,
            eps=config.eps("rms_norm_eps", 1e-5),
            activation=config.activation("hidden_act", default="silu"),
        ).checked(config)

    @classmethod
    def foreign(cls, config: Config, weights: Weights) -> str:
        pooling, own = config.text("classifier_pooling") or "late", config.text("clf_pooling")
        if own not in (None, pooling):
            return f"transformers passes over clf_pooling, which is {own!r}, and pools by {pooling!r}"
        return super().foreign(config, weights)

    @classmethod
    def has_head(cls, task: str, weights: Weights) -> bool:
        if task != "fill_mask":
            return super().has_head(task, weights)
        # A decoder that is tied to the words has no tensor: the checkpoint is an encoder below a model without a head.
        others = [marker for other, marker in cls.markers.items() if other != task]
        alone = weights.any_below(cls.prefix) and not any(marker in weights for marker in others)
        return cls.markers[task] in weights or alone

    def encode(self, encoder: Modules) -> str:
        sizes = self.sizes
        x = encoder.embedding("token_ids", "embed_tokens", sizes.vocab, sizes.hidden)
        for layer in range(sizes.layers):
            x = self._layer(encoder, x, layer, f"layers.{layer}")
        return encoder.rms_norm(x, "norm", sizes.hidden, sizes.eps)

    def classify(self, encoder: Modules, head: Modules, x: str, labels: int) -> str:
        config, hidden, graph = self.config, self.sizes.hidden, head.graph
        config.refuse_unless("classifier_pooling", *_POOLINGS)
        pooling = config.text("classifier_pooling") or "late"
        # The field of the model's own code, which transformers does not read.
        config.refuse_unless("clf_pooling", pooling)
        if pooling != "late":
            mode = {"bos": "cls", "mean": "mean"}[pooling]
            x = graph.add("pooling", x, name="pooling", modes=[mode])
        x = head.activation(head.linear(x, "dense", hidden, hidden), "gelu", name="dense.activation")
        x = head.linear(x, "classifier", labels, hidden)
        return graph.add("pooling", x, name="pooling", modes=["mean"]) if pooling == "late" else x

    def fill_mask(self, encoder: Modules, head: Modules, x: str) -> str:
        return predict_tokens(
            encoder,
            head,
            x,
            self.sizes,
            self.sizes.hidden,
            decoder="lm_head",
            bias="lm_head.bias" if self.mlp_bias else None,
            tied=self.config.flag("tie_word_embeddings", False),
            words="embed_tokens",
        )

    def _layer(self, encoder: Modules, x: str, layer: int, path: str) -> str:
        sizes, bias, mlp_bias = self.sizes, self.attention_bias, self.mlp_bias
        size = sizes.hidden // sizes.heads

        def projected(read: str, part: str, groups: int) -> str:
            name, times = f"{path}.{part}", sizes.heads // groups
            weight = encoder.repeated(f"{name}.weight", groups, times, size, sizes.hidden)
            added = encoder.repeated(f"{name}.bias", groups, times, size) if bias else ""
            return encoder.graph.add("linear", read, weight, added, name=name, layer=layer, activation="none")

        def project(read: str) -> list[str]:
            groups = (sizes.heads, self.groups, self.groups)
            return [projected(read, part, count) for part, count in zip(_PATHS.attention, groups, strict=True)]

        biases, at = Biases(bias, bias, mlp_bias, mlp_bias), f"{path}.self_attn"
        return pre_norm_layer(
            encoder, x, sizes, _PATHS, biases, project, layer=layer, path=path, at=at, rotary=self.rotary
        )


def _read_rotary(config: Config) -> Rotary:
    """``rope_theta`` in the file or in its ``rope_parameters``; no angles but the default ones."""
    config.refuse_unless("rope_scaling")
    fields = config.part("rope_parameters")
    if fields is not None:
        fields.refuse_unless("rope_type", "default")
        fields.refuse_unless("partial_rotary_factor", 1.0, 1)
        for name in fields.names():
            if name not in ("rope_type", "rope_theta", "partial_rotary_factor"):
                fields.refuse_unless(name)
        if fields.given("rope_theta"):
            return Rotary(fields.above_zero("rope_theta"))
    return Rotary(config.above_zero("rope_theta"))
