"""CSV records from lines, as RFC 4180 has them, with every bad record told apart from its neighbours."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from encast.data.source import Line

__all__ = ["CsvRecord", "parse_records"]


class CsvRecord(NamedTuple):
    """``number``: the line on which it begins, at ``offset``; ``reason``: why it is bad, or ""."""

    number: int
    raw: bytes
    fields: list[bytes]
    reason: str
    offset: int = 0


def parse_records(lines: Iterable[Line], max_bytes: int) -> Iterator[CsvRecord]:
    """Yields the records; memory is bounded by ``max_bytes`` a record.

    A quote opens a quoted field only at a field's beginning (elsewhere it stands for itself), and two quotes
    inside of a quoted field are one. When a quoted field never closes, or goes on behind its closing quote,
    only the line that opens it is bad, and reading goes on with the next line: one stray quote cannot
    swallow a file.
    """
    waiting: deque[Line] = deque()
    source = iter(lines)
    while True:
        line = waiting.popleft() if waiting else next(source, None)
        if line is None:
            return
        if not line.data and line.whole:
            continue
        taken = [line]
        # Whether a record is complete is told by its quotes alone, counted once a line.
        inside = _ends_inside(line.data, False)
        size = len(line.data)
        while inside and line.whole and size <= max_bytes:
            following = waiting.popleft() if waiting else next(source, None)
            if following is None:
                break
            taken.append(following)
            size += len(following.data) + 2
            if not following.whole:
                break
            inside = _ends_inside(following.data, True)
        if inside or not taken[-1].whole:
            waiting.extendleft(reversed(taken[1:]))
            reason = "a quoted field is never closed" if line.whole else f"longer than {max_bytes} bytes"
            yield CsvRecord(line.number, line.data, [], reason, line.offset)
            continue
        raw = b"".join(part.data + part.end for part in taken[:-1]) + taken[-1].data
        try:
            yield CsvRecord(line.number, raw, _fields(raw), "", line.offset)
        except ValueError as error:
            # The quote that closes the field may as well be the opening one of a later record.
            waiting.extendleft(reversed(taken[1:]))
            yield CsvRecord(line.number, line.data, [], str(error), line.offset)


def _ends_inside(data: bytes, inside: bool) -> bool:
    """Whether the end of a line lies inside of a quoted field, given whether its beginning does."""
    if b'"' not in data:
        return inside
    at = 0
    while True:
        if not inside:  # at the beginning of a field
            if data[at : at + 1] != b'"':
                comma = data.find(b",", at)
                if comma < 0:
                    return False
                at = comma + 1
                continue
            at += 1
        quote = data.find(b'"', at)
        if quote < 0:
            return True
        inside = data[quote + 1 : quote + 2] == b'"'
        at = quote + 2
        if not inside:
            comma = data.find(b",", quote + 1)
            if comma < 0:
                return False
            at = comma + 1


def _fields(data: bytes) -> list[bytes]:
    """The fields of one complete record; raises ``ValueError`` saying what is wrong."""
    if b'"' not in data:
        return data.split(b",")
    fields: list[bytes] = []
    at = 0
    while True:
        if data[at : at + 1] != b'"':
            comma = data.find(b",", at)
            fields.append(data[at:] if comma < 0 else data[at:comma])
            if comma < 0:
                return fields
            at = comma + 1
            continue
        end = data.find(b'"', at + 1)
        while data[end + 1 : end + 2] == b'"':
            end = data.find(b'"', end + 2)
        fields.append(data[at + 1 : end].replace(b'""', b'"'))
        if end + 1 == len(data):
            return fields
        if data[end + 1 : end + 2] != b",":
            raise ValueError(f"field {len(fields)} goes on after its closing quote; double the quotes inside of it")
        at = end + 2
