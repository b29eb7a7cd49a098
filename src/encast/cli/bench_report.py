"""``encast bench report``: folders of results as one HTML page and Markdown, and two experiments compared."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from encast.bench.report.build import Options, build_document
from encast.bench.report.compare import MARGIN, Comparison, compare
from encast.bench.report.load import Broken, Loaded, load
from encast.data.output import OutputFile
from encast.errors import InputError, ResourceError
from encast.measure.price import parse_price
from encast.pages.document import to_html, to_markdown

__all__ = ["report_command"]

_SAID_BROKEN = 3


def report_command(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="What `encast bench` wrote: folders with a rows.jsonl, or above them.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Where report.html goes; default: the first folder, of --compare the new one."
        ),
    ] = None,
    old_and_new: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            "--compare", metavar="OLD NEW", help="Two folders; says of every row that both have what changed."
        ),
    ] = None,
    margin: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="With --compare, the smallest difference that counts.")
    ] = MARGIN,
    price: Annotated[
        str | None, typer.Option(help="Of an hour of this machine: 0.17/h, or a name of prices.yaml; for dollars.")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="The backend that ratios are shown against; default: the first not encast's.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Of the report; default: the names of the experiments.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Write report.md as well.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print what was made, and what changed, as JSON.")] = False,
) -> None:
    """Make one HTML page of benchmark results, which needs no network, and compare two experiments."""
    folders = list(folders or [])
    if old_and_new is None and not folders:
        raise InputError(
            "name a folder that `encast bench` has written, such as bench-results/NAME of experiment=NAME, or "
            "--compare OLD NEW"
        )
    priced = parse_price(price) if price is not None else None
    loaded = load(folders or [old_and_new[1]] if old_and_new else folders)
    known = list(dict.fromkeys(row.backend for row in loaded.rows))
    if reference is not None and reference not in known:
        raise InputError(f"--reference {reference!r} has no row here; there are {', '.join(known) or 'none at all'}")
    broken = list(loaded.broken)
    comparison = None
    if old_and_new is None:
        _need_measured(loaded, folders)
    else:
        comparison, more = _compared(*old_and_new, margin)
        broken += [one for one in more if one not in broken]
    document = build_document(
        Loaded(loaded.rows, tuple(broken), loaded.settings, loaded.replaced),
        Options(title or _title(loaded), reference, priced, comparison),
    )
    folder = out if out is not None else _folder((folders or [old_and_new[1]])[0] if old_and_new else folders[0])
    texts = {"report.html": to_html(document), **({"report.md": to_markdown(document)} if markdown else {})}
    written = _write(folder, texts)
    if json:
        typer.echo(json_module.dumps(_document(loaded, broken, comparison, written), indent=2))
        return
    for one in broken[:_SAID_BROKEN]:
        typer.echo(f"encast: {one.file}, line {one.line}: {one.reason}; left out", err=True)
    if len(broken) > _SAID_BROKEN:
        typer.echo(f"encast: {len(broken) - _SAID_BROKEN} more broken lines are listed in the report", err=True)
    if comparison is not None:
        for warning in comparison.warnings:
            typer.echo(f"encast: {warning}", err=True)
        typer.echo(", ".join(f"{count} {conclusion}" for conclusion, count in comparison.counts().items() if count))
    for path in written:
        typer.echo(str(path))


def _need_measured(loaded: Loaded, folders: Sequence[Path]) -> None:
    """Raises ``InputError`` where a page would have nothing but reasons: those it says."""
    if any(row.measured for row in loaded.rows):
        return
    where = ", ".join(map(str, folders))
    whys = list(dict.fromkeys(f"{row.backend} is {row.status}: {row.reason}" for row in loaded.rows))
    whys += [f"{one.file}, line {one.line}: {one.reason}" for one in loaded.broken]
    more = f"; and {len(whys) - _SAID_BROKEN} more" if len(whys) > _SAID_BROKEN else ""
    said = f" ({'; '.join(whys[:_SAID_BROKEN])}{more})" if whys else ", it holds none at all"
    raise InputError(f"{where}: no row was measured{said}; measure one with `encast bench` before you report on it")


def _compared(old: Path, new: Path, margin: float) -> tuple[Comparison, list[Broken]]:
    before, after = load([old]), load([new])
    comparison = compare(before.rows, after.rows, names=(_name(old), _name(new)), margin=margin)
    return comparison, [*before.broken, *after.broken]


def _name(path: Path) -> str:
    path = path.resolve()
    return path.parent.name if path.name == "rows.jsonl" else path.name


def _folder(path: Path) -> Path:
    return path.parent if path.is_file() else path


def _title(loaded: Loaded) -> str:
    names = list(dict.fromkeys(row.experiment for row in loaded.rows))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") or "Benchmark"


def _write(folder: Path, texts: dict[str, str]) -> list[Path]:
    """Each file is whole or as it was before."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"{folder}: cannot be made ({error.strerror}); choose another --out") from None
    written = []
    for name, text in texts.items():
        file = OutputFile(folder / name, "--out")
        try:
            file.append(text.encode("utf-8"))
            file.finish()
        finally:
            file.discard()
        written.append(folder / name)
    return written


def _document(
    loaded: Loaded, broken: Sequence[Broken], comparison: Comparison | None, written: Sequence[Path]
) -> dict[str, Any]:
    return {
        "written": [str(path) for path in written],
        "rows": len(loaded.rows),
        "measured": sum(row.measured for row in loaded.rows),
        "broken": [{"file": one.file, "line": one.line, "reason": one.reason} for one in broken],
        "comparison": None
        if comparison is None
        else {
            "counts": comparison.counts(),
            "warnings": list(comparison.warnings),
            "drift": comparison.drift,
            "conclusions": [
                {
                    "conclusion": one.conclusion,
                    "backend": one.row.backend,
                    "model": one.row.model,
                    "workload": one.row.workload,
                    "scenario": one.row.scenario,
                    "launcher": one.row.launcher,
                    "point": dict(one.row.point),
                    "ratio": one.ratio,
                    "interval": one.interval,
                    "why": one.why,
                }
                for one in comparison.changes
            ],
        },
    }
