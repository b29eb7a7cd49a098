"""``encast serve --ray``: the same options, for servers on the nodes of a cluster."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from encast.cli.interrupts import sigterm_interrupts
from encast.errors import InputError, need_modules

__all__ = ["given_options", "serve_on_ray_command"]

_HERE = {
    "artifact", "host", "port", "json", "ray", "replicas", "replica_cpus", "replica_gpus", "queued_tokens", "gateways",
}  # fmt: skip
"""Parameters of the command that are not options of each server."""


def given_options(context: typer.Context) -> dict[str, Any]:
    """The options that stood on the command line, by their names, for each server."""
    found: dict[str, Any] = {}
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        if name in _HERE or source is None or source.name != "COMMANDLINE":
            continue
        found[name.replace("_", "-")] = str(value) if isinstance(value, Path) else value
    return found


def serve_on_ray_command(
    artifact: list[str], address: str, options: Mapping[str, Any], *, host: str, port: int, replicas: str | None,
    replica_cpus: float | None, replica_gpus: int | None, queued_tokens: int | None, gateways: int | None, json: bool,
) -> None:  # fmt: skip
    """Serves the artifacts on the cluster at ``address``."""
    need_modules("ray", "ray")
    from encast.cluster.deploy import serve_on_ray
    from encast.cluster.settings import Settings
    from encast.serve.sources import read_sources

    for source in read_sources(artifact, options.get("alias") or [], None):
        if source.compiled:
            raise InputError(
                f"{source.given} is a checkpoint; with --ray serve an artifact: `encast compile` it to storage that "
                "all nodes share"
            )
    args: dict[str, Any] = {"models": artifact, "options": options, "host": host, "port": port}
    args |= {"replicas": replicas, "replica_cpus": replica_cpus, "replica_gpus": replica_gpus}
    args |= {"queued_tokens": queued_tokens, "gateways": gateways}
    settings = Settings.of(args)

    def say(line: str) -> None:
        print(f"encast: {line}", file=sys.stderr if json else sys.stdout, flush=True)

    def announce(served: dict[str, Any]) -> None:
        print(json_module.dumps(served), flush=True)

    with sigterm_interrupts():
        code = serve_on_ray(address, settings, say, announce if json else None)
    if code:
        raise typer.Exit(code)
