"""Which file of a job's folder is what, and what is known of a finished shard."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from encast.files import open_regular
from encast.jobs.job import Begun

__all__ = ["HIDDEN", "Done", "Layout", "Written", "written"]

HIDDEN = ".encast"
_BLOCK_BYTES = 1 << 20


class Written(NamedTuple):
    """A file as it was written."""

    bytes: int
    sha256: str


def written(path: Path) -> Written:
    """Reads a regular file; raises ``OSError``."""
    digest, size = hashlib.sha256(), 0
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return Written(size, digest.hexdigest())


@dataclass(frozen=True)
class Done:
    """A finished shard: ``rows`` have answers, ``bad`` have none. ``errors`` is there where rows are bad, ``numbers``
    where the format is npy."""

    shard: int
    rows: int
    bad: int
    answers: Written
    errors: Written | None = None
    numbers: Written | None = None

    @classmethod
    def parse(cls, entry: dict[str, Any]) -> Done:
        """Raises ``ValueError`` for what is not the ``vars`` of one."""
        try:
            counts = [entry.pop(name) for name in ("shard", "rows", "bad")]
            files = [None if one is None else Written(*one) for one in map(entry.pop, ("answers", "errors", "numbers"))]
        except (TypeError, KeyError) as error:
            raise ValueError(f"it has other fields ({error})") from None
        if entry or any(type(one) is not int or one < 0 for one in counts) or files[0] is None:
            raise ValueError("it has other fields")
        if any(one and (type(one.bytes) is not int or type(one.sha256) is not str) for one in files):
            raise ValueError("it has other fields")
        return cls(*counts, *files)


class Layout:
    """Paths in the folder of a job."""

    def __init__(self, folder: Path, begun: Begun) -> None:
        self.folder, self._format = folder, begun.job.format
        # Sorted by their names, parts are in the order of their numbers.
        self._digits = max(5, len(str(len(begun.shards) - 1)))
        self.scratch = folder / HIDDEN / begun.id
        """Where files lie until they are complete. Only this job has it: where another one has taken the folder, there
        is nothing here that could be renamed over its files."""

    def answers(self, number: int) -> Path:
        return self.folder / f"part-{number:0{self._digits}d}.{self._format}"

    def errors(self, number: int) -> Path:
        return self.folder / f"part-{number:0{self._digits}d}.errors.jsonl"

    def numbers(self, number: int) -> Path:
        """Of npy, which holds vectors alone: the numbers of their rows."""
        return self.folder / f"rows-{number:0{self._digits}d}.npy"

    def files(self, done: Done) -> list[tuple[Path, Written]]:
        """All files of a finished shard."""
        of = ((self.answers, done.answers), (self.errors, done.errors), (self.numbers, done.numbers))
        return [(path(done.shard), told) for path, told in of if told is not None]
