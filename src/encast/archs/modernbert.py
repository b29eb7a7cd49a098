"""ModernBERT (Warner et al. 2024): pre-norm, no biases, rotary positions, gated feed-forward, local attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from encast.archs.base import Architecture, architecture
from encast.archs.config import Config
from encast.archs.encoder import MOST_LAYERS, Sizes
from encast.archs.gated import MOST_POSITIONS, Rotary, attend, need_pairs, packed_projections
from encast.archs.heads import predict_tokens
from encast.archs.modules import Modules
from encast.errors import CheckpointError, UnsupportedModelError
from encast.ir import FusionPromise, Graph

__all__ = ["ModernBert"]

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_THETAS = {_GLOBAL: ("global_rope_theta", 160_000.0), _LOCAL: ("local_rope_theta", 10_000.0)}


@dataclass(frozen=True)
class _Layer:
    """How a layer attends: its rotary positions, and how far it sees, None: everywhere."""

    rotary: Rotary
    reach: int | None


@architecture("modernbert")
class ModernBert(Architecture):
    """Heads: dense, activation and norm on the first token, the mean, every token or the masked ones, then the labels
    or a tied decoder.

    The first layer has no norm before its attention. A local layer sees ``local_attention // 2`` positions to each
    side. Biases are there where the config says so; the classifier always has one.
    """

    prefix = "model."
    stem = ("ModernBert",)
    told_by_graph = False
    position_types = ("absolute", "rope", "sans_pos")  # transformers reads none of them: they are rotary always
    markers: ClassVar[Mapping[str, str]] = {
        "classify": "classifier.weight",
        "tag": "classifier.weight",
        "answer": "classifier.weight",
        "fill_mask": "head.dense.weight",
    }
    unread = (r"head\.(dense|norm)\.\w+", r"decoder\.\w+", r"classifier\.\w+")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.attention_bias = config.flag("attention_bias", False)
        self.mlp_bias = config.flag("mlp_bias", False)
        self.norm_bias = config.flag("norm_bias", False)
        self.classifier_bias = config.flag("classifier_bias", False)
        self.layers = _read_layers(config, self.sizes.layers)
        need_pairs(config, self.sizes)

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
            eps=config.eps("norm_eps", 1e-5),
            activation=config.activation("hidden_activation", default="gelu"),
        ).checked(config)

    def promises(self, graph: Graph) -> dict[str, FusionPromise]:
        # A layer's sum goes on to the next one as it is: of all norms only the last takes its sum in.
        return {
            **super().promises(graph),
            "linear_activation": FusionPromise(0, sum(node.op == "activation" for node in graph.nodes)),
            "add_layer_norm": FusionPromise(0, 1),
        }

    def encode(self, encoder: Modules) -> str:
        sizes = self.sizes
        x = encoder.embedding("token_ids", "embeddings.tok_embeddings", sizes.vocab, sizes.hidden)
        x = self._norm(encoder, x, "embeddings.norm")
        for layer, how in enumerate(self.layers):
            x = self._layer(encoder, x, layer, how)
        return self._norm(encoder, x, "final_norm")

    def classify(self, encoder: Modules, head: Modules, x: str, labels: int) -> str:
        pooling = self.config.text("classifier_pooling") or "cls"
        self.config.refuse_unless("classifier_pooling", "cls", "mean")
        x = head.graph.add("pooling", x, name="pooling", modes=[pooling])
        return head.linear(self._transform(head, x), "classifier", labels, self.sizes.hidden)

    def tag(self, head: Modules, x: str, labels: int) -> str:
        return head.linear(self._transform(head, x), "classifier", labels, self.sizes.hidden)

    def answer(self, head: Modules, x: str) -> str:
        return head.linear(self._transform(head, x), "classifier", 2, self.sizes.hidden)

    def fill_mask(self, encoder: Modules, head: Modules, x: str) -> str:
        return predict_tokens(
            encoder,
            head,
            self._transform(head, x),
            self.sizes,
            self.sizes.hidden,
            decoder="decoder",
            bias="decoder.bias" if self.config.flag("decoder_bias", True) else None,
            tied=self.config.flag("tie_word_embeddings", True),
            words="embeddings.tok_embeddings",
        )

    def _transform(self, head: Modules, x: str) -> str:
        """What all heads begin with: dense, activation, norm."""
        hidden = self.sizes.hidden
        x = head.linear(x, "head.dense", hidden, hidden, bias=self.classifier_bias)
        kind = self.config.activation("classifier_activation", default="gelu")
        x = head.activation(x, kind, name="head.dense.activation")
        return self._norm(head, x, "head.norm")

    def _norm(self, modules: Modules, x: str, path: str, layer: int = -1) -> str:
        sizes = self.sizes
        return modules.layer_norm(x, path, sizes.hidden, sizes.eps, layer=layer, bias=self.norm_bias)

    def _layer(self, encoder: Modules, x: str, layer: int, how: _Layer) -> str:
        """Norm, attention, add; norm, gated feed-forward, add."""
        graph, sizes, path = encoder.graph, self.sizes, f"layers.{layer}"
        read = self._norm(encoder, x, f"{path}.attn_norm", layer) if layer else x
        at, bias = f"{path}.attn", self.attention_bias
        projections = packed_projections(encoder, read, f"{at}.Wqkv", sizes.hidden, layer=layer, bias=bias)
        context = attend(graph, projections, sizes, at=at, layer=layer, rotary=how.rotary, reach=how.reach)
        attended = encoder.linear(context, f"{at}.Wo", sizes.hidden, sizes.hidden, layer=layer, bias=bias)
        x = graph.add("add", x, attended, name=f"{at}.sum", layer=layer)
        read = self._norm(encoder, x, f"{path}.mlp_norm", layer)
        inner = encoder.linear(read, f"{path}.mlp.Wi", 2 * sizes.inner, sizes.hidden, layer=layer, bias=self.mlp_bias)
        inner = graph.add("gated_activation", inner, name=f"{path}.mlp.act", layer=layer, kind=sizes.activation)
        made = encoder.linear(inner, f"{path}.mlp.Wo", sizes.hidden, sizes.inner, layer=layer, bias=self.mlp_bias)
        return graph.add("add", x, made, name=f"{path}.mlp.sum", layer=layer)


def _read_layers(config: Config, layers: int) -> list[_Layer]:
    """``layer_types``, or else every n-th layer global and the others local, with the bases of their positions."""
    config.refuse_unless("rope_scaling")
    rope = config.part("rope_parameters")
    if rope is not None:
        for name in rope.names():
            if name not in _THETAS:
                rope.refuse_unless(name)
    # transformers lets sliding_window, the keys to each side, overrule local_attention, the whole window.
    reach = config.count("sliding_window", default=config.count("local_attention", default=128, least=2) // 2)
    kinds = {
        _GLOBAL: _Layer(Rotary(_read_theta(config, rope, _GLOBAL)), None),
        _LOCAL: _Layer(Rotary(_read_theta(config, rope, _LOCAL)), reach),
    }
    every = config.count("global_attn_every_n_layers", default=3)
    types = config.texts("layer_types") or [_LOCAL if layer % every else _GLOBAL for layer in range(layers)]
    if len(types) != layers:
        raise CheckpointError(
            f"{config.where}: layer_types has {len(types)} entries and num_hidden_layers is {layers}: correct the file"
        )
    for name in types:
        if name not in kinds:
            raise UnsupportedModelError(
                f"{config.where}: layer_types has {name!r}, a layer that encast does not have; it has {list(kinds)}"
            )
    return [kinds[name] for name in types]


def _read_theta(config: Config, rope: Config | None, kind: str) -> float:
    field, default = _THETAS[kind]
    old = config.above_zero(field, default)
    parameters = rope.part(kind) if rope is not None else None
    if parameters is None:
        return old
    for name in parameters.names():
        if name == "rope_type":
            parameters.refuse_unless(name, "default")
        elif name == "partial_rotary_factor":
            parameters.refuse_unless(name, 1.0, 1)
        elif name != "rope_theta":
            parameters.refuse_unless(name)
    return parameters.above_zero("rope_theta", old)
