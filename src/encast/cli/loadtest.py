"""``encast loadtest``: asks a running server as many clients would, and says how fast and how rightly it answers."""

from __future__ import annotations

import json as json_module
import os
import re
import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from encast.cli.interrupts import Terminated
from encast.data import FORMATS
from encast.data.output import OutputFile
from encast.errors import InputError, need_modules
from encast.pages.document import PACKAGES

if TYPE_CHECKING:
    from encast.loadtest.plan import Load
    from encast.loadtest.requests import Source

__all__ = ["SOME_FAILED", "loadtest_command"]

SOME_FAILED = 3
"""The exit code when the test was done and some requests failed or were answered wrongly."""

_API_KEY = "ENCAST_API_KEY"
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
"""A name of a header: RFC 9110, section 5.6.2."""


def loadtest_command(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server, such as http://127.0.0.1:8080.")],
    protocol: Annotated[
        str,
        typer.Option(
            help="openai, openai-floats, tei-embed, tei-predict, tei-rerank, cohere, jina, kserve or kserve-grpc."
        ),
    ] = "openai",
    model: Annotated[str | None, typer.Option(help="The model's name; default: the first that /v1/models has.")] = None,
    clients: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: so many clients, each sends when it has its answer.")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="With --clients, the requests of each.")] = None,
    rate: Annotated[
        float | None, typer.Option(help="Open loop: requests a second that come at random, answered or not.")
    ] = None,
    ramp: Annotated[
        str | None, typer.Option(metavar="FROM:TO", help="Open loop whose rate rises until it is not served.")
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="Open loop of recorded arrivals: seconds, a line each.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="How long, for --clients, --rate and --ramp; default of the last two: 30.")
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Of --ramp.")] = 10,
    limit_ms: Annotated[float | None, typer.Option(help="With --ramp, a rate is served if p99 is within it.")] = None,
    texts: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Texts as `encast run` reads them; several files are taken in turn."),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Made texts instead: LENGTH:COUNT,... or a JSON or CSV file of such pairs.")
    ] = None,
    text_column: Annotated[str | None, typer.Option(help="The column of the text (text; of rankings: query).")] = None,
    pair_column: Annotated[
        str | None, typer.Option(help="The column of the second text, or of the documents of a ranking.")
    ] = None,
    input_format: Annotated[
        str, typer.Option(help=f"Of --texts: {', '.join(FORMATS)}; auto: by the name of the file, else text.")
    ] = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Texts a request, or documents a query.")] = 1,
    reference: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="What `encast run` answered to these texts; bits of f32 must be equal."),
    ] = None,
    tolerance: Annotated[float, typer.Option(min=0.0, help="With --reference, by how much numbers may differ.")] = 0.0,
    warmup: Annotated[int, typer.Option(min=1, help="Requests before the test that do not count.")] = 16,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that a request may take.")] = 30.0,
    connections: Annotated[int, typer.Option(min=1, help="The most at once in open loops.")] = 1024,
    api_key: Annotated[
        str | None, typer.Option(help=f"Sent as Authorization: Bearer KEY; default: {_API_KEY} of the environment.")
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option(metavar="NAME:VALUE", help="Sent with every request; may be given again.")
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=JSON", help="Added to every body: truncate=true, dimensions=256; may be given again."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals and made texts.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON document.")] = False,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a page with plots; - is standard output, instead of text.")
    ] = None,
) -> None:
    """Ask a running server as many clients would.

    A closed loop (--clients 96 --requests 128) shows throughput; an open loop (--rate 200 --seconds 30) the latency
    that users feel, counted from the time at which each request was due. --ramp 50:800 finds the highest rate that is
    served: at least 0.95 of the requests answered in time, and p99 within --limit-ms.

    Only texts answered with success count. No request is sent twice. Exit code 3: some requests failed or were
    answered wrongly, or none was answered; requests that the server rejects with 429 are counted apart.
    """
    need_modules("serve", "httptools", "orjson")
    if html is not None:
        need_modules("plot", *PACKAGES)
    if json and html == "-":
        raise InputError("--json and --html - both write to standard output; name a file for one of them")
    from encast.loadtest.page import to_page
    from encast.loadtest.plan import Plan
    from encast.loadtest.run import run
    from encast.loadtest.summary import summary_lines

    plan = Plan(
        url=url,
        sources=_sources(protocol, texts or [], lengths, text_column, pair_column, input_format, seed),
        load=_load(clients, requests, rate, ramp, trace, seconds, steps, limit_ms, seed),
        protocol=protocol,
        model=model,
        batch=batch,
        headers=_headers(header or [], api_key or os.environ.get(_API_KEY)),
        fields=_fields(field or []),
        timeout=timeout,
        connections=connections,
        warmup=warmup,
        reference=reference or (),
        tolerance=tolerance,
    )
    page = None if html is None else OutputFile(html, "--html")  # tried before any work
    try:
        result = run(plan, _say)
        if json:
            typer.echo(json_module.dumps(result.to_json(), indent=2))
        elif html != "-":
            typer.echo("\n".join(summary_lines(result)))
        if page is not None:
            page.append(to_page(result).encode("utf-8", "replace"))
            page.finish()
    finally:
        if page is not None:
            page.discard()
    if result.interrupted:
        kind = Terminated if result.interrupted == signal.SIGTERM.name else KeyboardInterrupt
        raise kind(f"the figures are of the {result.seconds:.1f} s until then")
    if result.failed:
        raise typer.Exit(SOME_FAILED)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _sources(
    protocol: str,
    files: list[str],
    lengths: str | None,
    text_column: str | None,
    pair_column: str | None,
    format: str,
    seed: int,
) -> list[Source]:
    from encast.loadtest.protocols import protocol_of
    from encast.loadtest.requests import of_lengths, of_rankings, of_texts

    if bool(files) == (lengths is not None):
        raise InputError("give what is asked: --texts FILE, or --lengths LENGTH:COUNT,... such as 16:100,128:10")
    if lengths is not None:
        return [of_lengths(lengths, seed)]
    if protocol_of(protocol).answer == "ranking" and pair_column is not None:
        return [of_rankings(file, text_column or "query", pair_column, format) for file in files]
    return [of_texts(file, text_column or "text", pair_column, format) for file in files]


