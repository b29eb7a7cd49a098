"""The executor of a job in this process: one engine, as many shards side by side as it has instances."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType

from encast.data.inputs import InputFile
from encast.data.rows import Span
from encast.errors import EncastError
from encast.jobs.folder import Done
from encast.jobs.job import Shard, find_spans
from encast.jobs.run import Agree, Failed
from encast.jobs.worker import Worker

__all__ = ["LocalExecutor"]


class LocalExecutor:
    """See ``run.Executor``. A shard is tried once: here nothing would be other the second time."""

    def __init__(self, folder: Path, artifact: Path, *, threads: int | None, instances: int) -> None:
        self._folder, self._artifact = folder, artifact
        self._threads, self._instances = threads, instances
        self._worker: Worker | None = None
        self._pool = ThreadPoolExecutor(instances)

    def find_spans(self, files: Sequence[InputFile], columns: Sequence[str], rows: int) -> Iterator[tuple[Span, ...]]:
        return (find_spans(file, columns, rows) for file in files)

    def run(self, shards: Sequence[Shard], agree: Agree) -> Iterator[Done | Failed]:
        if not shards:
            return
        worker = self._worker = Worker(self._folder, self._artifact, threads=self._threads, instances=self._instances)
        agree(worker.numbers())
        waiting = iter(shards)
        under_way: dict[Future[Done], Shard] = {}
        while True:
            while len(under_way) < self._instances and (shard := next(waiting, None)):
                under_way[self._pool.submit(worker.run, shard.number)] = shard
            if not under_way:
                return
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                shard = under_way.pop(future)
                try:
                    yield future.result()
                except EncastError as error:
                    yield Failed(shard, error)

    def __enter__(self) -> LocalExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._worker is not None:
            self._worker.stop()
        self._pool.shutdown(cancel_futures=True)
        if self._worker is not None:
            self._worker.close()
