"""The texts of a data set as its task runs them, and a sample of them in one batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from encast.backends.base import Float32, Runnable
from encast.batch import Batch, Int32
from encast.errors import InputError

__all__ = ["Recorder", "Sample", "distance"]


class Recorder:
    """A ``Runnable`` that keeps what it is asked to run."""

    def __init__(self, inner: Runnable) -> None:
        self._inner = inner
        self._batches: list[tuple[str, Batch]] = []

    def run(self, output: str, batch: Batch, select: Int32 | None = None) -> Float32:
        self._batches.append((output, batch))
        return self._inner.run(output, batch, select)

    def close(self) -> None:
        self._inner.close()

    def sample(self, tokens: int) -> Sample:
        """Whole texts of about ``tokens`` tokens in all, at even distances; every one where there are no more."""
        texts = [(batch, index) for _, batch in self._batches for index in range(batch.seqs)]
        lengths = [int(batch.cu_seqlens[index + 1] - batch.cu_seqlens[index]) for batch, index in texts]
        count = min(len(texts), max(1, round(len(texts) * tokens / sum(lengths))))
        chosen = [texts[number] for number in np.linspace(0, len(texts) - 1, count).round().astype(int)]
        return Sample(self._batches[0][0], _packed(chosen))


@dataclass(frozen=True)
class Sample:
    """Texts in one batch, and the output that their task reads."""

    output: str
    batch: Batch

    def run(self, runnable: Runnable) -> Float32:
        return runnable.run(self.output, self.batch)


def distance(output: str, wide: Float32, narrow: Float32) -> float:
    """How far ``narrow`` lies from ``wide``, both f32[n, m] of the same texts.

    Of embeddings the mean over texts of one less the cosine, of logits the mean squared difference. Both are smooth
    where a metric moves in steps of a row, and both are squares of small errors, so that those of layers, which are
    nearly independent, add up. Raises ``InputError`` when a value is not finite.
    """
    if not np.isfinite(narrow).all():
        raise InputError("the answers are not finite numbers")
    a, b = wide.astype(np.float64), narrow.astype(np.float64)
    if output == "embedding":
        lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        cosines = (a * b).sum(axis=1) / np.maximum(lengths, np.finfo(np.float64).tiny)
        return max(0.0, float(np.mean(1.0 - cosines)))
    return float(np.mean((a - b) ** 2))


def _packed(texts: list[tuple[Batch, int]]) -> Batch:
    ids: list[Any] = []
    types: list[Any] = []
    for batch, index in texts:
        part = slice(int(batch.cu_seqlens[index]), int(batch.cu_seqlens[index + 1]))
        ids.append(batch.token_ids[part])
        if batch.token_type_ids is not None:
            types.append(batch.token_type_ids[part])
    cu_seqlens = np.cumsum([0, *map(len, ids)]).astype(np.int32)
    return Batch(np.concatenate(ids), cu_seqlens, np.concatenate(types) if types else None)
