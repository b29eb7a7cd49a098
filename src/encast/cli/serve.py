"""``encast serve``: artifacts behind HTTP and gRPC."""

from __future__ import annotations

import contextlib
import ipaddress
import json as json_module
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from encast.cli.interrupts import sigterm_interrupts
from encast.cli.progress import Progress
from encast.cli.serve_ray import given_options, serve_on_ray_command
from encast.errors import InputError, need_modules

__all__ = ["serve_command"]

_MODULES = ("httptools", "msgspec", "orjson", "prometheus_client", "starlette", "uvicorn", "uvloop")


def serve_command(
    context: typer.Context,
    artifact: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]ARTIFACT...",
            help="An artifact; or a checkpoint folder or hub id, which is compiled first, into the cache directory.",
        ),
    ],
    alias: Annotated[
        list[str] | None, typer.Option(metavar="NAME=MODEL", help="One more name of a model; several times.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of checkpoints that are compiled: int8, bf16 or f32; default: int8.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="What `encast tune` wrote for the model.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=4096, help="Of an instance.")] = None,
    instances: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=4096,
            help="Default: one a core, and one of several threads that takes a lone text on idle cores.",
        ),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CARD",
            help="cuda, or cuda:0, cuda:1, ...: an instance on each card; default: the CPU; with --ray cuda alone.",
        ),
    ] = None,
    card_dtype: Annotated[
        str | None,
        typer.Option(help="Of --device: what values are stored and multiplied in, f32, f16, bf16, f8 or f16-acc16."),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of HTTP; 0: any that is free.")] = 8080,
    grpc_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Of gRPC (KServe v2); 0: any that is free; default: no gRPC.")
    ] = None,
    fronts: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, help="Processes for HTTP; default: 1, from 8 cores on a quarter of them, at most 8."
        ),
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, max=1 << 20, help="Of one batch; default: as tuned, or 1024, on cards 8192.")
    ] = None,
    max_delay_ms: Annotated[
        float, typer.Option(min=0, max=10_000, help="How long a batch may wait for companions.")
    ] = 0.0,
    slowdown: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1e6,
            help="By how many times its own cost a text may be passed by shorter ones; 0: by none; default: 100.",
        ),
    ] = None,
    max_queue_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="More that would wait are refused (429); default: 262144, a card 4194304."),
    ] = None,
    max_wait_ms: Annotated[
        float | None,
        typer.Option(
            min=1, help="From arrival to answer; requests that would take longer are refused (429); default: 2000."
        ),
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=0.001, max=86_400, help="For a request; then 504.")] = 30.0,
    header_timeout_s: Annotated[
        float, typer.Option(min=0.001, max=86_400, help="For a request's header to arrive; then 408.")
    ] = 10.0,
    body_timeout_s: Annotated[
        float, typer.Option(min=0.001, max=86_400, help="For a request's body to arrive; then 408.")
    ] = 10.0,
    max_body_mb: Annotated[float, typer.Option(min=0.001, max=1024, help="Of a request's body (413).")] = 16.0,
    max_texts: Annotated[int, typer.Option(min=1, help="Of a request (413).")] = 2048,
    max_text_kb: Annotated[float, typer.Option(min=0.001, max=1 << 20, help="Of one text (413).")] = 1024.0,
    max_concurrent: Annotated[int, typer.Option(min=1, help="Requests under way in a front (429).")] = 1024,
    max_inflight_mb: Annotated[
        float,
        typer.Option(min=0.001, max=1 << 20, help="Of the bodies under way in a front (429)."),
    ] = 256.0,
    drain_s: Annotated[
        float, typer.Option(min=0, max=86_400, help="After SIGTERM, for requests that were accepted.")
    ] = 30.0,
    api_keys: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Lines NAME sha256:HEX of keys; without it anyone may ask.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE", help="A certificate chain (PEM), for HTTPS.")] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its key, if it is not in the same file.")
    ] = None,
    cors: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help="Whose pages may ask; several times; default: nobody's.")
    ] = None,
    price: Annotated[
        str | None, typer.Option(help="Of this machine, for dollars per million: 0.17/h, or a name.")
    ] = None,
    log: Annotated[
        str | None, typer.Option(metavar="FILE|-", help="JSON lines of requests and events; -: standard output.")
    ] = None,
    log_texts: Annotated[bool, typer.Option("--log-texts", help="Let texts into the log.")] = False,
    otlp: Annotated[str | None, typer.Option(metavar="URL", help="A collector of OpenTelemetry for traces.")] = None,
    shadow: Annotated[
        str | None,
        typer.Option(metavar="ARTIFACT:PERCENT%", help="Compare a share of the runs with a reference artifact."),
    ] = None,
    pin: Annotated[
        bool, typer.Option("--pin/--no-pin", help="Bind instances to cores; not where others compute on these too.")
    ] = True,
    page: Annotated[bool, typer.Option("--page/--no-page", help="The page at / with charts and a box to try.")] = True,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Serve on this Ray cluster: auto, or HOST:PORT of its head."),
    ] = None,
    replicas: Annotated[
        str | None, typer.Option(metavar="N|MIN-MAX", help="Servers, with --ray; default: one a node.")
    ] = None,
    replica_cpus: Annotated[
        float | None, typer.Option(min=0.01, help="Of a server, with --ray; default: those of the smallest node.")
    ] = None,
    replica_gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Of a server, with --ray and --device; default: those of the smallest node with any."),
    ] = None,
    queued_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --replicas MIN-MAX: that may wait at a server; default: 16384, on cards 262144 a card."
        ),
    ] = None,
    gateways: Annotated[
        int | None, typer.Option(min=1, help="That listen on --port, with --ray; default: one a node.")
    ] = None,
    live: Annotated[
        bool | None, typer.Option("--live/--no-live", help="A line a second on stderr; default: on a terminal.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print what is served as a line of JSON, and lines for people on stderr.")
    ] = False,
) -> None:
    """Serve models over HTTP and gRPC: embeddings, reranking, labels, entities, answers, masks.

    It speaks the routes of OpenAI, Cohere, Jina, text-embeddings-inference and KServe v2. SIGTERM and Ctrl-C take no
    more requests, answer what was accepted and end with exit code 0; a second one ends at once. SIGHUP opens
    artifacts, keys and certificates again without losing a request. With --ray every node of a cluster serves.
    """
    if api_keys is None and not _loopback(host):
        _warn(f"anyone who reaches {host} may use this server; give --api-keys, or leave --host out")
    if ray is not None:
        # Servers are compared with their options where they start; what only one machine can have is refused here.
        serve_on_ray_command(
            artifact, ray, given_options(context), host=host, port=port, replicas=replicas, replica_cpus=replica_cpus,
            replica_gpus=replica_gpus, queued_tokens=queued_tokens, gateways=gateways, json=json,
        )  # fmt: skip
        return
    if any(one is not None for one in (replicas, replica_cpus, replica_gpus, queued_tokens, gateways)):
        raise InputError(
            "--replicas, --replica-cpus, --replica-gpus, --queued-tokens and --gateways are for a cluster; give --ray "
            "too"
        )
    need_modules("serve", *_MODULES, *(["grpc"] if grpc_port is not None else []))
    # Here, so that --help needs none of them.
    from encast.machine import usable_cores
    from encast.quant import QuantSpec
    from encast.serve.options import ServeOptions, check_card_options
    from encast.serve.service import RequestLimits
    from encast.serve.shadow import parse_shadow
    from encast.serve.sources import read_sources
    from encast.serve.supervisor import Supervisor
    from encast.serve.tracing import collector_address
    from encast.tune.configuration import Configuration

    if dtype is not None:
        QuantSpec(dtype)
    if tls_key is not None and tls_cert is None:
        raise InputError("--tls-key belongs to a certificate; give --tls-cert too")
    if json and log == "-":
        raise InputError("--json and --log - both print to standard output; give --log a file")
    if log_texts and log is None:
        raise InputError("--log-texts is about the log; give --log too")
    if config is not None and (threads is not None or instances is not None):
        raise InputError("--config says the instances and their threads; leave --threads and --instances out")
    if config is not None and len(artifact) > 1:
        raise InputError("--config is for one model; serve others by a server of their own")
    check_card_options(device or (), card_dtype, given_options(context))
    if device is not None:
        need_modules("cuda", "torch")
    # What is wrong with a file or an address is said once, before anything is compiled or started.
    if config is not None:
        Configuration.of(config, batch_tokens=1).need_kind(on_cards=device is not None)
    sources = read_sources(artifact, alias or [], dtype)
    cores = len(usable_cores())
    options = ServeOptions(
        host=host,
        port=port,
        grpc_port=grpc_port,
        fronts=fronts or (1 if cores <= 4 else min(8, cores // 4)),
        config=_path(config),
        threads=threads,
        instances=instances,
        devices=tuple(device or ()),
        card_dtype=card_dtype,
        batch_tokens=batch_tokens,
        max_delay_s=max_delay_ms / 1e3,
        slowdown=slowdown,
        max_queue_tokens=max_queue_tokens,
        max_wait_s=None if max_wait_ms is None else max_wait_ms / 1e3,
        limits=RequestLimits(
            max_body_bytes=int(max_body_mb * (1 << 20)),
            max_texts=max_texts,
            max_text_bytes=int(max_text_kb * 1024),
            max_concurrent=max_concurrent,
            max_inflight_bytes=int(max_inflight_mb * (1 << 20)),
            timeout_s=timeout_s,
            header_timeout_s=header_timeout_s,
            body_timeout_s=body_timeout_s,
        ),
        drain_s=drain_s,
        api_keys=_path(api_keys),
        tls_cert=_path(tls_cert),
        tls_key=_path(tls_key),
        cors=tuple(cors or ()),
        price=price,
        log=log if log in (None, "-") else os.path.abspath(log),
        log_texts=log_texts,
        otlp=None if otlp is None else collector_address(otlp),
        shadow=None if shadow is None else parse_shadow(shadow),
        page=page,
        pin=pin,
    )
    # Until it serves there is nothing to drain: a signal ends the compiling.
    with sigterm_interrupts(), Progress("MiB written") as progress:
        supervisor = Supervisor(
            sources,
            options,
            say=lambda line: print(
                f"encast: {line}", file=sys.stderr if json or log == "-" else sys.stdout, flush=True
            ),
            announce=(lambda served: print(json_module.dumps(served), flush=True)) if json else None,
            warn=_warn,
            live=sys.stderr.isatty() if live is None else live,
            progress=lambda stage, done, total: progress.update(done >> 20, done / total),
        )
    code = supervisor.run()
    if code:
        raise typer.Exit(code)


def _path(path: Path | None) -> str | None:
    """Absolute: a relative one would mean another file after a change of folder."""
    return None if path is None else os.path.abspath(path)


def _loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _warn(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it
        print(f"encast: {line}", file=sys.stderr, flush=True)
