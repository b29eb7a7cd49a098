"""Jina Embeddings v3 (Sturua et al. 2024) as transformers has it: XLM-RoBERTa's heads and norms, rotary positions."""

from __future__ import annotations

from encast.archs.base import architecture
from encast.archs.config import Config
from encast.archs.encoder import Sizes, sum_embeddings
from encast.archs.gated import OWN_NAMES, GatedPaths, gated_layer, need_pairs, read_rotary, read_sizes
from encast.archs.modules import Modules
from encast.archs.roberta import RobertaHeads
from encast.archs.weights import Weights
from encast.archs.xlm_roberta_flash import BIASES, FLASH_PATHS

__all__ = ["JinaEmbeddingsV3"]

_PATHS = GatedPaths(
    attention=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.o_proj",
    attention_norm="post_attention_layernorm",
    inner=("mlp.fc1",),
    output="mlp.fc2",
    output_norm="post_mlp_layernorm",
    gated=False,
)
_FLASH_LAYERS = "encoder.layers"


@architecture("jina_embeddings_v3")
class JinaEmbeddingsV3(RobertaHeads):
    """Its tensors may have the names of ``xlm-roberta-flash`` too, under which transformers saves them."""

    stem = ("JinaEmbeddingsV3",)
    exported = False
    told_by_graph = False
    position_types = ("rotary",)
    unread = (r"(roberta\.)?pooler\.dense\.\w+", *RobertaHeads.unread)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        need_pairs(config, self.sizes)
        config.refuse_unless("partial_rotary_factor", 1.0, 1)
        size = self.sizes.hidden // self.sizes.heads
        self.rotary = read_rotary(config, 20_000.0, size, kinds=("default", "linear"))

    def read_sizes(self) -> Sizes:
        return read_sizes(self.config, positions=8194, types=1, activation="gelu", least_types=1, eps=1e-5)

    @classmethod
    def foreign(cls, config: Config, weights: Weights) -> str:
        own = any(weights.any_below(f"{prefix}{_FLASH_LAYERS}.") for prefix in ("", cls.prefix))
        return OWN_NAMES if own else super().foreign(config, weights)

    def encode(self, encoder: Modules) -> str:
        flash = encoder.below(f"{_FLASH_LAYERS}.") or encoder.below("emb_ln.")
        at, paths, norm = ("layers", _PATHS, "embeddings.LayerNorm")
        if flash:
            at, paths, norm = _FLASH_LAYERS, FLASH_PATHS, "emb_ln"
        x = sum_embeddings(encoder, self.sizes, positions=False, norm=norm)
        for layer in range(self.sizes.layers):
            path = f"{at}.{layer}"
            x = gated_layer(encoder, x, self.sizes, paths, BIASES, layer=layer, path=path, rotary=self.rotary)
        return x
