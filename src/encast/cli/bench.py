"""``encast bench``: measures runtimes side by side."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from encast.cli.interrupts import sigterm_interrupts
from encast.errors import InputError, ResourceError, need_modules

__all__ = ["bench_command"]


def bench_command(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OVERRIDES...",
            help="NAME=VALUE: a study, backend, model, workload, scenario, launcher or a field: timing.seconds=4.",
        ),
    ] = None,
    multirun: Annotated[
        bool, typer.Option("--multirun", "-m", help="Measure every combination of the values NAME=A,B,C.")
    ] = False,
    resume: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Go on with an experiment that ended early.")
    ] = None,
    conf: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="Groups of your own, FOLDER/backend/NAME.yaml; may be given again."),
    ] = None,
    list_groups: Annotated[
        bool, typer.Option("--list", help="Show what there is in every group, with fields and prices, and stop.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON lines.")] = False,
) -> None:
    """Measures backends side by side: same inputs, same threads, in turn, each checked before it is timed.

    All backends of one command are compared: encast bench backend=encast-int8,openvino-int8 workload.length=32.
    Rows go to rows.jsonl and rows.csv of a folder; encast bench report FOLDER makes a page of them. Where not one row
    was measured, the exit code is 2.
    """
    need_modules("bench", "hydra", "psutil", "scipy", "yaml")
    folders = conf or []
    if list_groups:
        from encast.bench.listing import listing

        listed = listing(folders)
        if as_json:
            typer.echo(json.dumps({**listed.groups, "fields": listed.fields, "price": listed.prices}))
        else:
            typer.echo("\n".join(listed.lines()))
        return
    from encast.bench.rows import BusyError
    from encast.bench.session import open_session, resume_session

    if resume is not None:
        if overrides or multirun or conf:
            raise InputError("--resume goes on with the overrides of the folder's config.yaml; leave all others out")
        session = resume_session(resume)
    else:
        session = open_session(overrides or [], multirun=multirun, folders=folders)
    show = _json if as_json else _line
    try:
        with sigterm_interrupts():
            rows = session.run(_say, show)
    except KeyboardInterrupt as interrupt:
        raise type(interrupt)(*[_kept(session.folder)] * session.can_resume()) from None
    except BusyError:
        raise
    except Exception as error:
        # A folder that cannot be resumed is not recommended for it.
        if session.began() and not (resume is not None and isinstance(error, InputError)):
            _say(_kept(session.folder))
        raise
    noisy = sum(bool((row["noise"] or {}).get("noisy")) for row in rows)
    if noisy:
        _say(f"the machine was noisy during {noisy} of {_rows(len(rows))}; their field noise.why says how")
    statuses = Counter(row["status"] for row in rows)
    if not statuses["ok"]:
        found = ", ".join(f"{count} {status}" for status, count in statuses.most_common())
        absent = statuses["unavailable"]
        advice = [f"--resume {session.folder} measures what has been installed since"] * bool(absent)
        if len(rows) > absent:
            advice.append("what failed stays as it is, so give another experiment=NAME to try it again")
        raise ResourceError(
            f"nothing was measured: {_rows(len(rows))}, {found}; the field reason of each, in "
            f"{session.folder / 'rows.jsonl'}, says why; {'; '.join(advice)}"
        )
    are = f"{_rows(len(rows))} {'is' if len(rows) == 1 else 'are'}"
    _say(f"{are} in {session.folder}; `encast bench report {session.folder}` makes a page of them")


def _kept(folder: Path) -> str:
    return f"finished rows are in {folder}; --resume {folder} goes on"


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _say(text: str) -> None:
    print(f"encast: {text}", file=sys.stderr, flush=True)


def _json(row: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(row))
    sys.stdout.flush()


def _line(row: Mapping[str, Any]) -> None:
    point = " ".join(f"{name}={value}" for name, value in row["point"].items())
    name = row["backend"]["name"]
    head = f"{name:24} {row['model']['name']} {row['scenario']} {point}"
    failed = f"{row['status']}: {str(row['reason']).removeprefix(f'{name}: ')}"
    typer.echo(f"{head}  {_result(row) if row['status'] == 'ok' else failed}")
    sys.stdout.flush()


def _result(row: Mapping[str, Any]) -> str:
    from encast.bench.scenarios.base import COLD_START, LATENCY, THROUGHPUT

    metrics = row["metrics"]
    found, shown = [], ""
    latency = metrics.get("latency_ms")
    if latency and latency.get("p50") is not None:
        shown = LATENCY
        found.append(f"p50 {latency['p50']:.3f} ms{_interval(metrics.get('latency_ms_interval'))}")
    if metrics.get("sequences_per_s") is not None:
        shown = shown or THROUGHPUT
        found.append(f"{metrics['sequences_per_s']:.1f}/s{_interval(metrics.get('sequences_per_s_interval'))}")
    if metrics.get("cold_start_s"):
        shown = COLD_START
        found.append(f"starts in {metrics['cold_start_s']['total']:.3f} s{_interval(metrics['cold_start_s_interval'])}")
    by = "" if row["compared_by"] == shown else f" by {row['compared_by']}"
    for name, ratio in row["ratio_to"].items():
        low_high = None if ratio["low"] is None else (ratio["low"], ratio["high"])
        found.append(f"{ratio['ratio']:.2f}{_interval(low_high)} times as fast as {name}{by}")
    if row["cost"]:
        found.append(f"{row['cost']['usd_per_million']:.3g} USD a million")
    if not found:
        found = [f"{name} {value}" for name, value in metrics.items() if isinstance(value, (int, float))]
    return ", ".join(found) + (" (noisy)" if row["noise"] and row["noise"]["noisy"] else "")


def _interval(bounds: Any) -> str:
    return "" if not bounds else f" [{bounds[0]:.3f}, {bounds[1]:.3f}]"
