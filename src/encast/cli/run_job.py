"""``encast run`` over many files: a job in shards, in this process or on a Ray cluster."""

from __future__ import annotations

import json as json_module
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import typer

import encast.artifact as artifacts
from encast.artifact.write import version
from encast.cli.progress import Progress
from encast.data import OUTPUT_FORMATS
from encast.data.arrow import pyarrow_parquet
from encast.data.inputs import list_inputs
from encast.data.remote import is_url
from encast.data.writers import vector_column
from encast.engine import session_of
from encast.errors import InputError
from encast.jobs.answers import columns_of_task, task_name
from encast.jobs.folder import JobFolder
from encast.jobs.job import Job
from encast.jobs.local import LocalExecutor
from encast.jobs.run import Executor, Summary, run_job
from encast.tasks.table import RunOptions, file_task

__all__ = ["SHARD_ROWS", "SOME_ROWS_BAD", "Asked", "is_job", "run_job_command"]

SHARD_ROWS = 4096
SOME_ROWS_BAD = 3
"""The exit code when answers were written and some rows have none; a pipeline may go on with them or stop."""

_SHOWN_FAILURES = 5


@dataclass(frozen=True)
class Asked:
    """The options of ``encast run``, as given."""

    artifact: Path
    inputs: Sequence[str]
    output: str
    task: str
    format: str
    input_format: str
    columns: tuple[str | None, str | None]
    batch_tokens: int
    options: RunOptions


def is_job(inputs: Sequence[str], output: str) -> bool:
    """Whether inputs and output are more than a file each."""
    return (
        len(inputs) > 1
        or output.endswith("/")
        or Path(output).is_dir()
        or any(not is_url(one) and Path(one).is_dir() for one in inputs)
    )


def run_job_command(
    asked: Asked, shard_rows: int, ray: str | None, *, threads: int | None, instances: int, json: bool
) -> None:
    """Runs the job, or goes on with it, and says what became of it."""
    began = time.monotonic()
    job = _job(asked, shard_rows)
    output = Path(asked.output)
    with JobFolder(output) as folder:
        folder.sweep()
        executor = _executor(asked, output.absolute(), ray, threads, instances)
        with executor as workers:
            if folder.job is not None:
                folder.job.need_same(job, str(output))
                job = folder.job
            else:
                job = _with_spans(job, workers, quiet=json)
                folder.begin(job)
            before = sum(one.rows + one.bad for one in folder.done.values())
            total = max(1, sum(shard.span.rows for shard in job.shards))
            if not json and folder.done:
                _say(f"{before:,} of {total:,} rows were finished before")
            try:
                with Progress("rows", quiet=json, before=(before, before / total)) as progress:
                    summary = run_job(folder, job, workers, progress.update)
            except KeyboardInterrupt:
                note = f"{len(folder.done)} of {len(job.shards)} shards are finished; the same command goes on"
                raise KeyboardInterrupt(note) from None
    _report(asked, job, summary, time.monotonic() - began, json)


def _job(asked: Asked, shard_rows: int) -> Job:
    """The job without its shards; raises ``InputError`` for what cannot be asked for."""
    if "-" in asked.inputs or asked.output == "-":
        raise InputError("a job reads files and writes a folder; name its inputs and --output")
    opened = artifacts.open(asked.artifact)
    session = session_of(opened, asked.batch_tokens)
    task = task_name(session, asked.task)
    spec = file_task(task)
    format = "jsonl" if asked.format == "auto" else asked.format
    if format not in OUTPUT_FORMATS:
        raise InputError(f"output format {format!r} is unknown; {', '.join(OUTPUT_FORMATS)} are known")
    if format == "npy":
        vector_column(spec.columns)
    if format == "parquet":
        pyarrow_parquet()
    files = list_inputs(asked.inputs, asked.input_format)
    output = Path(asked.output).resolve()
    for one in asked.inputs:
        if not is_url(one) and (folder := Path(one).resolve()).is_dir() and output.is_relative_to(folder):
            raise InputError(f"--output {asked.output} lies inside of the input {one}; name a folder elsewhere")
    return Job(
        version(),
        artifacts.artifact_sha(opened),
        task,
        tuple(columns_of_task(spec, *asked.columns)),
        asked.options,
        format,
        asked.batch_tokens,
        shard_rows,
        tuple(files),
        (),
    )


def _executor(
    asked: Asked, output: Path, ray: str | None, threads: int | None, instances: int
) -> AbstractContextManager[Executor]:
    artifact = asked.artifact.absolute()
    if ray is None:
        return LocalExecutor(output, artifact, threads=threads, instances=instances)
    from encast.cluster import RayExecutor

    return RayExecutor(ray, output, artifact, threads=threads, instances=instances, say=_say)


def _say(what: str) -> None:
    print(f"encast: {what}", file=sys.stderr)


def _with_spans(job: Job, workers: Executor, *, quiet: bool) -> Job:
    """Reads every input once for where its rows begin."""
    spans = []
    with Progress("files are counted", quiet=quiet) as progress:
        for found in workers.find_spans(job.inputs, job.columns, job.shard_rows):
            spans.append(found)
            progress.update(len(spans), len(spans) / len(job.inputs))
    return Job(**{**vars(job), "spans": tuple(spans)})


def _report(asked: Asked, job: Job, summary: Summary, seconds: float, json: bool) -> None:
    if summary.failed:
        shown = [f"{one.shard.describe()}: {one.error}" for one in summary.failed[:_SHOWN_FAILURES]]
        more = len(summary.failed) - len(shown)
        raise InputError(
            f"{len(summary.failed)} of {len(job.shards)} shards failed, the others are finished; the same command "
            "tries them again:\n  " + "\n  ".join([*shown, *([f"and {more} more"] if more else [])])
        )
    if summary.bad and not summary.rows:
        raise InputError(
            f"none of the {summary.bad:,} rows could be used; the reasons are in {asked.output}, in part-*.errors.jsonl"
        )
    result = {
        "artifact": str(asked.artifact),
        "task": job.task,
        "inputs": [file.name for file in job.inputs],
        "output": asked.output,
        "shards": len(job.shards),
        "rows": summary.rows,
        "bad_rows": summary.bad,
        "seconds": round(seconds, 3),
    }
    if json:
        print(json_module.dumps(result))
    else:
        bad = f", {summary.bad:,} bad row{'s' if summary.bad > 1 else ''} in part-*.errors.jsonl" if summary.bad else ""
        files = f"{len(job.shards):,} file{'s' if len(job.shards) != 1 else ''}"
        rows = f"{summary.rows:,} row{'s' if summary.rows != 1 else ''}"
        _say(f"{rows} in {files} in {seconds:.1f} s{bad}")
    if summary.bad:
        raise typer.Exit(SOME_ROWS_BAD)
