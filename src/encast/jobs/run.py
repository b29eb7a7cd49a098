"""Runs what is left of a job, whoever computes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from encast.data.inputs import InputFile
from encast.data.remote import reason_of
from encast.errors import EncastError, ResourceError
from encast.jobs.folder import JobFolder
from encast.jobs.job import Cut, Shard, Shards
from encast.jobs.layout import Done

__all__ = ["Agree", "Executor", "Failed", "Summary", "error_of_shard", "run_job"]

Agree = Callable[[dict[str, Any]], None]
"""Told what a worker's numbers depend on (``Worker.numbers``); raises ``ResourceError`` where others' differ."""

_SEEN_S = 90.0
"""How long a network file system may take to show here what a worker renamed there: NFS keeps what it knows of a
folder for up to a minute."""


@dataclass(frozen=True)
class Failed:
    """A shard that no worker could finish, and the error of the last that tried. ``died``: it took its process with it,
    which says nothing of other shards."""

    shard: Shard
    error: EncastError
    died: bool = False


def error_of_shard(error: Exception, inputs: Sequence[str]) -> EncastError:
    """What ended a shard, as the user is told; ``inputs``: as he named them, whose credentials are left out."""
    if isinstance(error, EncastError):
        return error
    said = f"{type(error).__name__}: {reason_of(error, *inputs)}"
    if isinstance(error, (OSError, MemoryError)):
        return ResourceError(said)
    return EncastError(f"{said}; this is a defect of encast, please report it")


class Executor(Protocol):
    """Who computes; a context manager, which leaves no worker behind."""

    def find_cuts(self, files: Sequence[InputFile], columns: Sequence[str], rows: int) -> Iterator[Cut]:
        """The shards of every file, in order; see ``job.find_cut``."""

    def run(self, shards: Shards, left: Sequence[int], agree: Agree) -> Iterator[Done | Failed]:
        """What became of every shard whose number is ``left``, in any order."""


@dataclass(frozen=True)
class Summary:
    """Rows of the whole job that have answers and have none, and the shards that failed."""

    rows: int
    bad: int
    failed: Sequence[Failed]


def run_job(folder: JobFolder, executor: Executor, update: Callable[[int, float], None]) -> Summary:
    """Computes the shards of the folder's job that are not finished yet, after ``JobFolder.check``; ``update`` is told
    how many rows are done, and which part it is.

    Shards that fail do not keep the others from being computed. Raises ``ResourceError`` when shards cannot be written,
    or what a worker wrote is not seen here; what is finished stays finished, whatever is raised.
    """
    assert folder.begun is not None
    shards = folder.begun.shards
    left = [number for number in range(len(shards)) if number not in folder.done]
    failed: list[Failed] = []
    if left:
        folder.reopen()

    def agree(numbers: dict[str, Any]) -> None:
        if folder.numbers is None:
            folder.note_numbers(numbers)
        elif numbers != folder.numbers:
            raise ResourceError(
                f"answers would have other bits here: {_differences(folder.numbers, numbers)}; leave such machines "
                "out, or begin in another --output"
            )

    done = sum(one.rows + one.bad for one in folder.done.values())
    for outcome in executor.run(shards, left, agree):
        if isinstance(outcome, Failed):
            if isinstance(outcome.error, ResourceError) and not outcome.died:
                raise outcome.error
            failed.append(outcome)
            continue
        _need_seen(folder, outcome)
        folder.note(outcome)
        done += outcome.rows + outcome.bad
        update(done, done / max(1, shards.rows))
    folder.sweep()
    if not failed:
        folder.complete()
    finished = folder.done.values()
    return Summary(sum(one.rows for one in finished), sum(one.bad for one in finished), failed)


def _need_seen(folder: JobFolder, done: Done) -> None:
    end = time.monotonic() + _SEEN_S
    while not folder.has(done):
        if time.monotonic() > end:
            raise ResourceError(
                f"{folder.path}: a worker wrote shard {done.shard} there, and it is not seen here; --output must lie "
                "on storage that every node has under the same path (NFS, Lustre, a mounted volume)"
            )
        time.sleep(0.1)


def _differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    return "; ".join(f"{name} is {_words(now.get(name))}, elsewhere it is {_words(before.get(name))}" for name in names)


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
