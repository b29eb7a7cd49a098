"""How large servers are, and how many fit on the nodes of a cluster."""

from __future__ import annotations

import re
from typing import Any

import pytest

from encast.cluster.settings import Settings
from encast.cluster.size import Size, fit, given_size
from encast.errors import ResourceError

CARDS: dict[str, Any] = {"options": {"device": "cuda"}}


def nodes(*resources: tuple[int, int]) -> list[dict[str, Any]]:
    """Of CPUs and GPUs."""
    return [{"Resources": {"CPU": float(cpus), **({"GPU": float(gpus)} if gpus else {})}} for cpus, gpus in resources]


def settings(**given: Any) -> Settings:
    return Settings({"a": "/a.encast"}, **given)


@pytest.mark.parametrize(
    ("given", "there", "size", "room"),
    [
        # On CPUs cards are of no matter.
        ({}, [(4, 0), (8, 2)], Size(4), 3),
        ({"replica_cpus": 2}, [(4, 0), (7, 0)], Size(2), 5),
        # A server a node, with all that the node has.
        (CARDS, [(8, 0), (16, 4), (16, 4)], Size(16, 4), 2),
        # That of the smallest node with cards; the larger node's CPUs are enough for all of its cards.
        (CARDS, [(64, 8), (8, 2)], Size(8, 2), 5),
        (CARDS, [(8, 8), (8, 2)], Size(2, 2), 5),
        ({**CARDS, "replica_gpus": 1}, [(17, 8)], Size(2, 1), 8),
        ({**CARDS, "replica_gpus": 3}, [(12, 8), (12, 2)], Size(6, 3), 2),
        # Fewer CPUs than cards: the cards count.
        ({**CARDS, "replica_gpus": 1}, [(2, 4)], Size(0, 1), 4),
        ({**CARDS, "replica_gpus": 1, "replica_cpus": 4}, [(8, 4), (8, 1), (64, 0)], Size(4, 1), 3),
    ],
)
def test_what_a_server_takes(given: dict[str, Any], there: list[tuple[int, int]], size: Size, room: int) -> None:
    assert fit(settings(**given), nodes(*there)) == (size, room)


@pytest.mark.parametrize(
    ("given", "there", "reason"),
    [
        ({}, [(0, 0)], "no node of the Ray cluster has CPUs"),
        ({"replica_cpus": 4}, [(1, 0)], "a server takes 4 CPUs, the largest node of the cluster has 1"),
        (CARDS, [(8, 0), (4, 0)], "no node of the Ray cluster has GPUs: it has 2 nodes with 12 CPUs. Start nodes with"),
        ({**CARDS, "replica_gpus": 4}, [(8, 2)], "a server takes 4 GPUs, the largest node of the cluster has 2"),
        (
            {**CARDS, "replica_gpus": 2, "replica_cpus": 16},
            [(8, 2), (64, 1)],
            "a server takes 16 CPUs beside its GPUs, the largest node of the cluster that has 2 GPUs has 8",
        ),
    ],
)
def test_no_room_is_said(given: dict[str, Any], there: list[tuple[int, int]], reason: str) -> None:
    with pytest.raises(ResourceError, match=re.escape(reason)):
        fit(settings(**given), nodes(*there))


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ({}, None),
        ({"replica_cpus": 4}, Size(4)),
        ({**CARDS, "replica_cpus": 4}, None),
        ({**CARDS, "replica_gpus": 1}, None),
        ({**CARDS, "replica_cpus": 4, "replica_gpus": 1}, Size(4, 1)),
    ],
)
def test_a_size_that_is_given_needs_no_nodes(given: dict[str, Any], size: Size | None) -> None:
    assert given_size(settings(**given)) == size


def test_gateways_weigh_servers_by_what_computes() -> None:
    assert Size(16, 4).weight == 4
    assert Size(0, 1).weight == 1
    assert Size(2.5).weight == 2.5


@pytest.mark.parametrize(
    ("given", "taken", "queued_tokens"),
    [
        ({}, {"num_cpus": 4, "num_gpus": 0}, 16_384),
        ({**CARDS, "replica_gpus": 2}, {"num_cpus": 4, "num_gpus": 2}, 2 * 262_144),
        ({**CARDS, "replica_gpus": 2, "queued_tokens": 5}, {"num_cpus": 4, "num_gpus": 2}, 5),
    ],
)
def test_what_ray_serve_is_told(given: dict[str, Any], taken: dict[str, float], queued_tokens: int) -> None:
    """Without a cluster: what is given needs no look at nodes."""
    pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
    from encast.cluster.serving import application

    made = application(settings(replica_cpus=4, replicas=(1, 4), gateways=1, **given))
    (servers,) = made._bound_deployment.init_args[:1]
    deployment = servers._bound_deployment
    assert {name: deployment.ray_actor_options[name] for name in taken} == taken
    policy = deployment._deployment_config.autoscaling_config.policy
    assert policy.policy_kwargs == {"queued_tokens": queued_tokens}
