"""How large a server of a cluster is, and how many fit on its nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from encast.cluster.cards import count_of, need_cards
from encast.cluster.settings import Settings
from encast.errors import ResourceError

__all__ = ["Size", "fit", "given_size"]


@dataclass(frozen=True)
class Size:
    """What Ray holds for a server. ``gpus``: 0 for one on CPUs."""

    cpus: float
    gpus: int = 0

    @property
    def weight(self) -> float:
        """What a gateway divides its load by: what computes."""
        return self.gpus or self.cpus


def given_size(settings: Settings) -> Size | None:
    """What the settings say of it, None where that takes a look at the nodes."""
    if settings.replica_cpus is None or (settings.card is not None and settings.replica_gpus is None):
        return None
    return Size(settings.replica_cpus, settings.replica_gpus or 0)


def fit(settings: Settings, nodes: Sequence[Mapping[str, Any]]) -> tuple[Size, int]:
    """A server's size, and how many fit on these ``nodes``, of ``ray.nodes()``. Raises ``ResourceError`` for none."""
    if settings.card is not None:
        return _fit_cards(settings, nodes)
    having = [cpus for cpus in map(_cpus, nodes) if cpus > 0]
    if not having:
        raise ResourceError("no node of the Ray cluster has CPUs; start one with: ray start --address HEAD:6379")
    wanted = settings.replica_cpus or min(having)
    room = sum(int(count / wanted) for count in having)
    if not room:
        raise ResourceError(f"a server takes {wanted:g} CPUs, the largest node of the cluster has {max(having):g}")
    return Size(wanted), room


def _fit_cards(settings: Settings, nodes: Sequence[Mapping[str, Any]]) -> tuple[Size, int]:
    """By default a server takes the cards of the smallest node that has some, and so many CPUs that as many servers fit
    as the cards are for."""
    need_cards(nodes)
    having = [(_cpus(node), count_of(node)) for node in nodes if count_of(node)]
    gpus = settings.replica_gpus or min(count for _, count in having)
    servers = [(cpus, count // gpus) for cpus, count in having if count >= gpus]
    if not servers:
        most = max(count for _, count in having)
        raise ResourceError(f"a server takes {gpus} GPUs, the largest node of the cluster has {most}")
    wanted = settings.replica_cpus
    if wanted is None:
        wanted = min(cpus // count for cpus, count in servers)
    room = sum(min(count, int(cpus / wanted)) if wanted else count for cpus, count in servers)
    if not room:
        most_cpus = max(cpus for cpus, _ in servers)
        raise ResourceError(
            f"a server takes {wanted:g} CPUs beside its GPUs, the largest node of the cluster that has {gpus} GPUs has "
            f"{most_cpus:g}"
        )
    return Size(wanted, gpus), room


def _cpus(node: Mapping[str, Any]) -> float:
    return float(node["Resources"].get("CPU", 0.0))
