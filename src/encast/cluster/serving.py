"""The application of Ray Serve: ``serve run`` and config files name it ``encast.cluster.serving:app``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from encast.cluster.ingress import Ingress
from encast.cluster.membership import MembershipRouter
from encast.cluster.scaling import QUEUED_TOKENS, QUEUED_TOKENS_A_CARD
from encast.cluster.server import ModelServer
from encast.cluster.settings import Settings
from encast.cluster.size import Size, fit, given_size

__all__ = ["GATEWAYS", "SERVERS", "app", "application", "places"]

SERVERS, GATEWAYS = "servers", "gateways"
"""The names of the deployments, for the ``deployments`` of a config file."""

_HEALTH_S = 1.0
_HEALTH_TIMEOUT_S = 10.0

_UNHEARD_S = 2.0
"""For so long a server goes on that Ray Serve takes away: by then all gateways know."""

_SPARE_S = 15.0
_MOST_GATEWAYS = 10_000
_CALLS = 1_000
"""Of an actor's methods at once; requests that come through Ray's proxy are calls of a gateway."""


def app(args: Mapping[str, Any]) -> serve.Application:
    """The application of a config file's ``args``: see ``Settings``. Raises ``EncastError``."""
    return application(Settings.of(args))


def application(settings: Settings) -> serve.Application:
    """The gateways, bound to the servers. Raises ``ResourceError`` where size or number of the servers follow from the
    nodes, and none of these can have a server. Where both are given, nodes may come later.
    """
    size, replicas = given_size(settings), settings.replicas
    if size is None or replicas is None:
        size, room = places(settings)
        replicas = replicas or (room, room)
    drain_s = settings.drain_s()
    least, most = replicas
    count: dict[str, Any] = {"num_replicas": least}
    if least < most:
        policy = AutoscalingPolicy(
            policy_function="encast.cluster.scaling:ServersByQueuedTokens",
            policy_kwargs={
                "queued_tokens": settings.queued_tokens or size.gpus * QUEUED_TOKENS_A_CARD or QUEUED_TOKENS
            },
        )
        count = {
            "num_replicas": "auto",
            "autoscaling_config": AutoscalingConfig(
                # Ray Serve's own interval of ten seconds would see a burst when it is over.
                min_replicas=least, max_replicas=most, policy=policy, metrics_interval_s=1.0, look_back_period_s=5.0,
                upscale_delay_s=2.0, downscale_delay_s=120.0,
            ),
        }  # fmt: skip
    servers = serve.deployment(ModelServer).options(
        name=SERVERS,
        ray_actor_options={"num_cpus": size.cpus, "num_gpus": size.gpus},
        user_config={"models": dict(settings.models)},
        health_check_period_s=_HEALTH_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=_UNHEARD_S,
        graceful_shutdown_timeout_s=_UNHEARD_S + drain_s + _SPARE_S,
        max_ongoing_requests=_CALLS,
        request_router_config=RequestRouterConfig(request_router_class=MembershipRouter),
        **count,
    )
    if settings.gateways is None:
        each_node = AutoscalingPolicy(policy_function="encast.cluster.scaling:gateway_a_node")
        count = {
            "num_replicas": "auto",
            "autoscaling_config": AutoscalingConfig(
                min_replicas=1, max_replicas=_MOST_GATEWAYS, initial_replicas=_nodes(), policy=each_node,
                upscale_delay_s=1.0, downscale_delay_s=1.0,
            ),
        }  # fmt: skip
    else:
        count = {"num_replicas": settings.gateways}
    gateways = serve.deployment(Ingress).options(
        name=GATEWAYS,
        ray_actor_options={"num_cpus": 0},
        max_replicas_per_node=1,
        health_check_period_s=_HEALTH_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        # Before the servers, so that what gateways have accepted still has somebody to answer it.
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=drain_s + _SPARE_S,
        max_ongoing_requests=_CALLS,
        **count,
    )
    bound = servers.bind(list(settings.models), settings.arguments(), settings.keys, size, settings.card, drain_s)
    return gateways.bind(bound, settings.host, settings.port, settings.limits(), drain_s, settings.keys)


def _nodes() -> int:
    return sum(bool(node["Alive"]) for node in ray.nodes())


def places(settings: Settings) -> tuple[Size, int]:
    """What Ray holds for a server, and how many servers fit on the nodes that there are. Raises ``ResourceError`` for
    none."""
    return fit(settings, [node for node in ray.nodes() if node["Alive"]])
