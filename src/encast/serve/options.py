"""What ``encast serve`` was asked for: one value that every process of the server has."""

from __future__ import annotations

from collections.abc import Container, Sequence

import msgspec

from encast.backends.devices import check_cards
from encast.errors import InputError
from encast.serve.service import RequestLimits

__all__ = ["ServeOptions", "check_card_options"]


class ServeOptions(msgspec.Struct, frozen=True):
    """The options of the command line, checked. Sizes are bytes, times seconds.

    ``config``: the file that ``encast tune`` wrote. ``devices``: the cards that have an instance each, none for
    instances on the CPU; ``card_dtype``: of their values, as ``encast.load`` takes it. ``batch_tokens``, ``slowdown``,
    ``max_queue_tokens`` and ``max_wait_s``: None for the engine's defaults. ``price``: as ``encast tune`` takes it.
    ``log``: a file, or "-". ``shadow``: (artifact, share of the requests, from 0 to 1). ``pin``: whether instances may
    be bound to cores.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    grpc_port: int | None = None
    fronts: int = 1
    config: str | None = None
    threads: int | None = None
    instances: int | None = None
    devices: tuple[str, ...] = ()
    card_dtype: str | None = None
    batch_tokens: int | None = None
    max_delay_s: float = 0.0
    slowdown: float | None = None
    max_queue_tokens: int | None = None
    max_wait_s: float | None = None
    limits: RequestLimits = RequestLimits()
    drain_s: float = 30.0
    api_keys: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    cors: tuple[str, ...] = ()
    price: str | None = None
    log: str | None = None
    log_texts: bool = False
    otlp: str | None = None
    shadow: tuple[str, float] | None = None
    page: bool = True
    pin: bool = True


def check_card_options(devices: Sequence[str], dtype: str | None, given: Container[str]) -> None:
    """Raises ``InputError`` for what cannot be asked of cards, or without any. ``given``: the names of the options that
    the user gave."""
    if devices:
        if any(name in given for name in ("threads", "instances")):
            raise InputError("--device has one instance a card; --threads and --instances are for the CPU")
        check_cards(devices, dtype, "a server")
    elif dtype is not None:
        raise InputError("--card-dtype is for cards; give --device too")
