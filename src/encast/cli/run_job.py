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
from encast.backends.devices import CARD_DTYPES, RUNS_A_CARD, find_devices, need_card
from encast.cli.interrupts import sigterm_interrupts
from encast.cli.progress import Progress
from encast.data import OUTPUT_FORMATS
from encast.data.arrow import pyarrow_parquet
from encast.data.inputs import list_inputs
from encast.data.readers import format_of
from encast.data.remote import is_url, local_path, shown
from encast.data.writers import vector_column
from encast.engine import session_of
from encast.errors import InputError, need_modules
from encast.jobs.answers import columns_of_task, need_options, task_name
from encast.jobs.folder import JobFolder
from encast.jobs.job import Cut, Job
from encast.jobs.local import LocalExecutor
from encast.jobs.run import Executor, Summary, run_job
from encast.tasks.table import RunOptions, file_task

__all__ = ["SHARD_ROWS", "SOME_ROWS_BAD", "Asked", "is_job", "need_local", "run_job_command"]

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
    devices: Sequence[str]
    dtype: str | None


def is_job(inputs: Sequence[str], output: str) -> bool:
    """Whether inputs and output are more than a file each."""
    return (
        len(inputs) > 1
        or output.endswith("/")
        or Path(output).is_dir()
        or any(
            one.partition("?")[0].endswith("/") if is_url(one) else Path(one).is_dir()
            for one in map(local_path, inputs)
        )
    )


def need_local(option: str, path: str) -> None:
    """Raises ``InputError`` for a URL where something is to be written."""
    if is_url(path):
        raise InputError(
            f"{option} {shown(path)}: answers are written to file systems; give a path, of a mounted volume say, and "
            "copy what is written with the tools of the store"
        )


def run_job_command(
    asked: Asked, shard_rows: int, ray: str | None, *, threads: int | None, instances: int, json: bool
) -> None:
    """Runs the job, or goes on with it, and says what became of it."""
    began = time.monotonic()
    if instances < 1 or (threads is not None and threads < 1):
        raise InputError(f"--threads {threads} and --instances {instances}: both must be at least 1")
    given = {"threads": threads is not None, "instances": instances != 1, "dtype": asked.dtype is not None}
    find_devices(asked.devices, [name for name, is_given in given.items() if is_given])
    if list(asked.devices) != ["cpu"]:
        _need_cards(asked, on_ray=ray is not None)
    job = _job(asked, shard_rows)
    output = Path(asked.output)
    with sigterm_interrupts(), JobFolder(output) as folder:
        if not folder.locked:
            _say(
                f"{output}: this file system has no locks, so that nothing keeps a second process from running the "
                "job; see to it that none does: two would compute everything twice, and may damage the list of what is "
                "finished"
            )
        with _executor(asked, output.absolute(), ray, threads, instances) as workers:
            if folder.begun is not None:
                folder.begun.job.need_same(job, str(output))
            else:
                folder.begin(job, _cuts(job, workers, quiet=json))
            folder.sweep()
            summary = _run(folder, workers, quiet=json)
    _report(asked, folder, summary, time.monotonic() - began, json)


def _need_cards(asked: Asked, *, on_ray: bool) -> None:
    """Before a folder is begun, which is of one kind of device. Raises ``InputError`` for what cards do not take, and
    ``ResourceError`` where a card is not here, unless the job runs elsewhere."""
    cards = [need_card(name) for name in asked.devices]
    if asked.dtype not in (None, *CARD_DTYPES):
        raise InputError(f"--dtype is {asked.dtype!r}; {', '.join(CARD_DTYPES)} are known")
    if on_ray:
        if len(cards) > 1 or cards[0][1] is not None:
            raise InputError(
                f"--device is {' and '.join(asked.devices)}; with --ray it is cuda, without a number: Ray gives each "
                "worker a card"
            )
        return
    need_modules("cuda", "torch")
    from encast.backends.gpu.device import choose_device, stored_dtype

    for card in cards:
        stored_dtype(asked.dtype, choose_device(*card))


def _run(folder: JobFolder, workers: Executor, *, quiet: bool) -> Summary:
    assert folder.begun is not None
    shards = folder.begun.shards
    try:
        with Progress("finished files are read", quiet=quiet) as progress:
            lost = folder.check(progress.update)
        if lost:
            files = "files are" if lost > 1 else "file is"
            _say(f"{lost:,} finished {files} not as written, or gone; computed again")
        before = sum(one.rows + one.bad for one in folder.done.values())
        if not quiet and folder.done:
            _say(f"{before:,} of {shards.rows:,} rows were finished before")
        with Progress("rows", quiet=quiet, before=(before, before / max(1, shards.rows))) as progress:
            return run_job(folder, workers, progress.update)
    except KeyboardInterrupt:
        note = f"{len(folder.done)} of {len(shards)} shards are finished; the same command goes on"
        raise KeyboardInterrupt(note) from None


