"""The batches that a queue can make of a workload, one for each CUDA graph that they run as.

A graph is captured when a batch first needs it, in some tens of milliseconds. A service has its graphs after some
minutes, so a measurement is of one that has them all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

__all__ = ["one_of_each"]


def one_of_each(
    lengths: Sequence[int], batch_tokens: int, bucket: Callable[[int, int], tuple[int, int] | None]
) -> list[tuple[int, int]]:
    """(first text, number of texts) of a batch for every ``bucket(tokens, texts)`` that a queue's batches fall into.

    ``lengths``: tokens of the workload's texts, in its order, over and over. A batch is of texts that follow each
    other, up to ``batch_tokens`` or one longer text. Fewer texts come first.
    """
    count, total = len(lengths), sum(lengths)
    ends = np.concatenate([[0], np.cumsum([*lengths, *lengths])])
    found: dict[tuple[int, int] | None, tuple[int, int]] = {}
    for texts in itertools.count(1):
        laps, rest = divmod(texts, count)
        tokens = laps * total + ends[rest : rest + count] - ends[:count]
        sizes, first = np.unique(tokens, return_index=True)
        fitting = sizes.size if texts == 1 else int(np.searchsorted(sizes, batch_tokens, "right"))
        if not fitting:
            return list(found.values())
        for size, begin in zip(sizes[:fitting], first[:fitting], strict=True):
            found.setdefault(bucket(int(size), texts), (int(begin), texts))
    raise AssertionError
