"""What a job is: all that decides the bytes of its output, and the shards that it is cut into.

A shard is a number of rows of one input that lie one after the other, bad ones counted. It is the unit of work: any
worker makes the same files of it, at any time. Shards are found once, before the first runs, and stand in the job's
file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from encast.data.inputs import InputFile
from encast.data.readers import open_rows
from encast.data.rows import Span
from encast.errors import InputError
from encast.tasks.table import RunOptions

__all__ = ["Job", "Shard", "find_spans"]

VERSION = 1


@dataclass(frozen=True)
class Shard:
    """``number``: from 0, through all inputs in their order."""

    number: int
    input: InputFile
    span: Span

    def describe(self) -> str:
        return f"shard {self.number} ({self.input.name}, {self.span.rows} rows from row {self.span.first})"


@dataclass(frozen=True)
class Job:
    """``artifact``: the digest of its content. ``spans``: of each input. ``encast``: the version that computes it."""

    encast: str
    artifact: str
    task: str
    columns: tuple[str, ...]
    options: RunOptions
    format: str
    batch_tokens: int
    shard_rows: int
    inputs: tuple[InputFile, ...]
    spans: tuple[tuple[Span, ...], ...]

    @property
    def shards(self) -> list[Shard]:
        pairs = [(file, span) for file, spans in zip(self.inputs, self.spans, strict=True) for span in spans]
        return [Shard(number, file, span) for number, (file, span) in enumerate(pairs)]

    def text(self) -> str:
        """The job's file."""
        spans = [[[span.offset, span.first, span.rows] for span in of_input] for of_input in self.spans]
        content = {"version": VERSION, **asdict(self), "spans": spans}
        return json.dumps(content, indent=1, ensure_ascii=True) + "\n"

    @classmethod
    def parse(cls, text: str, where: str) -> Job:
        """Raises ``InputError`` for what ``text`` did not write."""
        try:
            content = json.loads(text)
            if content.pop("version") != VERSION:
                raise ValueError("written by another version of encast")
            return cls(
                **{
                    **content,
                    "columns": tuple(content["columns"]),
                    "options": RunOptions(**content["options"]),
                    "inputs": tuple(InputFile(**one) for one in content["inputs"]),
                    "spans": tuple(tuple(Span(*span) for span in of_input) for of_input in content["spans"]),
                }
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{where}: is not the file of a job ({error}); choose another --output") from None

    def need_same(self, asked: Job, where: str) -> None:
        """Raises ``InputError`` where what is asked for now would give other bytes; ``asked`` has no spans."""
        for field in fields(self):
            before, now = getattr(self, field.name), getattr(asked, field.name)
            if field.name == "spans" or before == now:
                continue
            if field.name == "inputs":
                what = _difference(before, now)
            elif field.name == "options":
                one = next(
                    part.name for part in fields(before) if getattr(before, part.name) != getattr(now, part.name)
                )
                what = f"--{one.replace('_', '-')} was {getattr(before, one)}, now it is {getattr(now, one)}"
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
        if old != new:
            return f"{old.name} has been written since"
    return f"{len(before)} files were read, {len(now)} are named now"


def find_spans(file: InputFile, columns: Sequence[str], rows: int) -> tuple[Span, ...]:
    """The shards of one input, of so many rows each; raises ``InputError`` when it cannot be read."""
    with open_rows(file.path, columns, file.format) as reader:
        return tuple(reader.spans(rows))
