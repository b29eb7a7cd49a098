"""MPNet (Song et al. 2020): no token types, positions behind the padding id, one relative bias for all layers."""

from __future__ import annotations

from encast.archs.base import architecture
from encast.archs.config import Config
from encast.archs.encoder import LayerPaths, Sizes, encoder_layer, sum_embeddings
from encast.archs.modules import Modules
from encast.archs.roberta import RobertaHeads

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
class MPNet(RobertaHeads):
    """Heads: those of RoBERTa."""

    prefix = "mpnet."
    stem = ("MPNet",)
    unread = (r"(mpnet\.)?pooler\.dense\.\w+", *RobertaHeads.unread)

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
