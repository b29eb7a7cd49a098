"""``encast compile``: a checkpoint in, an artifact out, and what was fused, or what a budget allows (``budget``)."""

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
from encast.compile import check_sparse, compile
from encast.data.datasets import DATASETS
from encast.errors import ArtifactError, InputError
from encast.quant import QuantSpec

__all__ = ["compile_command"]


def compile_command(
    source: Annotated[
        str, typer.Argument(help="A folder, a hub id, a TensorFlow prefix, GluonNLP's .params, an .onnx file.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The artifact's folder; default: the checkpoint's name + .encast."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of weights and activations in products: int8, bf16 or f32.")] = "int8",
    task: Annotated[
        str | None,
        typer.Option(
            help="features, embed, embed_sparse, embed_tokens, embed_m3, classify, tag, answer or fill_mask; "
            "default: the checkpoint's."
        ),
    ] = None,
    quant: Annotated[Path | None, typer.Option(help="A JSON file with the fields of a QuantSpec.")] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="PATTERN=DTYPE: products of that name get a wider dtype; may be given several times."),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Fail if a fusion that the config promises, or --sparse asks for, is missed."),
    ] = False,
    sparse: Annotated[
        str,
        typer.Option(
            help="never, auto (where it is faster on this machine) or always: int8 products leave out blocks of zeros."
        ),
    ] = "never",
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Texts (lines, rows, a data set) that fix the ranges of int8: static, not a scale a row."),
    ] = None,
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify",
            help="Compare an ONNX file with ONNX Runtime, a SavedModel with TensorFlow; default: where installed.",
        ),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            help="Of a checkpoint with adapters (jina-embeddings-v3): the one to put into the weights, or none."
        ),
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="exp, erf and tanh by libm, not polynomials.")] = False,
    max_drop: Annotated[
        float | None,
        typer.Option(help="Find the fastest artifact that loses at most this share of f32's metric: 0.01 for 1 %."),
    ] = None,
    data: Annotated[Path | None, typer.Option(help=f"For --max-drop, labelled rows: {DATASETS}.")] = None,
    metric: Annotated[
        str | None, typer.Option(help="For --max-drop; default: accuracy, spearman, f1 or entity_f1, by the rows.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a search of --max-drop that was interrupted.")
    ] = False,
    text_column: Annotated[
        str | None, typer.Option(help="Of --data, if it is not called text (question, words); for tables.")
    ] = None,
    pair_column: Annotated[str | None, typer.Option(help="The column of the second text (context).")] = None,
    label_column: Annotated[str | None, typer.Option(help="The column of the class (answers, labels).")] = None,
    score_column: Annotated[str | None, typer.Option(help="The column of the score, instead of a class.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Turn a checkpoint into an artifact that runs anywhere, and say what was fused.

    An artifact of the same name is replaced once the new one is complete. With --max-drop several are compiled and
    measured on --data, and the fastest within the budget is kept.
    """
    columns = {"text": text_column, "pair": pair_column, "label": label_column, "score": score_column}
    if max_drop is not None:
        from encast.cli.budget import compile_within  # here: a plain compile needs no engine

        _refuse(
            "the search of --max-drop decides that",
            dtype=dtype != "int8",
            quant=quant,
            keep=keep,
            strict=strict,
            verify=verify is not None,
            calibrate=calibrate,
        )
        if data is None:
            raise InputError("--max-drop needs --data, a data set to measure the drop on; see `encast eval`")
        compile_within(
            source,
            out,
            max_drop=max_drop,
            data=data,
            metric=metric,
            resume=resume,
            task=task,
            columns=columns,
            sparse=sparse,
            exact=exact,
            adapter=adapter,
            json=json,
        )
        return
    named = {f"{name}-column": column for name, column in columns.items()}
    _refuse("it is for a search with --max-drop", data=data, metric=metric, resume=resume, **named)
    spec = _spec(dtype, quant, keep or [])
    check_sparse(sparse, spec)
    if out is not None:
        artifacts.check_target(out)
    begin = time.perf_counter()
    spec, calibration = calibrated(source, calibrate, task, spec, adapter=adapter, quiet=json)
    with Progress("MiB written", quiet=json) as progress:
        path = compile(
            source,
            out,
            dtype=spec.dtype,
            task=task,
            # Without a word on them, ranges that the checkpoint fixes are taken.
            quant=None if spec == QuantSpec(spec.dtype) and quant is None else spec,
            calibration=calibration,
            strict=strict,
            exact=exact,
            sparse=sparse,
            verify=verify,
            adapter=adapter,
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


def _refuse(why: str, **options: object) -> None:
    for name, given in options.items():
        if given:
            raise InputError(f"--{name} was given: {why}; leave one of them out")


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
