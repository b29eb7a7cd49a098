"""Whether a backend computes the model at all: its output beside the float64 reference.

The reference is encast's own plain graph, before any pass, evaluated by NumPy in float64. Sequences do not depend on
their neighbours in a batch, so some sequences of large batches stand for all. They are chosen by their own ids: every
run checks the same ones, and their states are kept in files.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from encast.batch import Batch
from encast.bench.cache import cached, cached_place
from encast.bench.peers.base import ModelFiles, plain_graph, source_digest
from encast.errors import ResourceError

__all__ = ["LEAST_COSINE", "LEAST_SEQUENCE_COSINE", "Agreement", "Reference", "plain_graph"]

Float64 = np.ndarray[Any, np.dtype[np.float64]]
Float32 = np.ndarray[Any, np.dtype[np.float32]]
Ids = tuple[list[int], list[int]]

LEAST_COSINE: Mapping[str, float] = {"f32": 0.999999, "f16": 0.9999, "bf16": 0.9995, "f8": 0.97, "int8": 0.97}
"""The mean cosine of a token's state to the reference below which a backend is not timed, by dtype.

The bound for int8 admits static scales for whole tensors on random weights, which are the hardest to quantise.
"""

_SEQUENCE_SHARE = 3

LEAST_SEQUENCE_COSINE: Mapping[str, float] = {
    dtype: 1 - _SEQUENCE_SHARE * (1 - cosine) for dtype, cosine in LEAST_COSINE.items()
}
"""The same of the worst sequence: its mean may lose three times as much as that of all tokens.