def _load(
    clients: int | None,
    requests: int | None,
    rate: float | None,
    ramp: str | None,
    trace: str | None,
    seconds: float | None,
    steps: int,
    limit_ms: float | None,
    seed: int,
) -> Load:
    from encast.loadtest.plan import ClosedLoop, OpenLoop, Ramp

    kinds = {"--clients": clients, "--rate": rate, "--ramp": ramp, "--trace": trace}
    given = [option for option, value in kinds.items() if value is not None]
    if len(given) != 1:
        raise InputError(f"{' and '.join(given) or 'no load'} given; give one of {', '.join(kinds)}")
    for option, value, fitting in (
        ("--requests", requests, ("--clients",)),
        ("--seconds", seconds, ("--clients", "--rate", "--ramp")),
        ("--limit-ms", limit_ms, ("--ramp",)),
    ):
        if value is not None and given[0] not in fitting:
            raise InputError(f"{option} is for {' and '.join(fitting)}; leave it out with {given[0]}")
    if clients is not None:
        return ClosedLoop(clients, requests, seconds)
    if trace is not None:
        return OpenLoop.trace(trace)
    if rate is not None:
        return OpenLoop.poisson(rate, seconds or 30.0, seed)
    first, _, last = str(ramp).partition(":")
    try:
        rates = float(first), float(last)
    except ValueError:
        raise InputError(f"--ramp is {ramp!r}; give two rates, such as 50:800") from None
    return Ramp(*rates, seconds or 30.0, steps, limit_ms, seed)


def _fields(given: list[str]) -> dict[str, Any]:
    fields = {}
    for one in given:
        name, equals, value = one.partition("=")
        try:
            fields[name] = json_module.loads(value)
        except ValueError:
            equals = ""
        if not equals or not name:
            raise InputError(f"--field is {one!r}; give NAME=JSON, such as truncate=true or user='\"me\"'")
    return fields


def _headers(given: list[str], api_key: str | None) -> dict[str, str]:
    headers = {"Authorization": f"Bearer {api_key.strip()}"} if api_key else {}
    for one in given:
        name, colon, value = one.partition(":")
        if not colon:
            raise InputError(f"--header is {one!r}; give NAME:VALUE")
        headers[name.strip()] = value.strip()
    for name, value in headers.items():
        if not _TOKEN.fullmatch(name) or not (value.isascii() and value.isprintable()):
            which = "the API key" if name == "Authorization" else f"--header {name!r}"
            raise InputError(
                f"{which} holds what no header can; give a name of letters and digits and a value in ASCII"
            )
    return headers
