"""The executor of a job in this process: one engine, as many shards side by side as keep it busy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from types import TracebackType

from encast.data.inputs import InputFile
from encast.jobs.job import Cut, Shards, find_cut
from encast.jobs.layout import Done
from encast.jobs.run import Agree, Failed, error_of_shard
from encast.jobs.waiting import Waiting
from encast.jobs.worker import Worker

__all__ = ["LocalExecutor"]


class LocalExecutor:
    """See ``run.Executor``; ``devices``: as of ``Worker``. A shard is tried once: here nothing would be other the
    second time.
    """

    def __init__(
        self, folder: Path, artifact: Path, inputs: Sequence[str], *, devices: Sequence[str], threads: int | None,
        instances: int,
    ) -> None:  # fmt: skip
        self._inputs = inputs
        self._open = partial(Worker, folder, artifact, inputs, devices=devices, threads=threads, instances=instances)
        self._worker: Worker | None = None
        self._pool: ThreadPoolExecutor | None = None

    def find_cuts(self, files: Sequence[InputFile], columns: Sequence[str], rows: int) -> Iterator[Cut]:
        return (find_cut(file, file.reached(self._inputs), columns, rows) for file in files)

    def run(self, shards: Shards, left: Sequence[int], agree: Agree) -> Iterator[Done | Failed]:
        if not left:
            return
        worker = self._worker = self._open()
        pool = self._pool = ThreadPoolExecutor(worker.at_once)
        agree(worker.numbers())
        waiting: Waiting[int] = Waiting(left)
        under_way: dict[Future[Done], tuple[int, int]] = {}
        free = list(range(worker.at_once))
        while True:
            while free and (number := waiting.take(free[-1])) is not None:
                under_way[pool.submit(worker.run, number)] = number, free.pop()
            if not under_way:
                return
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                number, place = under_way.pop(future)
                free.append(place)
                try:
                    yield future.result()
                except Exception as error:  # a defect that one shard meets keeps no other from being finished
                    yield Failed(shards[number], error_of_shard(error, self._inputs))

    def __enter__(self) -> LocalExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._worker is not None:
            self._worker.stop()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        if self._worker is not None:
            self._worker.close()
