"""What is run: packed batches of random ids of given lengths, or of the user's texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from encast.backends.base import Limits
from encast.batch import Batch, Int32
from encast.errors import InputError
from encast.measure.lengths import MOST_SEQUENCES

__all__ = ["Workload", "of_batches", "of_lengths", "padded"]


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


def of_lengths(what: str, lengths: Sequence[int], limits: Limits, batch_tokens: int, seed: int) -> Workload:
    """Sequences of random ids, uniform over the vocabulary, in batches of up to ``batch_tokens`` tokens.

    Raises ``InputError`` for no sequence at all, and for lengths that the model does not take.
    """
    longest = limits.max_len
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
        ids = random.integers(0, limits.vocab, int(cu_seqlens[-1]), np.int32)
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
