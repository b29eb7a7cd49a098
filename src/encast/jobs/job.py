"""What a job is: all that decides the bytes of its output, and the shards that it is cut into.

A shard is a number of rows of one input that lie one after the other, bad ones counted. It is the unit of work: any
worker makes the same files of it, at any time. Shards are found once, before the first runs, and stand beside the
job's file.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from encast.data.inputs import InputFile, State, state_of
from encast.data.readers import open_rows
from encast.data.remote import is_url
from encast.data.rows import Span
from encast.errors import InputError
from encast.jobs.sealed import seal, unseal
from encast.tasks.table import RunOptions

__all__ = ["Begun", "Cut", "Job", "Shard", "Shards", "changed", "find_cut", "need_unchanged"]

VERSION = 1

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Job:
    """``artifact``: the digest of its content. ``encast``: the version that computes it. ``device``: without the number
    of a card, of which any will do. ``dtype``: of a card's values, as ``encast.load`` takes it; None on the CPU.
    """

    encast: str
    artifact: str
    task: str
    columns: tuple[str, ...]
    options: RunOptions
    format: str
    batch_tokens: int
    shard_rows: int
    inputs: tuple[InputFile, ...]
    device: str = "cpu"
    dtype: str | None = None

    def need_same(self, asked: Job, where: str) -> None:
        """Raises ``InputError`` where what is asked for now would give other bytes."""
        for field in fields(self):
            before, now = getattr(self, field.name), getattr(asked, field.name)
            if before == now:
                continue
            if field.name == "inputs":
                what = _difference(before, now)
            elif field.name == "options":
                one = next(
                    part.name for part in fields(before) if getattr(before, part.name) != getattr(now, part.name)
                )
                what = f"--{one.replace('_', '-')} was {getattr(before, one)}, now it is {getattr(now, one)}"
            elif field.name == "columns":
                what = f"the columns were {', '.join(before)}, now they are {', '.join(now)}"
            else:
                name = {"encast": "the version of encast", "artifact": "the artifact (its digest)"}.get(
                    field.name, f"--{field.name.replace('_', '-')}"
                )
                what = f"{name} was {before}, now it is {now}"
            raise InputError(f"{where} holds another job: {what}; ask for the same, or choose another --output")


def _difference(before: Sequence[InputFile], now: Sequence[InputFile]) -> str:
    for old, new in zip(before, now, strict=False):
        if old.name != new.name:
            return f"where {old.name} was read, {new.name} is named now"
        if old.path != new.path:
            return f"{old.name} was {old.path}, now it is {new.path}"
        if old.format != new.format:
            return f"{old.name} was read as {old.format}, now it is {new.format}"
        if (old.bytes, old.changed) != (new.bytes, new.changed):
            return f"{old.name} has been written since"
    if len(before) != len(now):
        return f"{len(before)} files were read, {len(now)} are named now"
    return "its inputs come from other arguments"


class Shard(NamedTuple):
    """``number``: from 0, through all inputs in their order; ``mark``: see ``data.inputs.State``."""

    number: int
    input: InputFile
    span: Span
    mark: str

    def describe(self) -> str:
        return f"shard {self.number} ({self.input.name}, {self.span.rows} rows from row {self.span.first})"


@dataclass(frozen=True)
class Cut:
    """One input: its ``rows``, its ``mark`` when they were counted, and ``begins``, int64 ``[shards, 2]``: the
    ``offset`` and ``first`` of each shard's ``Span``."""

    rows: int
    mark: str
    begins: I64


