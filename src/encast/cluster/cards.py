"""The cards of a Ray cluster: who holds which of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from encast.errors import ResourceError

__all__ = ["count_of", "devices_of", "need_cards", "see_held_cards"]

_GPU = "GPU"
"""Ray's name of the resource."""


def count_of(node: Mapping[str, Any]) -> int:
    """Cards of a node of ``ray.nodes()``."""
    return int(node["Resources"].get(_GPU, 0))


def need_cards(nodes: Iterable[Mapping[str, Any]]) -> None:
    """Raises ``ResourceError`` where none of the nodes has a card."""
    nodes = list(nodes)
    if not any(map(count_of, nodes)):
        cpus = sum(node["Resources"].get("CPU", 0) for node in nodes)
        raise ResourceError(
            f"no node of the Ray cluster has GPUs: it has {len(nodes)} node{'s' if len(nodes) != 1 else ''} with "
            f"{cpus:g} CPUs. Start nodes with cards (`ray start` finds those of NVIDIA's driver, --num-gpus says how "
            "many there are), or leave --device out"
        )


def devices_of(card: str, count: int) -> list[str]:
    """So many devices of the kind ``card``, "cuda" or "torch-cpu", as an actor that holds them names them."""
    return [f"cuda:{index}" if card == "cuda" else card for index in range(count)]


def see_held_cards(count: int) -> None:
    """Has this actor, and the processes that it starts from now on, see the cards that Ray holds for it and no others:
    they are cuda:0, cuda:1, ... here. Raises ``ResourceError`` where they are fewer than ``count``.

    Ray does the same, but not where its ``RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES`` is set; each actor of a node
    would then take the first card.
    """
    import ray

    held = sorted(ray.get_runtime_context().get_accelerator_ids()[_GPU])
    if len(held) < count:
        raise ResourceError(
            f"Ray holds {len(held)} GPUs for this actor, and it computes on {count}; leave num_gpus out of "
            "ray_actor_options, and give replica_gpus"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(held)
