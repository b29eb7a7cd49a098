"""The arena: a place for every value, reused as soon as the value is no longer read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ALIGNMENT", "Lifetime", "place_values"]

ALIGNMENT = 64


@dataclass(frozen=True)
class Lifetime:
    """A value of ``nbytes`` that is written at step ``first`` and last read at step ``last``."""

    nbytes: int
    first: int
    last: int


def place_values(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Byte offsets, and the size of the arena.

    Greedy by size (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020):
    the largest value first, each at the lowest offset that is free while it lives.
    """
    offsets = [0] * len(lifetimes)
    placed: list[int] = []
    size = 0
    for index in sorted(range(len(lifetimes)), key=lambda i: (-lifetimes[i].nbytes, i)):
        mine = lifetimes[index]
        taken = sorted(
            (offsets[other], offsets[other] + _aligned(lifetimes[other].nbytes))
            for other in placed
            if lifetimes[other].first <= mine.last and mine.first <= lifetimes[other].last
        )
        offset = 0
        for begin, end in taken:
            if offset + mine.nbytes <= begin:
                break
            offset = max(offset, end)
        offsets[index] = offset
        placed.append(index)
        size = max(size, offset + _aligned(mine.nbytes))
    return offsets, size


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
