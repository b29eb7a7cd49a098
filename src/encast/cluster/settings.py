"""What an application of servers is made of: the ``args`` of a config file, or the command line, checked."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import encast.artifact as artifacts
from encast.errors import InputError
from encast.serve.options import check_card_options
from encast.serve.service import RequestLimits

__all__ = ["OPTIONS", "OWN_OPTIONS", "Settings"]

OPTIONS = {
    "api-keys", "alias", "batch-tokens", "body-timeout-s", "card-dtype", "config", "cors", "device", "drain-s",
    "fronts", "header-timeout-s", "instances", "log", "log-texts", "max-body-mb", "max-concurrent", "max-delay-ms",
    "max-inflight-mb", "max-queue-tokens", "max-text-kb", "max-texts", "max-wait-ms", "otlp", "page", "pin", "price",
    "shadow", "slowdown", "threads", "timeout-s",
}  # fmt: skip
"""Those of ``encast serve`` that every server of the cluster can have."""

OWN_OPTIONS = {
    "dtype": "compile the checkpoint first, to storage that all nodes share",
    "grpc-port": "gateways speak HTTP alone",
    "tls-cert": "gateways speak HTTP: end TLS in the load balancer before them",
    "tls-key": "gateways speak HTTP: end TLS in the load balancer before them",
    "live": "the page at / has the numbers of a server, /metrics those of all",
}
"""Those that one machine alone can have, and what to do instead."""

_PATHS = ("api-keys", "config", "log")
_FLAGS = {"log-texts", "page", "pin"}
_MOST = 1e9  # seconds, MiB
_ARGS = ("models", "options", "host", "port", "replica_cpus", "replica_gpus", "replicas", "queued_tokens", "gateways")


@dataclass(frozen=True)
class Settings:
    """``models``: paths of artifacts by name, the same on every node. ``options``: of ``encast serve``, by their names
    without dashes before them. ``replica_cpus``: that a server takes, None for those of the smallest node.
    ``replica_gpus``: the same of cards, where the option ``device`` asks for them; see ``size.fit``. ``replicas``: how
    many, at least and at most; None for as many as fit. ``queued_tokens``: see ``scaling.ServersByQueuedTokens``, None
    for its default. ``gateways``: how many, None for one a node.
    """

    models: Mapping[str, str]
    options: Mapping[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 8080
    replica_cpus: float | None = None
    replica_gpus: int | None = None
    replicas: tuple[int, int] | None = None
    queued_tokens: int | None = None
    gateways: int | None = None

    @staticmethod
    def of(args: Mapping[str, Any]) -> Settings:
        """Of a config file. Raises ``InputError``, and ``ArtifactError`` for a model that is none."""
        unknown = sorted(set(args) - set(_ARGS))
        if unknown:
            raise InputError(f"args has {', '.join(unknown)}; known are {', '.join(_ARGS)}")
        if "models" not in args:
            raise InputError("args has no models; give NAME: PATH of each artifact")
        options = args.get("options") or {}
        if not isinstance(options, Mapping):
            raise InputError(f"options is {options!r}; give names of options of encast serve with their values")
        made = Settings(
            models=_models(args["models"]),
            options={str(name): value for name, value in options.items()},
            # In a cluster's pods nobody but the cluster's own network reaches the port.
            host=str(args.get("host", "0.0.0.0")),
            port=int(_number("port", args.get("port", 8080), 0, 65535, whole=True)),
            replica_cpus=_optional("replica_cpus", args, 0.01, whole=False),
            replica_gpus=_whole("replica_gpus", args),
            replicas=_replicas(args.get("replicas")),
            queued_tokens=_whole("queued_tokens", args),
            gateways=_whole("gateways", args),
        )
        made.check()
        return made

    def check(self) -> None:
        """Raises ``InputError`` for what no server can be started with, ``ArtifactError`` for a model that is none."""
        for name in self.options:
            if name in OWN_OPTIONS:
                raise InputError(f"--{name} is for one machine; {OWN_OPTIONS[name]}")
            if name not in OPTIONS:
                raise InputError(
                    f"there is no option {name!r} for servers on Ray; there are {', '.join(sorted(OPTIONS))}"
                )
        self._check_cards()
        if self.options.get("log") == "-":
            raise InputError("--log - would mix the lines of all servers; give a file, which each node has of its own")
        for path in self.models.values():
            artifacts.open(path)
        self.limits()
        self.drain_s()

    def _check_cards(self) -> None:
        devices, dtype = _several(self.options.get("device")), self.options.get("card-dtype")
        if any(":" in one for one in devices) or len(set(devices)) > 1:
            raise InputError(
                f"--device is {' and '.join(devices)}; on Ray it is cuda, without a number: Ray chooses the cards, and "
                "replica_gpus (--replica-gpus) says how many a server has"
            )
        check_card_options(devices, dtype, self.options)
        if self.replica_gpus is not None and not devices:
            raise InputError("replica_gpus (--replica-gpus) is for cards; give the option device too (--device cuda)")

    @property
    def card(self) -> str | None:
        """The kind of the cards that servers have, "cuda" or "torch-cpu"; None for servers on CPUs."""
        return next(iter(_several(self.options.get("device"))), None)

    def arguments(self) -> list[str]:
        """Of each server's command line, but for its models, its address, its keys and its cards."""
        found: list[str] = []
        for name, value in self.options.items():
            if name in ("api-keys", "device"):
                continue
            if name in _FLAGS:
                found += [f"--{name}"] if value is True else [] if name == "log-texts" else [f"--no-{name}"]
            else:
                for one in _several(value):
                    found += [f"--{name}", _absolute(name, one)]
        return found

    @property
    def keys(self) -> str | None:
        """The file of API keys."""
        path = self.options.get("api-keys")
        return None if path is None else os.path.abspath(path)

    def limits(self) -> RequestLimits:
        """Of requests, as the servers have them: gateways keep to them before a server is asked."""
        given: dict[str, Any] = {}
        for name, unit in (("max-body-mb", 1 << 20), ("max-inflight-mb", 1 << 20)):
            if name in self.options:
                given[name.replace("-mb", "_bytes").replace("-", "_")] = int(self._seconds(name) * unit)
        for name in ("timeout-s", "header-timeout-s", "body-timeout-s"):
            if name in self.options:
                given[name.replace("-", "_")] = self._seconds(name)
        if "max-concurrent" in self.options:
            given["max_concurrent"] = int(self._seconds("max-concurrent"))
        return RequestLimits(**given)

    def drain_s(self) -> float:
        """How long accepted requests may take when their server ends."""
        return self._seconds("drain-s") if "drain-s" in self.options else 30.0

    def _seconds(self, name: str) -> float:
        return _number(f"option {name}", self.options[name], 0, _MOST, whole=False)


