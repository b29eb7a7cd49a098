"""A worker of a job: one engine that turns shards into files. Whatever is written of a job, a worker wrote."""

from __future__ import annotations

import os
import platform
import threading
from pathlib import Path
from typing import Any

import encast.artifact as artifacts
import encast.engine as engines
from encast.artifact.write import version
from encast.data import BadRow, open_rows, open_writer
from encast.data.arrow import pyarrow
from encast.data.inputs import list_inputs
from encast.data.output import OutputFile
from encast.data.rows import bad_row_line
from encast.errors import ArtifactError, InputError, ResourceError
from encast.jobs.answers import Answers
from encast.jobs.folder import Done, error_path, part_path, read_job
from encast.jobs.job import Shard
from encast.tasks.table import file_task

__all__ = ["StoppedError", "Worker"]


class StoppedError(Exception):
    """The worker was stopped before the shard was finished."""


class Worker:
    """Runs shards of the job that ``folder`` is of, from any number of threads.

    Raises ``ResourceError`` where the folder is not that of the job here or another encast is installed,
    ``ArtifactError`` where the artifact is not here or is another one, and what ``engine.load`` raises.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        artifact: str | os.PathLike[str],
        *,
        threads: int | None = None,
        instances: int = 1,
        pin: bool = True,
    ) -> None:
        self._folder = Path(folder)
        job = read_job(self._folder)
        if job is None:
            raise ResourceError(
                f"{folder}: is not the folder of the job here; --output must lie on storage that every node has under "
                "the same path (NFS, Lustre, a mounted volume)"
            )
        if job.encast != version():
            raise ResourceError(
                f"encast {version()} is installed here, the job is computed by {job.encast}; install that"
            )
        digest = artifacts.artifact_sha(artifacts.open(artifact))
        if digest != job.artifact:
            raise ArtifactError(
                f"{artifact}: is not the artifact of the job here (digest {digest}, not {job.artifact}); copy the "
                "right one to every node, or put it on shared storage"
            )
        self._job, self._shards = job, job.shards
        self._engine = engines.load(
            artifact, threads=threads, instances=instances, pin=pin, batch_tokens=job.batch_tokens
        )
        self._spec = file_task(job.task)
        self._answers = Answers(self._engine, self._spec, job.columns, job.options)
        self._stopped = threading.Event()

    def numbers(self) -> dict[str, Any]:
        """What else the bytes of a shard depend on: machines that agree in this write the same ones."""
        import encast._core as _core

        plan: Any = self._engine.runnable
        classes = {step.keys.get("arithmetic") for step in _core.Plan(plan.plan).steps} - {None}
        found: dict[str, Any] = {"arithmetic": sorted(classes)}
        if self._engine.meta.math == "exact":
            found["C library"] = " ".join(platform.libc_ver())
        if self._job.format == "parquet":
            found["pyarrow"] = pyarrow().__version__
        return found

    def run(self, number: int) -> Done:
        """Computes a shard, over what may be there of it.

        Raises ``InputError`` where its input cannot be read or has changed, ``ResourceError`` where its files cannot be
        written, ``StoppedError`` after ``stop``.
        """
        shard = self._shards[number]
        self._need_unchanged(shard)
        errors = OutputFile(error_path(self._folder, number))
        path = part_path(self._folder, number, self._job.format)
        try:
            columns = {"input": "str", "row": "int", **self._spec.columns}
            width = self._job.options.truncate_dim or self._engine.dim
            writer = open_writer(path, columns, self._job.format, width=width)
        except BaseException:
            errors.discard()
            raise
        rows = bad = 0
        name = {"input": shard.input.name}
        try:
            with open_rows(shard.input.path, self._job.columns, shard.input.format, shard.span) as reader:
                for group in self._answers.groups(reader):
                    if self._stopped.is_set():
                        raise StoppedError
                    records = []
                    for answer in self._answers.of(group):
                        if isinstance(answer, BadRow):
                            errors.append(bad_row_line(answer, **name))
                            bad += 1
                        else:
                            records.append({**name, **answer})
                    writer.write(records)
                    rows += len(records)
            if rows + bad != shard.span.rows:
                raise InputError(
                    f"{shard.input.name}: has other rows than when the job began; give --output a new folder"
                )
            errors.finish() if bad else errors.discard()
            writer.finish()
            return Done(number, rows, bad, path.stat().st_size)
        except BaseException:
            errors.discard()
            writer.output.discard()
            raise

    def _need_unchanged(self, shard: Shard) -> None:
        (now,) = list_inputs([shard.input.path], shard.input.format)
        if (now.bytes, now.changed) != (shard.input.bytes, shard.input.changed):
            raise InputError(
                f"{shard.input.name}: is not the file that the job began with ({now.bytes} bytes, not "
                f"{shard.input.bytes}, or written at another time); every node must see one file, which nobody changes"
            )

    def stop(self) -> None:
        """Shards that run end soon, with ``StoppedError``."""
        self._stopped.set()

    def close(self) -> None:
        self._engine.close()
