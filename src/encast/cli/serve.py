"""``encast serve``: artifacts behind HTTP and gRPC."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from encast.errors import need_modules

__all__ = ["serve_command"]


def serve_command(
    artifact: Annotated[
        list[str],
        typer.Argument(help="[NAME=]PATH of an artifact, a checkpoint folder, or a hub id."),
    ],
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free, which is printed.")] = 8080,
) -> None:
    """Serve."""
    need_modules("serve", "msgspec", "starlette", "uvicorn", "uvloop", "httptools")
    from encast.serve.options import ServeOptions
    from encast.serve.supervisor import Source, Supervisor

    sources = [Source(Path(one).stem, one, (), lambda one=one: Path(one).resolve()) for one in artifact]
    supervisor = Supervisor(
        sources,
        ServeOptions(host, port),
        say=lambda line: print(f"encast: {line}", flush=True),
        warn=lambda line: print(f"encast: {line}", file=sys.stderr, flush=True),
    )
    code = supervisor.run()
    if code:
        raise typer.Exit(code)