def _several(value: Any) -> list[str]:
    """Of an option that may be given several times."""
    return [] if value is None else [str(one) for one in (value if isinstance(value, list | tuple) else [value])]


def _absolute(option: str, value: str) -> str:
    """Servers run elsewhere than the command."""
    if option == "shadow":
        path, colon, share = value.rpartition(":")
        return f"{os.path.abspath(path)}:{share}" if colon else value
    return os.path.abspath(value) if option in _PATHS else value


def _models(given: Any) -> dict[str, str]:
    if isinstance(given, Mapping):
        found = {str(name): str(path) for name, path in given.items()}
    else:
        texts = [given] if isinstance(given, str) else list(given) if isinstance(given, Sequence) else []
        found = {}
        for text in texts:
            name, equals, path = str(text).partition("=")
            if not equals:
                name, path = Path(os.path.abspath(text)).name.removesuffix(".encast"), str(text)
            if name in found:
                raise InputError(f"two models are called {name!r}; give one another name, as NAME={path}")
            found[name] = path
    if not found:
        raise InputError(f"models is {given!r}; give NAME: PATH of each artifact")
    return {name: os.path.abspath(path) for name, path in found.items()}


def _replicas(given: Any) -> tuple[int, int] | None:
    """``4``, ``"2-8"`` or ``[2, 8]``."""
    if given is None:
        return None
    parts = (
        str(given).split("-") if isinstance(given, str | int) else list(given) if isinstance(given, Sequence) else []
    )
    try:
        least, most = int(parts[0]), int(parts[-1])
        if len(parts) > 2 or not 1 <= least <= most:
            raise ValueError
    except (IndexError, TypeError, ValueError):
        raise InputError(f"replicas is {given!r}; give a number, or the least and the most as 2-8") from None
    return least, most


def _number(name: str, given: Any, least: float, most: float, *, whole: bool) -> float:
    try:
        value = float(given)
        if not least <= value <= most or (whole and value != int(value)):
            raise ValueError
    except (OverflowError, TypeError, ValueError):
        kind = "a whole number" if whole else "a number"
        bounds = f"from {least:g} to {most:g}" if most < math.inf else f"of {least:g} at least"
        raise InputError(f"{name} is {given!r}; give {kind} {bounds}") from None
    return value


def _optional(name: str, args: Mapping[str, Any], least: float, *, whole: bool) -> float | None:
    return None if args.get(name) is None else _number(name, args[name], least, math.inf, whole=whole)


def _whole(name: str, args: Mapping[str, Any]) -> int | None:
    value = _optional(name, args, 1, whole=True)
    return None if value is None else int(value)
