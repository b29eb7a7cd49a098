"""``encast run``: the rows of a file in, an answer for each out, in the same order and in bounded memory."""

from __future__ import annotations

import json as json_module
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer

from encast import engine as engines
from encast.cli.progress import Progress
from encast.data import FORMATS, OUTPUT_FORMATS, BadRow, BadRows, Row, RowReader, Writer, open_rows, open_writer
from encast.engine import BATCH_TOKENS, Engine
from encast.errors import EncastError, InputError
from encast.tasks.table import FileTask, RunOptions, file_task

__all__ = ["SOME_ROWS_BAD", "run_command"]

SOME_ROWS_BAD = 3
"""The exit code when answers were written and some rows have none; a pipeline may go on with them or stop."""

_GROUP_ROWS = 1024
_CHARACTERS_A_TOKEN = 4


def run_command(
    artifact: Annotated[Path, typer.Argument(help="A compiled artifact (NAME.encast).")],
    input: Annotated[str, typer.Argument(help="A file of rows, gzipped or not; - is standard input.")] = "-",
    task: Annotated[
        str,
        typer.Option(
            help="embed, embed_sparse, embed_tokens, classify, answer, tag, rerank, fill_mask or features; auto: the "
            "artifact's."
        ),
    ] = "auto",
    output: Annotated[str, typer.Option("--output", "-o", help="Where answers go; - is standard output.")] = "-",
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
        int | None, typer.Option(help="Tokens that neighbouring windows of a long context share (answer).")
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
    on_long: Annotated[str, typer.Option(help="Texts beyond the model's length: truncate or error.")] = "truncate",
    threads: Annotated[int | None, typer.Option(help="Threads an instance; default: the usable cores.")] = None,
    instances: Annotated[int, typer.Option(help="Copies of the executor that share the weights.")] = 1,
    device: Annotated[
        str, typer.Option(help="cpu; cuda, or cuda:1 for the second card; torch-cpu: the card's steps on the CPU.")
    ] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="Of a card: what values are stored and multiplied in, f32, f16 or bf16.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a summary as one JSON document.")] = False,
) -> None:
    """Answer the rows of a text file (a line a row), JSONL, CSV or Parquet.

    Every answer names its row: the line on which it begins, from 1 (Parquet: its place). Rows that cannot be
    read or answered go to the error file with the reason, and the rest go on: exit code 3 then says that answers
    are written and some rows have none. When no row can be answered nothing is written, and the exit code is 2.
    """
    if on_long not in ("truncate", "error"):
        raise InputError(f"--on-long is {on_long!r}; truncate and error are known")
    if kind not in ("document", "query"):
        raise InputError(f"--kind is {kind!r}; document and query are known")
    options = RunOptions(
        "error" if on_long == "error" else "truncate",
        stride,
        prompt_name,
        null_threshold,
        truncate_dim,
        max_active_dims,
        "query" if kind == "query" else "document",
    )
    began = time.monotonic()
    with engines.load(
        artifact, device=device, dtype=dtype, threads=threads, instances=instances, batch_tokens=batch_tokens
    ) as engine:
        name = _task_name(engine, task)
        spec = file_task(name)
        columns = _columns(spec, text_column, pair_column)
        error_file = errors or (None if output == "-" else Path(output + ".errors.jsonl"))
        _need_unlike({"the input": input, "--output": output, "--errors": "-" if error_file is None else error_file})
        set_aside = BadRows(error_file)
        with open_rows(input, columns, input_format) as reader:
            writer = open_writer(output, {"row": "int", **spec.columns}, format, width=engine.dim)
            with Progress("rows", quiet=json) as progress:
                done = _Run(engine, spec, columns, options, reader, writer, set_aside, progress, instances).run()
    seconds = time.monotonic() - began
    summary = {
        "artifact": str(artifact),
        "device": device,
        "task": name,
        "input": input,
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
        engine: Engine,
        spec: FileTask,
        columns: Sequence[str],
        options: RunOptions,
        reader: RowReader,
        writer: Writer,
        set_aside: BadRows,
        progress: Progress,
        instances: int,
    ) -> None:
        self.engine, self.spec, self.columns, self.options = engine, spec, columns, options
        self.reader, self.writer, self.set_aside, self.progress = reader, writer, set_aside, progress
        self.instances = instances
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

    def _groups(self) -> Iterator[list[Row | BadRow]]:
        """Rows in groups of about one run of the model, bad ones in their places."""
        limit = self.engine.session.batch_tokens * _CHARACTERS_A_TOKEN
        group: list[Row | BadRow] = []
        characters = 0
        for row in self.reader:
            group.append(row)
            characters += len(row.raw)
            if characters >= limit or len(group) >= _GROUP_ROWS:
                yield group
                group, characters = [], 0
        if group:
            yield group

    def _answered_groups(self) -> Iterator[list[dict[str, Any] | BadRow]]:
        """Answers in the order of the input, from as many groups side by side as there are instances."""
        pool = ThreadPoolExecutor(self.instances)
        under_way: deque[Future[list[dict[str, Any] | BadRow]]] = deque()
        try:
            for group in self._groups():
                under_way.append(pool.submit(self._in_order, group))
                if len(under_way) > self.instances:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
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

    def _in_order(self, group: list[Row | BadRow]) -> list[dict[str, Any] | BadRow]:
        """A record or a bad row for each, as they stand in the file."""
        good = [row for row in group if not isinstance(row, BadRow)]
        answered = iter(self._answers(good) if good else ())
        return [row if isinstance(row, BadRow) else next(answered) for row in group]

    def _answers(self, rows: list[Row]) -> list[dict[str, Any] | BadRow]:
        """A record or a bad row for each; bits do not depend on neighbours, so halving finds the bad ones."""
        values = [tuple(row.values[column] for column in self.columns) for row in rows]
        try:
            records = self.engine.drive(self.spec.run(self.engine.session, values, self.options))
        except InputError as error:
            if len(rows) == 1:
                return [rows[0].bad(str(error).replace("texts[0]", "the text"))]
            half = len(rows) // 2
            return self._answers(rows[:half]) + self._answers(rows[half:])
        return [{"row": row.number, **record} for row, record in zip(rows, records, strict=True)]

    def _set_aside(self, bad: BadRow) -> None:
        self.first_bad = self.first_bad or bad
        self.set_aside.add(bad)


def _task_name(engine: Engine, asked: str) -> str:
    """The task to run; raises ``InputError`` when the artifact has no head for it."""
    name = engine.task if asked == "auto" else asked
    file_task(name)
    if name != "features":
        engine.session.need(f"--task {name}", *(("classify", "embed", "embed_tokens") if name == "rerank" else (name,)))
    return name


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


def _columns(spec: FileTask, text_column: str | None, pair_column: str | None) -> list[str]:
    pair = pair_column or spec.pair
    columns = [text_column or spec.text, *([pair] if pair else [])]
    if len(set(columns)) != len(columns):
        raise InputError(f"--text-column and --pair-column are both {columns[0]!r}; name two columns")
    return columns