class Shards(Sequence[Shard]):
    """All shards of a job by their numbers, made when they are asked for: a job may have millions."""

    def __init__(self, job: Job, cuts: Sequence[Cut]) -> None:
        """Raises ``ValueError`` where the cuts are none of these inputs, or one that no reader makes."""
        self._job, self.cuts = job, cuts
        self.rows = sum(one.rows for one in cuts)
        if len(cuts) != len(job.inputs):
            raise ValueError(f"{len(cuts)} of {len(job.inputs)} inputs are counted")
        for one in cuts:
            if one.rows < 0 or one.begins.shape != (-(-one.rows // job.shard_rows), 2):
                raise ValueError(f"{one.rows} rows are in {len(one.begins)} shards")
            if len(one.begins) and (one.begins[0] < (0, 1)).any():
                raise ValueError("a shard begins before its input")
            if np.diff(one.begins, axis=0).min(initial=1) < 1:
                raise ValueError("shards lie over one another")
        self._firsts = [0, *accumulate(len(one.begins) for one in cuts)]

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        at = bisect_right(self._firsts, number) - 1
        inside = number - self._firsts[at]
        offset, first = self.cuts[at].begins[inside].tolist()
        rows = min(self._job.shard_rows, self.cuts[at].rows - inside * self._job.shard_rows)
        return Shard(number, self._job.inputs[at], Span(offset, first, rows), self.cuts[at].mark)


@dataclass(frozen=True)
class Begun:
    """A job that has its shards, and an ``id`` of its own."""

    id: str
    job: Job
    shards: Shards

    def files(self) -> tuple[bytes, bytes]:
        """The job's file, whose size goes with the inputs, and the table of where its shards begin: 16 bytes each."""
        table = b"".join(one.begins.astype("<i8").tobytes() for one in self.shards.cuts)
        content = {field.name: getattr(self.job, field.name) for field in fields(Job)}
        content["options"] = vars(self.job.options)
        content["inputs"] = [list(vars(one).values()) for one in self.job.inputs]
        cuts = [[one.rows, one.mark] for one in self.shards.cuts]
        head = {"version": VERSION, "id": self.id, "job": content, "table": hashlib.sha256(table).hexdigest()}
        return seal({**head, "cuts": cuts}), table

    @classmethod
    def parse(cls, data: bytes, table: bytes) -> Begun:
        """Raises ``ValueError`` for what ``files`` did not write."""
        content = unseal(data)
        if content.get("version") != VERSION:
            raise ValueError("it was written by another version of encast")
        try:
            # What was begun before jobs ran on cards does not say the device.
            told = {"device": "cpu", "dtype": None, **content["job"]}
            inputs = tuple(map(_input, told.pop("inputs")))
            options, columns = RunOptions(**told.pop("options")), tuple(map(str, told.pop("columns")))
            kinds = {"encast": str, "artifact": str, "task": str, "format": str, "batch_tokens": int, "shard_rows": int}
            kinds |= {"device": str, "dtype": type(None) if told["device"] == "cpu" else str}
            if {name: type(value) for name, value in told.items()} != kinds or told["shard_rows"] < 1:
                raise ValueError("it has other fields")
            job = Job(**told, inputs=inputs, options=options, columns=columns)
            if hashlib.sha256(table).hexdigest() != content["table"]:
                raise ValueError("its table of shards is damaged")
            begins = np.frombuffer(table, "<i8").astype(np.int64).reshape(-1, 2)
            cuts, at = [], 0
            for rows, mark in content["cuts"]:
                end = at + -(-int(rows) // job.shard_rows)
                cuts.append(Cut(int(rows), str(mark), begins[at:end]))
                at = end
            if at != len(begins):
                raise ValueError(f"its table has {len(begins)} shards of {at}")
            return cls(str(content["id"]), job, Shards(job, cuts))
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"it has other fields ({error})") from None


_INPUT_TYPES = [{"str": str, "int": int}[str(field.type)] for field in fields(InputFile)]


def _input(values: Sequence[Any]) -> InputFile:
    if list(map(type, values)) != _INPUT_TYPES:
        raise ValueError("an input has other fields")
    return InputFile(*values)


def changed(file: InputFile) -> InputError:
    """What is wrong with an input that is no longer the one that the job began with."""
    return InputError(
        f"{file.name}: is not the file that the job began with, its size, its time or what the store says of it is "
        "another; put that back, or give --output a new folder. Every node must see one file, which nobody changes"
    )


def need_unchanged(file: InputFile, now: State, mark: str | None) -> None:
    """Raises ``InputError`` where the file is not the one that the job began with; ``mark`` None: not yet seen."""
    same = file.bytes == now.bytes and (is_url(file.path) or file.changed == now.changed)
    if not same or mark not in (None, now.mark):
        raise changed(file)


def find_cut(file: InputFile, path: str, columns: Sequence[str], rows: int) -> Cut:
    """The shards of one input, of so many rows each. ``path``: how it is reached, see ``InputFile.reached``. Raises
    ``InputError`` when it cannot be read, or is written meanwhile."""
    before = state_of(path)
    need_unchanged(file, before, None)
    with open_rows(path, columns, file.format) as reader:
        told = (number for span in reader.spans(rows) for number in (span.offset, span.first, span.rows))
        table = np.fromiter(told, np.int64).reshape(-1, 3)  # 24 bytes a shard, of which there may be millions
    if state_of(path) != before:
        raise changed(file)
    return Cut(int(table[:, 2].sum()), before.mark, np.ascontiguousarray(table[:, :2]))
