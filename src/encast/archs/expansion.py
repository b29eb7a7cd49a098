"""Queries that are filled up with mask tokens which no other token sees (ColBERT, arXiv 2004.12832)."""

from __future__ import annotations

from encast.errors import UnsupportedModelError
from encast.ir import Graph, Node

__all__ = ["hide_expansion"]


def hide_expansion(graph: Graph, token: int, most: int, where: str) -> None:
    """Hides from every attention the tokens equal to ``token`` at the end of a sequence, at most ``most`` of them.

    A text ends with a special token, so that a mask of its own is seen as any other token. Raises
    ``UnsupportedModelError`` where a local attention would leave a token without any key, and where vectors of
    distances are part of the scores: DeBERTa in transformers hides such tokens as queries too, and the fused op has no
    form for it.
    """
    encoder, graph.nodes = graph.nodes, []
    (seen,) = graph.append(
        Node("seen_tokens", ["token_ids"], ["seen_tokens"], {"token": token, "most": most}, "seen_tokens")
    )
    for node in encoder:
        if node.op == "local_mask" and node.attrs["reach"] < most:
            raise UnsupportedModelError(
                f"{where}: queries are filled up with as many as {most} masks that no token sees, and the reach of a "
                f"local attention is {node.attrs['reach']}: the last masks would see nothing; shorten the length of "
                "queries in the checkpoint"
            )
        if node.op == "relative_scores":
            raise UnsupportedModelError(
                f"{where}: queries are filled up with masks that no token sees, which attention with vectors of "
                "distances (DeBERTa, relative_key) cannot hide: let them be attended, or leave queries as they are"
            )
        if node.op == "softmax":
            scores = node.inputs[0]
            node.inputs = [graph.add("hide_keys", scores, seen, name=f"{scores}.seen", layer=node.layer)]
        graph.nodes.append(node)
