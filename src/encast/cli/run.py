"""``encast run``: the rows of a file in, an answer for each out, in the same order and in bounded memory."""

from __future__ import annotations

import json as json_module
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from encast import engine as engines
from encast.cli.devices import Devices, GpuDtype
from encast.cli.interrupts import sigterm_interrupts
from encast.cli.progress import Progress
from encast.cli.run_job import SHARD_ROWS, SOME_ROWS_BAD, Asked, is_job, need_local, run_job_command
from encast.data import FORMATS, OUTPUT_FORMATS, BadRow, BadRows, RowReader, Writer, open_rows, open_writer
from encast.data.remote import local_path, shown
from encast.engine import BATCH_TOKENS
from encast.errors import EncastError, InputError
from encast.jobs.answers import Answers, columns_of_task, need_options, task_name
from encast.tasks.pooling import Pooling
from encast.tasks.table import RunOptions, file_task
from encast.tasks.tokenize import OnLong

__all__ = ["SOME_ROWS_BAD", "run_command"]


def run_command(
    artifact: Annotated[Path, typer.Argument(help="A compiled artifact (NAME.encast).")],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[INPUT]...",
            help="Files of rows, gzipped or not, folders of them, their URLs; - is standard input.",
        ),
    ] = None,
    task: Annotated[
        str,
        typer.Option(
            help="embed, embed_sparse, embed_tokens, embed_m3, classify, answer, tag, rerank, fill_mask or features; "
            "auto: the artifact's."
        ),
    ] = "auto",
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", help="Where answers go; - is standard output. Of a job a folder, which a name with / is."
        ),
    ] = "-",
    format: Annotated[
        str, typer.Option(help=f"{', '.join(OUTPUT_FORMATS)}; auto: by the name of the output, else jsonl.")
    ] = "auto",
    input_format: Annotated[
        str, typer.Option(help=f"{', '.join(FORMATS)}; auto: by the name of the input, else text.")
    ] = "auto",
    text_column: Annotated[str | None, typer.Option(help="The column of the text (question, query).")] = None,
    pair_column: Annotated[
        str | None, typer.Option(help="The column of the second text (context, documents), if there is one.")
    ] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one run of the model.")] = BATCH_TOKENS,
    errors: Annotated[
        Path | None, typer.Option(help="Where bad rows go, as JSONL; default: beside the output, or stderr.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens that neighbouring windows share (answer, --on-long windows).")
    ] = None,
    null_threshold: Annotated[
        float | None,
        typer.Option(help="Answer '' where having none scores higher than the best one by more than this (answer)."),
    ] = None,
    prompt_name: Annotated[
        str | None,
        typer.Option(help="The checkpoint's prompt before every text (of embeddings); default: as it says."),
    ] = None,
    truncate_dim: Annotated[
        int | None, typer.Option(min=1, help="Keep so many of an embedding's first numbers (embed).")
    ] = None,
    max_active_dims: Annotated[
        int | None, typer.Option(min=1, help="Keep so many of a sparse embedding's largest weights (embed_sparse).")
    ] = None,
    kind: Annotated[str, typer.Option(help="Whether the texts are document or query (embed_tokens).")] = "document",
    on_long: Annotated[
        str, typer.Option(help="Texts beyond the model's length: truncate, error, or windows that are pooled.")
    ] = "truncate",
    pooling: Annotated[
        str | None,
        typer.Option(help="How windows of a text become one answer: mean or max; default: max to rerank, else mean."),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads an instance; default: the usable cores.")] = None,
    instances: Annotated[int, typer.Option(help="Copies of the executor that share the weights.")] = 1,
    device: Devices = None,
    dtype: GpuDtype = None,
    shard_rows: Annotated[
        int | None, typer.Option(min=1, help=f"Of a job: rows of a file of answers; default: {SHARD_ROWS}.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run a job on this Ray cluster: auto, or HOST:PORT of its head."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a summary as one JSON document.")] = False,
) -> None:
    """Answer the rows of a text file (a line a row), JSONL, CSV or Parquet.

    Every answer names its row: the line on which it begins, from 1 (Parquet: its place). Rows that cannot be
    read or answered go to the error file with the reason, and the rest go on: exit code 3 then says that answers
    are written and some rows have none. When no row can be answered nothing is written, and the exit code is 2.

    Several inputs, a folder of them, or an output that is a folder make a job: its answers are files of --shard-rows
    rows each, and the same command goes on with a job that was ended. With --ray a cluster runs it.

    --device cuda:0 --device cuda:1 puts the model on both cards, which share the rows.
    """
    inputs, devices = inputs or ["-"], device or ["cpu"]
    if on_long not in ("truncate", "error", "windows"):
        raise InputError(f"--on-long is {on_long!r}; truncate, error and windows are known")
    if pooling not in (None, "mean", "max"):
        raise InputError(f"--pooling is {pooling!r}; mean and max are known")
    if kind not in ("document", "query"):
        raise InputError(f"--kind is {kind!r}; document and query are known")
    options = RunOptions(
        cast(OnLong, on_long),
        stride,
        prompt_name,
        null_threshold,
        truncate_dim,
        max_active_dims,
        "query" if kind == "query" else "document",
        cast(Pooling | None, pooling),
    )
    if ray is not None or shard_rows is not None or is_job(inputs, output):
        if errors is not None:
            raise InputError("--errors is for one file; of a job every file of answers has its bad rows beside it")
        columns_named = (text_column, pair_column)
        asked = Asked(
            artifact, inputs, output, task, format, input_format, columns_named, batch_tokens, options, devices, dtype
        )
        run_job_command(asked, shard_rows or SHARD_ROWS, ray, threads=threads, instances=instances, json=json)
        return
    (input,) = inputs
    need_local("--output", output)
    began = time.monotonic()
    with (
        sigterm_interrupts(),
        engines.load(
            artifact, device=devices, dtype=dtype, threads=threads, instances=instances, batch_tokens=batch_tokens
        ) as engine,
    ):
        name = task_name(engine.session, task)
        spec = file_task(name)
        columns = columns_of_task(spec, text_column, pair_column)
        need_options(engine.session, name, options)
        error_file = errors or (None if output == "-" else Path(output + ".errors.jsonl"))
        _need_unlike(
            {"the input": local_path(input), "--output": output, "--errors": "-" if error_file is None else error_file}
        )
        set_aside = BadRows(error_file)
        with open_rows(input, columns, input_format) as reader:
            width = truncate_dim or engine.dim
            writer = open_writer(output, {"row": "int", **spec.columns}, format, width=width)
            with Progress("rows", quiet=json) as progress:
                answers = Answers(engine, spec, columns, options)
                done = _Run(answers, reader, writer, set_aside, progress, engine.at_once).run()
    seconds = time.monotonic() - began
    summary = {
        "artifact": str(artifact),
        "device": devices[0] if len(devices) == 1 else devices,
        "task": name,
        "input": shown(input),
        "output": output,
        "rows": done,
        "bad_rows": set_aside.count,
        "errors": str(set_aside.path) if set_aside.path and set_aside.count else None,
        "seconds": round(seconds, 3),
    }
    if json:
        print(json_module.dumps(summary), file=sys.stderr if output == "-" else sys.stdout)
    else:
        where = f" in {set_aside.path}" if set_aside.path else ""
        bad = f", {set_aside.count:,} bad row{'s' if set_aside.count > 1 else ''}{where}" if set_aside.count else ""
        print(f"encast: {done:,} rows in {seconds:.1f} s{bad}", file=sys.stderr)
    if set_aside.count:
        raise typer.Exit(SOME_ROWS_BAD)


class _Run:
    """One pass over the input."""

    def __init__(
        self,
        answers: Answers,
        reader: RowReader,
        writer: Writer,
        set_aside: BadRows,
        progress: Progress,
        at_once: int,
    ) -> None:
        self.answers, self.reader, self.writer = answers, reader, writer
        self.set_aside, self.progress, self.at_once = set_aside, progress, at_once
        self.done = 0
        self.first_bad: BadRow | None = None

    def run(self) -> int:
        """The number of answered rows. When it breaks off, finished ones stay, and the error says where."""
        try:
            for answers in self._answered_groups():
                self._finish_group(answers)
            if self.done == 0 and self.first_bad is not None:
                self.writer.output.discard()
                bad = self.first_bad
                raise InputError(
                    f"none of the {self.set_aside.count} rows could be used; the first bad one is row {bad.number}: "
                    f"{bad.reason}"
                )
            self.writer.finish()
        except BaseException as error:
            kept = self.writer.keep()
            note = f"the {self.done:,} finished rows are in {kept}" if kept else ""
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(*([note] if note else [])) from None
            if isinstance(error, EncastError) and note:
                raise type(error)(f"{error}; {note}") from None
            raise
        finally:
            self.set_aside.close()
        return self.done

    def _answered_groups(self) -> Iterator[list[dict[str, Any] | BadRow]]:
        """Answers in the order of the input, from as many groups side by side as keep the engine busy. Where the input
        is damaged, those to the groups before that come first."""
        pool = ThreadPoolExecutor(self.at_once)
        under_way: deque[Future[list[dict[str, Any] | BadRow]]] = deque()
        groups = self.answers.groups(self.reader)
        damaged: InputError | None = None
        try:
            while True:
                try:
                    group = next(groups, None)
                except InputError as error:
                    damaged = error
                    break
                if group is None:
                    break
                under_way.append(pool.submit(self.answers.of, group))
                if len(under_way) > self.at_once:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
            if damaged is not None:
                raise damaged
        finally:
            pool.shutdown(cancel_futures=True)

    def _finish_group(self, answers: list[dict[str, Any] | BadRow]) -> None:
        records: list[dict[str, Any]] = []
        for answered in answers:
            if isinstance(answered, BadRow):
                self._set_aside(answered)
            else:
                records.append(answered)
        self.writer.write(records)
        self.done += len(records)
        self.progress.update(self.done, self.reader.fraction())

    def _set_aside(self, bad: BadRow) -> None:
        self.first_bad = self.first_bad or bad
        self.set_aside.add(bad)


def _need_unlike(files: Mapping[str, str | Path]) -> None:
    """Raises ``InputError`` when two of the files are one, of which a run would lose the content."""
    seen: dict[str, str] = {}
    for name, path in files.items():
        real = os.path.realpath(path)
        # Standard streams, devices and pipes may serve twice.
        if str(path) == "-" or (os.path.exists(real) and not os.path.isfile(real)):
            continue
        if real in seen:
            raise InputError(f"{seen[real]} and {name} are one file, {path}; name another one")
        seen[real] = name
