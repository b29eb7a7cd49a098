"""The requests that set-ups are measured with: a user's texts, or lengths by a histogram."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from encast.artifact import Artifact
from encast.batch import Batch
from encast.engine import tokenizer_of
from encast.errors import InputError
from encast.measure.batches import pick
from encast.measure.input_spec import InputSpec
from encast.measure.workloads import make_workload

__all__ = ["MOST_REQUESTS", "Requests", "read_requests"]

MOST_REQUESTS = 4096
"""A sample of more says no more about a distribution of lengths, and has to be read by every process that measures."""


@dataclass(frozen=True)
class Requests:
    """``batch`` holds one sequence a request, in the order in which they come; ``what`` names where they are from."""

    what: str
    batch: Batch

    @property
    def lengths(self) -> list[int]:
        return [int(length) for length in np.diff(self.batch.cu_seqlens)]

    @property
    def sha(self) -> str:
        """SHA-256 of the ids and where texts end."""
        found = hashlib.sha256(self.batch.cu_seqlens.tobytes())
        found.update(self.batch.token_ids.tobytes())
        if self.batch.token_type_ids is not None:
            found.update(self.batch.token_type_ids.tobytes())
        return found.hexdigest()

    def describe(self) -> dict[str, Any]:
        """The ``workload`` of a configuration file."""
        lengths = np.diff(self.batch.cu_seqlens)
        return {
            "name": self.what,
            "sha": self.sha,
            "sequences": self.batch.seqs,
            "tokens": self.batch.tokens,
            "lengths": [int(lengths.min()), float(np.median(lengths)), int(lengths.max())],
        }


def read_requests(
    source: str,
    artifact: Artifact,
    *,
    column: str | None = None,
    pair_column: str | None = None,
    format: str = "auto",
    seed: int = 0,
) -> Requests:
    """From ``LENGTH:COUNT,...``, from a JSON, CSV or TSV file of such pairs, or from a file of texts.

    Texts are tokenised as the artifact does it, lengths become random ids. Raises ``InputError`` naming file and line
    of what cannot be read, and for lengths that the model does not take.
    """
    meta = artifact.graph.meta
    inputs = InputSpec(meta.vocab, meta.max_len, meta.type_vocab, lambda: tokenizer_of(artifact))
    config: dict[str, Any] = {"file": source, "seed": seed, "sequences": MOST_REQUESTS}
    if column is None and pair_column is None and format == "auto" and _is_histogram(source):
        config["kind"] = "histogram"
    else:
        config |= {"kind": "texts", "column": column, "pair_column": pair_column, "format": format}
    workload = make_workload(_given(config), inputs)
    # A workload samples its pool at random; here every text counts once.
    pool: Batch | None = getattr(workload, "pool", None)
    if pool is None:
        raise InputError(f"{source}: no set of texts or lengths; give a file of texts or LENGTH:COUNT,...")
    order = np.random.default_rng(seed).permutation(pool.seqs)[:MOST_REQUESTS]
    return Requests(source if len(source) <= 60 else f"{source[:60]}...", pick(pool, [int(index) for index in order]))


def _given(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if value is not None}


def _is_histogram(source: str) -> bool:
    """Whether the source is pairs of a length and a count: in words, or in a file that holds nothing else."""
    from encast.measure.lengths import read_histogram

    path = Path(source)
    try:
        if not path.is_file():
            return ":" in source and not path.suffix
        if path.suffix.lower() not in (".json", ".csv", ".tsv"):
            return False
        read_histogram(source)
    except (InputError, OSError, ValueError):
        return False
    return True
