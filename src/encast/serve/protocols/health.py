"""Whether the server lives, whether it is ready, and its metrics: for load balancers, orchestrators and Prometheus."""

from __future__ import annotations

import msgspec

from encast.serve.call import Call
from encast.serve.errors import RefusalError
from encast.serve.operations import Operation, Protocol, Reply
from encast.serve.service import Service

__all__ = ["HEALTH"]


class Health(msgspec.Struct):
    """``status``: "live" or "ready"; ``models``: the names that are served."""

    status: str
    models: list[str]


class Unwell(msgspec.Struct):
    """Why it is not."""

    error: str


async def _live(service: Service, call: Call, body: None) -> Reply:
    return Reply(msgspec.json.encode(Health("live", list(service.models.by_name))))


async def _ready(service: Service, call: Call, body: None) -> Reply:
    reason = service.reason()
    if reason:
        raise RefusalError("unavailable", reason, retry_after=1)
    return Reply(msgspec.json.encode(Health("ready", list(service.models.by_name))))


async def _metrics(service: Service, call: Call, body: None) -> Reply:
    return Reply(await service.ask("metrics"), media_type="text/plain; version=0.0.4; charset=utf-8")


HEALTH = Protocol(
    "health",
    [
        Operation(
            "GET", "/health/live", "health.live", "Whether the server answers", _live, answer=Health, runs=False,
            open=True,
        ),
        Operation(
            "GET", "/health/ready", "health.ready",
            "Whether every model's canary was answered right and requests are taken; 503 says why not", _ready,
            answer=Health, runs=False, open=True,
        ),
        Operation(
            "GET", "/metrics", "health.metrics", "What the server counts, for Prometheus", _metrics,
            media_type="text/plain", runs=False,
        ),
    ],
    lambda refusal: msgspec.json.encode(Unwell(refusal.message)),
    error_type=Unwell,
)  # fmt: skip
