"""``encast compile``: a checkpoint in, an artifact out, and what was fused."""

from __future__ import annotations

import json as json_module
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from encast import artifact as artifacts
from encast.artifact.strict_json import parse_json
from encast.cli.calibration import calibrated
from encast.cli.inspect import size, summary
from encast.cli.progress import Progress
from encast.compile import compile
from encast.errors import ArtifactError, InputError
from encast.quant import QuantSpec

__all__ = ["compile_command"]


def compile_command(
    source: Annotated[str, typer.Argument(help="A checkpoint folder in the Hugging Face layout, or a hub id.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The artifact's folder; default: the checkpoint's name + .encast."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of weights and activations in products: int8, bf16 or f32.")] = "int8",
    task: Annotated[
        str | None, typer.Option(help="features, embed, classify, tag, answer or fill_mask; default: the checkpoint's.")
    ] = None,
    quant: Annotated[Path | None, typer.Option(help="A JSON file with the fields of a QuantSpec.")] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="PATTERN=DTYPE: products of that name get a wider dtype; may be given several times."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail if a fusion that the config promises is missed.")
    ] = False,
    sparse: Annotated[
        str, typer.Option(help="never or always: int8 products leave out blocks of zeros (4 outputs x 1 input).")
    ] = "never",
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Texts (lines, rows, a data set) that fix the ranges of int8: static, not a scale a row."),
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="exp, erf and tanh by libm, not polynomials.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Turn a checkpoint into an artifact that runs anywhere, and say what was fused.

    An artifact of the same name is replaced once the new one is complete.
    """
    spec = _spec(dtype, quant, keep or [])
    begin = time.perf_counter()
    spec, calibration = calibrated(source, calibrate, task, spec, quiet=json)
    with Progress("MiB written", quiet=json) as progress:
        path = compile(
            source,
            out,
            dtype=spec.dtype,
            task=task,
            quant=spec,
            calibration=calibration,
            strict=strict,
            exact=exact,
            sparse=sparse,
            progress=lambda stage, done, total: progress.update(done >> 20, done / total),
        )
    seconds = time.perf_counter() - begin
    opened = artifacts.open(path)
    if json:
        document = {"artifact": str(path), "seconds": round(seconds, 3), "card": opened.card}
        typer.echo(json_module.dumps(document, indent=2))
        return
    for line in summary(opened):
        typer.echo(line)
    typer.echo("")
    typer.echo(f"{path}: {size(sum(opened.card['sizes'].values()))}, compiled in {seconds:.1f} s")


def _spec(dtype: str, quant: Path | None, keep: list[str]) -> QuantSpec:
    spec = QuantSpec(dtype)
    if quant is not None:
        try:
            fields = parse_json(quant.read_bytes(), str(quant))
        except OSError as error:
            raise InputError(f"{quant} cannot be read: {error.strerror or error}") from None
        except ArtifactError as error:
            raise InputError(str(error)) from None
        spec = QuantSpec.from_json({"dtype": dtype, **fields} if isinstance(fields, dict) else fields)
    pairs = []
    for text in keep:
        pattern, equals, wider = text.rpartition("=")
        if not equals:
            raise InputError(f"--keep {text!r}: PATTERN=DTYPE is needed, as in '*.output.dense=bf16'")
        pairs.append((pattern, wider))
    return replace(spec, keep=(*pairs, *spec.keep))