One wrong sequence among many would hide in the mean: of a hundred, one that points anywhere moves it by 0.01 only. What
is rounded alike loses alike: of ten backends' states of BERT-base, in each dtype, even the worst single token lost less
than 1.4 times the mean, of which a sequence is a mean again. What belongs to another text loses tenths.
"""

CHECKED_TOKENS = 2048
"""Of all batches of a point, where a sequence of each has not more: further ones would take the reference minutes."""

_KIND, _FILE = "reference", "states.npy"


@dataclass(frozen=True)
class Agreement:
    """How near the outputs of timed calls are to the reference, over all checked tokens.

    Cosines are of one token's states; ``sequence_least`` is the mean of the sequence where it is least, for which
    ``sequence_bound`` holds. ``largest_difference`` is relative to the largest value of the reference.
    """

    cosine_mean: float
    cosine_least: float
    sequence_least: float
    largest_difference: float
    bound: float
    sequence_bound: float
    tokens: int

    @property
    def ok(self) -> bool:
        return self.cosine_mean >= self.bound and self.sequence_least >= self.sequence_bound

    @property
    def reason(self) -> str:
        """What is against it when it is not ``ok``."""
        if self.cosine_mean < self.bound:
            return f"has mean cosine {self.cosine_mean:.6f} to the float64 reference, {self.bound:g} is needed"
        return (
            f"has a sequence of mean cosine {self.sequence_least:.6f} to the float64 reference, "
            f"{self.sequence_bound:g} is needed of each"
        )

    def worst(self, other: Agreement) -> Agreement:
        """Of each figure the worse one, of outputs of one dtype."""
        return Agreement(
            cosine_mean=min(self.cosine_mean, other.cosine_mean),
            cosine_least=min(self.cosine_least, other.cosine_least),
            sequence_least=min(self.sequence_least, other.sequence_least),
            largest_difference=max(self.largest_difference, other.largest_difference),
            bound=self.bound,
            sequence_bound=self.sequence_bound,
            tokens=max(self.tokens, other.tokens),
        )

    def record(self) -> dict[str, Any]:
        """Plain JSON; what is not finite becomes null."""
        return {name: value if np.isfinite(value) else None for name, value in asdict(self).items()}


class Reference:
    """The float64 states of a model, computed in a process of its own and kept below ``cache``."""

    def __init__(self, model: ModelFiles, cache: Path) -> None:
        self._model, self._cache = model, cache
        self._states: dict[str, Float64] = {}

    def prepare(self, batches: Sequence[Batch]) -> None:
        """Computes what ``compare`` will need for these batches, and forgets what others needed.

        Raises ``ResourceError`` when that fails.
        """
        rows = {_digest(*row): row for row in _chosen(batches)}
        missing = {digest: row for digest, row in rows.items() if not self._folder(digest).is_dir()}
        if missing:
            self._compute(missing)
        self._states = {digest: np.load(self._folder(digest) / _FILE) for digest in rows}

    def sequences(self, batch: Batch) -> list[int]:
        """The numbers of the batch's sequences that ``compare`` knows the states of."""
        return [number for number, (_, row) in enumerate(_rows(batch)) if _digest(*row) in self._states]

    def _folder(self, digest: str) -> Path:
        return cached_place(self._cache, _KIND, _key(self._model.sha, digest))

    def _compute(self, rows: Mapping[str, Ids]) -> None:
        request = {
            "checkpoint": str(self._model.checkpoint),
            "sha": self._model.sha,
            "cache": str(self._cache),
            "rows": list(rows.values()),
        }
        done = subprocess.run(
            [sys.executable, "-m", "encast.bench.agreement"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ResourceError(f"the float64 reference of {self._model.name} could not be computed: {last}")

    def compare(self, outputs: Sequence[tuple[Batch, Float32]], dtype: str) -> Agreement:
        """Of outputs ``f32[tokens, hidden]`` whatever was prepared is compared; nothing does not agree."""
        cosines: list[Float64] = []
        difference = largest = 0.0
        for batch, states in outputs:
            for first, row in _rows(batch):
                expected = self._states.get(_digest(*row))
                if expected is None:
                    continue
                found = states[first : first + len(expected)].astype(np.float64)
                norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
                with np.errstate(invalid="ignore", divide="ignore"):
                    # A state of zeros, or of what is no number, points nowhere.
                    cosines.append(np.nan_to_num((found * expected).sum(1) / norms, nan=0.0))
                difference = max(difference, float(np.nan_to_num(np.abs(found - expected), nan=np.inf).max()))
                largest = max(largest, float(np.abs(expected).max()))
        every = np.concatenate(cosines) if cosines else np.zeros(1)
        return Agreement(
            cosine_mean=float(every.mean()),
            cosine_least=float(every.min()),
            sequence_least=min((float(own.mean()) for own in cosines), default=0.0),
            largest_difference=difference / largest if largest else 0.0 if not cosines else float("inf"),
            bound=LEAST_COSINE[dtype],
            sequence_bound=LEAST_SEQUENCE_COSINE[dtype],
            tokens=sum(map(len, cosines)),
        )


def _rows(batch: Batch) -> Iterator[tuple[int, Ids]]:
    """The first token of each sequence, its ids and its token types (none: [])."""
    types = batch.token_type_ids
    for first, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        yield first, (batch.token_ids[first:end].tolist(), [] if types is None else types[first:end].tolist())


def _chosen(batches: Sequence[Batch]) -> Iterator[Ids]:
    """One sequence of each batch, then further ones while all have ``CHECKED_TOKENS`` tokens at most.

    Of each batch in turn the shortest, which costs least, and then the one of smallest digest.
    """
    heaps = []
    for batch in batches:
        rows = sorted((row for _, row in _rows(batch)), key=lambda row: _digest(*row))
        first = min(rows, key=lambda row: len(row[0]))
        heaps.append([first, *(row for row in rows if row is not first)])
    tokens = 0
    for number, turn in enumerate(itertools.zip_longest(*heaps)):
        for row in filter(None, turn):
            if number and tokens + len(row[0]) > CHECKED_TOKENS:
                return
            yield row
            tokens += len(row[0])


def _digest(ids: Sequence[int], types: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps([ids, types]).encode()).hexdigest()[:16]


def _key(sha: str, digest: str) -> dict[str, str]:
    return {"model": sha, "code": _code_digest(), "sequence": digest}


@functools.cache
def _code_digest() -> str:
    """Of the code that the reference is computed by."""
    return source_digest("archs", "importers", "ir", "backends/reference")[:16]


def _serve() -> None:
    """The process of its own: the weights in float64 are twice the checkpoint, and are gone when it ends."""
    from encast.backends.reference import Reference as Evaluator

    request = json.load(sys.stdin)
    evaluator = Evaluator(plain_graph(Path(request["checkpoint"])))
    for ids, types in request["rows"]:
        batch = Batch.of([ids], [types] if types else None)

        def make(folder: Path, batch: Batch = batch) -> None:
            np.save(folder / _FILE, evaluator.evaluate("last_hidden_state", batch))

        cached(Path(request["cache"]), _KIND, _key(request["sha"], _digest(ids, types)), make)


if __name__ == "__main__":
    _serve()
