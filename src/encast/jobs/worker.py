"""A worker of a job: one engine that turns shards into files. Whatever is written of a job, a worker wrote."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Sequence
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import numpy as np

import encast.artifact as artifacts
import encast.engine as engines
from encast.artifact.write import version
from encast.backends.cards import card_error
from encast.data import BadRow, Row
from encast.data.arrow import pyarrow
from encast.errors import ArtifactError, InputError, ResourceError
from encast.jobs.answers import Answers
from encast.jobs.folder import read_begun
from encast.jobs.job import Shard
from encast.jobs.layout import Done, Layout
from encast.jobs.readers import OpenInput, OpenInputs
from encast.jobs.shard_files import ShardFiles
from encast.tasks.table import file_task

__all__ = ["StoppedError", "Worker"]

_VECTORS = {"features", "embed", "embed_tokens", "embed_m3"}
"""Tasks whose answers are what the engine computes; scores of the others go through exponentials of NumPy."""


class StoppedError(Exception):
    """The worker was stopped before the shard was finished."""


class Worker:
    """Runs shards of the job that ``folder`` is of, from any number of threads.

    ``inputs``: as the user named them, as URLs' credentials stand nowhere else. ``devices``: those of
    the job's kind that it runs on, by default the first; ``threads``, ``instances`` and ``pin`` are for the processor.
    Raises ``ResourceError`` where the folder is not that of the job here or another encast is installed,
    ``ArtifactError`` where the artifact is not here or is another one, and what ``engine.load`` raises.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        artifact: str | os.PathLike[str],
        inputs: Sequence[str],
        *,
        devices: Sequence[str] | None = None,
        threads: int | None = None,
        instances: int = 1,
        pin: bool = True,
    ) -> None:
        begun = read_begun(Path(folder))
        if begun is None:
            raise ResourceError(
                f"{folder}: is not the folder of the job here; --output must lie on storage that every node has under "
                "the same path (NFS, Lustre, a mounted volume)"
            )
        self._layout, self._job, self._shards = Layout(Path(folder), begun), begun.job, begun.shards
        if self._job.encast != version():
            raise ResourceError(
                f"encast {version()} is installed here, the job is computed by {self._job.encast}; install that"
            )
        digest = artifacts.artifact_sha(artifacts.open(artifact))
        if digest != self._job.artifact:
            raise ArtifactError(
                f"{artifact}: is not the artifact of the job here (digest {digest}, not {self._job.artifact}); copy "
                "the right one to every node, or put it on shared storage"
            )
        self._on_card = self._job.device != "cpu"
        place: dict[str, Any] = {"threads": threads, "instances": instances, "pin": pin}
        if self._on_card:
            place = {"device": devices or [self._job.device], "dtype": self._job.dtype}
        self._devices = " and ".join(place.get("device", ()))
        self._engine = engines.load(artifact, batch_tokens=self._job.batch_tokens, **place)
        self.at_once = self._engine.at_once
        """How many shards side by side keep it busy: of some rows are tokenised while those of others are computed."""
        self._spec = file_task(self._job.task)
        self._answers = Answers(self._engine, self._spec, self._job.columns, self._job.options)
        self._inputs = OpenInputs(lambda shard: shard.input.reached(inputs), self._job.columns, self.at_once)
        self._stopped = threading.Event()
        self._steps: dict[int, int] = {}

    def numbers(self) -> dict[str, Any]:
        """What else the bytes of a shard depend on: machines that agree in this write the same ones."""
        import encast._core as _core

        runnable: Any = self._engine.runnable
        found: dict[str, Any] = {**runnable.numbers(), "tokenizers": version_of("tokenizers")}
        if self._job.task not in _VECTORS:
            found["NumPy"] = f"{np.__version__} on {_core.isa_best()}"
        if (self._engine.meta.math == "exact" and not self._on_card) or self._job.task not in _VECTORS:
            found["C library"] = " ".join(platform.libc_ver())
        if self._job.format == "parquet":
            found["pyarrow"] = pyarrow().__version__
        return found

    def run(self, number: int) -> Done:
        """Computes a shard, over what may be there of it.

        Raises ``InputError`` where its input cannot be read or has changed, ``ResourceError`` where its files cannot be
        written or another job has taken the folder, ``CardError`` where a card failed, ``StoppedError`` after ``stop``.
        """
        shard = self._shards[number]
        source = self._inputs.take(shard)
        try:
            done = self._run(shard, source)
        except BaseException:
            source.close()
            raise
        finally:
            self._steps.pop(number, None)
        self._inputs.give_back(source)
        return done

    def _run(self, shard: Shard, source: OpenInput) -> Done:
        width = self._job.options.truncate_dim or self._engine.dim
        files = ShardFiles(self._layout, shard.number, shard.input.name, self._spec.columns, self._job.format, width)
        try:
            self._steps[shard.number] = 0

            def step() -> None:
                self._steps[shard.number] += 1
                if self._stopped.is_set():
                    raise StoppedError

            for group in self._answers.groups(source.rows(shard, step)):
                step()
                files.add(self._of(group))
            if files.count != shard.span.rows:
                raise InputError(
                    f"{shard.input.name}: has other rows than when the job began; give --output a new folder"
                )
            files.complete()
            source.need_unchanged(shard)
            return files.place()
        except BaseException:
            files.discard()
            raise

    def _of(self, group: Sequence[Row | BadRow]) -> list[dict[str, Any] | BadRow]:
        try:
            return self._answers.of(group)
        except RuntimeError as error:  # of several cards it is a CardError by now
            if not self._on_card:
                raise
            raise card_error(self._devices, error) from error

    def progress(self) -> dict[int, int]:
        """Of each shard that runs now a number, which grows with every group of rows that is read and every piece of
        its input that is passed over."""
        return dict(self._steps)

    def stop(self) -> None:
        """Shards that run end soon, with ``StoppedError``."""
        self._stopped.set()

    def close(self) -> None:
        self._inputs.close()
        self._engine.close()
