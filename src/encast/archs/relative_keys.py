"""Relative positions as vectors of distances (``position_embedding_type``: relative_key, relative_key_query)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from encast.archs.config import Config
from encast.archs.encoder import Sizes
from encast.archs.modules import Modules
from encast.errors import UnsupportedModelError

__all__ = ["RELATIVE_KEYS", "RelativeKeys"]

RELATIVE_KEYS = {"relative_key": ("query",), "relative_key_query": ("query", "key")}
"""Values of ``position_embedding_type``, and the sides whose rows are multiplied by vectors of distances."""

_MOST_POSITIONS = 1 << 13
"""Tables of distances have at most twice as many rows."""


@dataclass(frozen=True)
class RelativeKeys:
    """What BERT has in place of a table of positions; every layer has a vector of head_dim for each distance.

    ``relative_key`` adds the product of the query with that vector to a score (Shaw et al. 2018, "Self-Attention with
    Relative Position Representations"), ``relative_key_query`` that of the key too (Huang et al. 2020, "Improve
    Transformer Models with Better Relative Position Embeddings", method 4). All heads have the same vectors.
    ``scaled``: they are added before the scores are divided by the root of head_dim, as all but ALBERT have it.
    """

    sides: tuple[str, ...]
    scaled: bool = True

    @staticmethod
    def read(config: Config, sizes: Sizes, *, scaled: bool = True) -> RelativeKeys | None:
        """None where the config says other positions. Raises ``UnsupportedModelError`` for too many of them."""
        kind = config.text("position_embedding_type")
        if kind not in RELATIVE_KEYS:
            return None
        if sizes.positions > _MOST_POSITIONS:
            raise UnsupportedModelError(
                f"{config.where}: max_position_embeddings is {sizes.positions} with position_embedding_type {kind!r}; "
                f"encast has tables of the distances of at most {_MOST_POSITIONS} positions"
            )
        return RelativeKeys(RELATIVE_KEYS[kind], scaled)

    def score(
        self, encoder: Modules, sizes: Sizes, *, layer: int, path: str, table: str = ""
    ) -> Callable[[str, str], str]:
        """What ``encoder_layer`` takes as ``score``; ``table``: where the layer's vectors stand, if not as in BERT."""
        table = table or f"{path}.attention.self.distance_embedding"

        def scores(query: str, key: str) -> str:
            graph, at, size = encoder.graph, f"{path}.attention", sizes.hidden // sizes.heads
            factor = 1.0 / math.sqrt(size)
            # Row 0 would be that of a distance of all positions, which no text has: op relative_scores wants it.
            rows = encoder.padded_before(f"{table}.weight", 2 * sizes.positions - 1, size)

            def scale(made: str) -> str:
                return graph.add("scale", made, name=f"{at}.scaled_scores", layer=layer, factor=factor)

            made = graph.add("attention_scores", query, key, name=f"{at}.scores", layer=layer, heads=sizes.heads)
            made = made if self.scaled else scale(made)
            for side in self.sides:
                x = query if side == "query" else key
                name = f"{at}.{side}_distance_scores"
                made = graph.add("relative_scores", made, x, rows, name=name, layer=layer, of=side, max_distance=0)
            return scale(made) if self.scaled else made

        return scores