def _job(asked: Asked, shard_rows: int) -> Job:
    """The job without its shards; raises ``InputError`` for what cannot be asked for."""
    if "-" in asked.inputs or asked.output == "-":
        raise InputError("a job reads files and writes a folder; name its inputs and --output")
    need_local("--output", asked.output)
    output = Path(asked.output)
    if output.exists() and not output.is_dir():
        raise InputError(f"--output {asked.output} is a file; these inputs are a job, whose answers go to a folder")
    if not output.exists() and not asked.output.endswith("/") and (told := format_of(asked.output)):
        raise InputError(
            f"--output {asked.output} has the name of a file; these inputs are a job, whose answers go to a folder: "
            f"say --output {output.with_suffix('')} --format {told}, or end the name with /"
        )
    opened = artifacts.open(asked.artifact)
    session = session_of(opened, asked.batch_tokens)
    task = task_name(session, asked.task)
    spec = file_task(task)
    columns = columns_of_task(spec, *asked.columns)
    need_options(session, task, asked.options)
    format = "jsonl" if asked.format == "auto" else asked.format
    if format not in OUTPUT_FORMATS:
        raise InputError(f"output format {format!r} is unknown; {', '.join(OUTPUT_FORMATS)} are known")
    if format == "npy":
        vector_column(spec.columns)
    if format == "parquet":
        pyarrow_parquet()
    files = list_inputs(asked.inputs, asked.input_format)
    for one in map(local_path, asked.inputs):
        if not is_url(one) and (folder := Path(one).resolve()).is_dir() and output.resolve().is_relative_to(folder):
            raise InputError(f"--output {asked.output} lies inside of the input {one}; name a folder elsewhere")
    return Job(
        version(),
        artifacts.artifact_sha(opened),
        task,
        tuple(columns),
        asked.options,
        format,
        asked.batch_tokens,
        shard_rows,
        tuple(files),
        asked.devices[0].partition(":")[0],
        None if asked.devices[0] == "cpu" else asked.dtype or "f32",
    )


def _executor(
    asked: Asked, output: Path, ray: str | None, threads: int | None, instances: int
) -> AbstractContextManager[Executor]:
    artifact = asked.artifact.absolute()
    if ray is None:
        return LocalExecutor(
            output, artifact, asked.inputs, devices=asked.devices, threads=threads, instances=instances
        )
    from encast.cluster import RayExecutor

    (device,) = asked.devices
    return RayExecutor(
        ray, output, artifact, asked.inputs,
        device=device, threads=threads, instances=instances if device == "cpu" else RUNS_A_CARD, say=_say,
    )  # fmt: skip


def _say(what: str) -> None:
    print(f"encast: {what}", file=sys.stderr)


def _cuts(job: Job, workers: Executor, *, quiet: bool) -> list[Cut]:
    """Reads every input once for where its rows begin."""
    cuts = []
    with Progress("files are counted", quiet=quiet) as progress:
        for found in workers.find_cuts(job.inputs, job.columns, job.shard_rows):
            cuts.append(found)
            progress.update(len(cuts), len(cuts) / len(job.inputs))
    return cuts


def _report(asked: Asked, folder: JobFolder, summary: Summary, seconds: float, json: bool) -> None:
    assert folder.begun is not None
    job, shards = folder.begun.job, len(folder.begun.shards)
    if summary.failed:
        first = [f"{one.shard.describe()}: {one.error}" for one in summary.failed[:_SHOWN_FAILURES]]
        more = len(summary.failed) - len(first)
        kinds = {type(one.error) for one in summary.failed}
        kind = kinds.pop() if len(kinds) == 1 else InputError
        raise kind(
            f"{len(summary.failed)} of {shards} shards failed, the others are finished; the same command "
            "tries them again:\n  " + "\n  ".join([*first, *([f"and {more} more"] if more else [])])
        )
    if summary.bad and not summary.rows:
        raise InputError(
            f"none of the {summary.bad:,} rows could be used; the reasons are in {asked.output}, in part-*.errors.jsonl"
        )
    result = {
        "artifact": str(asked.artifact),
        "device": asked.devices[0] if len(asked.devices) == 1 else asked.devices,
        "task": job.task,
        "inputs": [file.name for file in job.inputs],
        "output": asked.output,
        "shards": shards,
        "rows": summary.rows,
        "bad_rows": summary.bad,
        "seconds": round(seconds, 3),
    }
    if json:
        print(json_module.dumps(result))
    else:
        bad = f", {summary.bad:,} bad row{'s' if summary.bad > 1 else ''} in part-*.errors.jsonl" if summary.bad else ""
        files = f"{shards:,} file{'s' if shards != 1 else ''}"
        rows = f"{summary.rows:,} row{'s' if summary.rows != 1 else ''}"
        _say(f"{rows} in {files} in {seconds:.1f} s{bad}")
    if summary.bad:
        raise typer.Exit(SOME_ROWS_BAD)
