"""Rows of token ids in batches of like lengths, in an order that a seed decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Example", "epoch_batches", "lengths_of", "steps_of", "tokens_of"]

Ints = np.ndarray[Any, np.dtype[np.int32]]

_POOL = 64
"""Batches that are sorted by length together: enough to waste under 5 % on padding, few enough to mix rows well."""


@dataclass(frozen=True)
class Example:
    """One row of training: the token ids and types of its sequences (two for a pair that is embedded, else one), and
    what is to be learned, in its task's form; None where only a teacher knows.
    """

    ids: tuple[Ints, ...]
    types: tuple[Ints, ...]
    target: Any

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))


def lengths_of(examples: Sequence[Example]) -> Ints:
    """The tokens of the longest sequence of every row, by which batches are made."""
    return np.array([max(map(len, row.ids)) for row in examples], np.int32)


def tokens_of(examples: Sequence[Example]) -> int:
    return sum(one.tokens for one in examples)


def steps_of(rows: int, batch_size: int, epochs: float, most: int | None = None) -> int:
    """The steps of so many epochs, of which the last may be a part: one at least, unless there are no epochs, and
    ``most`` at most."""
    steps = max(epochs > 0, round(epochs * -(-rows // batch_size)))
    return steps if most is None else min(steps, most)


def epoch_batches(lengths: Ints, batch_size: int, seed: Sequence[int]) -> list[Ints]:
    """The rows of every batch of an epoch: each row once, in batches of ``batch_size`` rows (the last may be smaller).

    Rows are shuffled, cut into pools of 64 batches, sorted by length within their pool and cut into batches, which are
    shuffled. The same seed gives the same batches everywhere.
    """
    generator = np.random.default_rng(list(seed))
    order = generator.permutation(len(lengths)).astype(np.int32)
    size = batch_size * _POOL
    pools = [order[begin : begin + size] for begin in range(0, len(order), size)]
    sorted_pools = [pool[np.argsort(lengths[pool], kind="stable")] for pool in pools]
    batches = [pool[begin : begin + batch_size] for pool in sorted_pools for begin in range(0, len(pool), batch_size)]
    return [batches[index] for index in generator.permutation(len(batches))]
