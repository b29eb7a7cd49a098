"""What is run: packed batches of random ids of given lengths, or of the user's texts."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from encast.batch import Batch, Int32
from encast.errors import InputError

__all__ = ["MOST_SEQUENCES", "Workload", "of_batches", "of_lengths", "padded", "read_histogram"]

MOST_SEQUENCES = 1 << 20
_MOST_FILE_BYTES = 1 << 24


@dataclass(frozen=True)
class Workload:
    """Batches that run one after the other; ``what`` says in words where they come from."""

    what: str
    batches: tuple[Batch, ...]

    @property
    def tokens(self) -> int:
        return sum(batch.tokens for batch in self.batches)

    @property
    def seqs(self) -> int:
        return sum(batch.seqs for batch in self.batches)

    def selects(self) -> tuple[Int32, ...]:
        """For outputs of selected rows: one row a sequence, its first."""
        return tuple(np.ascontiguousarray(batch.cu_seqlens[:-1]) for batch in self.batches)


def of_lengths(what: str, lengths: Sequence[int], meta: Mapping[str, Any], batch_tokens: int, seed: int) -> Workload:
    """Sequences of random ids, uniform over the vocabulary, in batches of up to ``batch_tokens`` tokens.

    Raises ``InputError`` for no sequence at all, and for lengths that the model does not take.
    """
    longest = int(meta["max_len"])
    if not lengths:
        raise InputError(f"{what}: there is no sequence to run; give at least one")
    if len(lengths) > MOST_SEQUENCES:
        raise InputError(f"{what}: {len(lengths)} sequences are more than {MOST_SEQUENCES}; give fewer")
    for length in (min(lengths), max(lengths)):
        if not 1 <= length <= longest:
            raise InputError(f"{what}: a sequence of {length} tokens; this model takes 1 to {longest}")
    random = np.random.default_rng(seed)
    batches = []
    for group in _groups(lengths, batch_tokens):
        cu_seqlens = np.zeros(len(group) + 1, np.int32)
        np.cumsum(group, out=cu_seqlens[1:])
        ids = random.integers(0, int(meta["vocab"]), int(cu_seqlens[-1]), np.int32)
        batches.append(Batch(ids, cu_seqlens))
    return Workload(what, tuple(batches))


def of_batches(what: str, batches: Iterable[Batch]) -> Workload:
    """Batches that were tokenised; raises ``InputError`` when there is none."""
    kept = tuple(batch for batch in batches if batch.seqs)
    if not kept:
        raise InputError(f"{what} holds no text; give a file with at least one row")
    return Workload(what, kept)


def padded(workload: Workload) -> Workload:
    """The same sequences, each as long as the longest of its batch: what a runtime without packed batches computes.

    The tokens added are id 0 and are computed as any other.
    """
    batches = []
    for batch in workload.batches:
        lengths = np.diff(batch.cu_seqlens)
        longest = int(lengths.max())
        ids = np.zeros((batch.seqs, longest), np.int32)
        here = np.arange(longest) < lengths[:, None]
        ids[here] = batch.token_ids
        types = None
        if batch.token_type_ids is not None:
            spread = np.zeros((batch.seqs, longest), np.int32)
            spread[here] = batch.token_type_ids
            types = spread.reshape(-1)
        cu_seqlens = (np.arange(batch.seqs + 1) * longest).astype(np.int32)
        batches.append(Batch(ids.reshape(-1), cu_seqlens, types))
    return Workload(f"{workload.what}, padded", tuple(batches))


def _groups(lengths: Sequence[int], batch_tokens: int) -> Iterable[list[int]]:
    group: list[int] = []
    total = 0
    for length in lengths:
        if group and total + length > batch_tokens:
            yield group
            group, total = [], 0
        group.append(length)
        total += length
    if group:
        yield group


def read_histogram(text: str) -> list[int]:
    """Lengths from ``16:100,32:50`` (length:sequences), or from the file of that name: JSON ``{"16": 100}`` or
    ``[[16, 100]]``, CSV or TSV with a length and a count a line, with or without a header.

    Raises ``InputError`` naming the entry that is no pair of counts, and its line.
    """
    if ":" in text and not _is_file(text):
        name = "lengths"
        pairs: list[_Place] = [(name, part.split(":")) for part in text.split(",") if part.strip()]
    else:
        pairs, name = _pairs_of_file(Path(text)), text
    lengths: list[int] = []
    for where, pair in pairs:
        length, count = _counts(where, pair)
        if len(lengths) + count > MOST_SEQUENCES:
            raise InputError(f"{where}: more than {MOST_SEQUENCES} sequences; give smaller counts of the same shape")
        lengths += [length] * count
    if not lengths:
        raise InputError(f"{name}: the histogram holds no sequence; give LENGTH:COUNT pairs such as 16:100,128:10")
    # As texts come, long and short ones in turn, and the same ones every time.
    return [int(length) for length in np.random.default_rng(0).permutation(lengths)]


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:  # longer than any name: a histogram in words
        return False


_Place = tuple[str, Sequence[Any]]
"""Where an entry stands, and its fields."""


def _pairs_of_file(path: Path) -> list[_Place]:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(
            f"{path}: cannot be read as a histogram ({reason}); give LENGTH:COUNT,... or a JSON or CSV file"
        ) from None
    if len(data) > _MOST_FILE_BYTES:
        raise InputError(
            f"{path}: more than {_MOST_FILE_BYTES} bytes are no histogram; give a length and a count a line"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8; give JSON or CSV") from None
    if text.lstrip()[:1] in ("{", "["):
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: malformed JSON: {error}") from None
        rows = list(document.items()) if isinstance(document, dict) else document
        return [
            (f"{path}, entry {n}", row if isinstance(row, (list, tuple)) else [row]) for n, row in enumerate(rows, 1)
        ]
    delimiter = "\t" if "\t" in text.strip().partition("\n")[0] else ","
    reader = csv.reader(text.splitlines(), delimiter=delimiter)
    try:
        records: list[_Place] = [(f"{path}:{reader.line_num}", record) for record in reader if "".join(record).strip()]
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num}: malformed CSV: {error}") from None
    header = bool(records) and not any(field.strip().isdigit() for field in records[0][1])
    return records[header:]


def _counts(where: str, pair: Sequence[Any]) -> tuple[int, int]:
    numbers = []
    for field in pair:
        word = str(field).strip()
        if isinstance(field, bool) or not word.isascii() or not word.isdigit() or len(word) > 9:
            break
        numbers.append(int(word))
    if len(pair) != 2 or len(numbers) != 2:
        shown = ":".join(map(str, pair))
        shown = shown if len(shown) <= 40 else f"{shown[:40]}..."
        raise InputError(f"{where}: {shown!r} is no pair of a length and a count of sequences, such as 16:100")
    return numbers[0], numbers[1]
