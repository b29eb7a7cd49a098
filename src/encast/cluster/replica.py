"""What runs on the nodes: a worker of the job in an actor. Errors travel as values, so that their kinds arrive."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import encast.errors as errors
from encast.backends.cards import CardError
from encast.cluster.cards import see_held_cards
from encast.data.inputs import InputFile
from encast.jobs.job import Cut, find_cut
from encast.jobs.layout import Done
from encast.jobs.run import error_of_shard
from encast.jobs.worker import Worker
from encast.machine import this_machine, usable_cores

__all__ = ["Replica", "Said", "count", "error_of"]


@dataclass(frozen=True)
class Said:
    """An error on its way to the driver: the name of its class in ``encast.errors``, and its message."""

    kind: str
    message: str


def _said(error: Exception, inputs: Sequence[str]) -> Said:
    told = error_of_shard(error, inputs)
    return Said(type(told).__name__, str(told))


def error_of(said: Said, where: str) -> errors.EncastError:
    """The error again, with the node that it happened on."""
    kind: Any = getattr(errors, said.kind)
    made: errors.EncastError = kind(f"{said.message} (on the node {where})")
    return made


def count(file: InputFile, path: str, columns: Sequence[str], rows: int) -> Cut | Said:
    """``find_cut`` on a node."""
    try:
        return find_cut(file, path, columns, rows)
    except Exception as error:
        return _said(error, [path])


class Replica:
    """One engine, on the CPU or on one card; ``numbers`` and ``run`` are called from several threads, ``progress`` from
    another one. ``threads``: None on a card.
    """

    def __init__(self, folder: str, artifact: str, inputs: Sequence[str], threads: int | None, instances: int) -> None:
        self._made = (folder, artifact, inputs)
        self._threads, self._instances = threads, instances
        self._worker: Worker | None = None
        self._opening = threading.Lock()

    def _open(self) -> Worker:
        """On first use, in the process that Ray started or started again."""
        with self._opening:
            if self._worker is None:
                self._worker = self._opened()
            return self._worker

    def _opened(self) -> Worker:
        threads, instances = self._threads, self._instances
        if threads is None:
            see_held_cards(1)
            return Worker(*self._made)
        # Others may have the rest of the machine: only who has all of it may say which cores are his.
        alone = threads * instances >= len(usable_cores(this_machine()))
        return Worker(*self._made, threads=threads, instances=instances, pin=alone)

    def numbers(self) -> dict[str, Any] | Said:
        try:
            return self._open().numbers()
        except Exception as error:
            return _said(error, self._made[2])

    def run(self, number: int) -> Done | Said:
        try:
            return self._open().run(number)
        except Exception as error:
            if isinstance(error, CardError):
                # After an error of CUDA a process computes nothing more on its card, and fails at once whatever it is
                # given. Ray starts another one.
                print(f"encast: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            return _said(error, self._made[2])

    def progress(self) -> dict[int, int]:
        """See ``Worker.progress``."""
        return self._worker.progress() if self._worker is not None else {}
