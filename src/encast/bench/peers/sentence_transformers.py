"""sentence-transformers as users call it: ``encode``, with its own order, batches of 32, padding and pooling.

Only its tokenizer is replaced: texts stand for ids that are known, so it is timed without tokenisation, as all
backends are. ``encode`` returns the states of tokens, which it has anyhow, in place of the pooled embedding.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from encast.batch import Batch
from encast.bench.peers.base import Call, CheckpointPeer, Float32, versions
from encast.bench.peers.pytorch import import_torch, quiet, set_threads, tensors, torch_facts

__all__ = ["SentenceTransformers"]

BATCH_SIZE = 32
"""The default of ``encode``."""

Row = tuple[list[int], list[int]]
"""Ids and token types of one text."""


class SentenceTransformers(CheckpointPeer):
    """bf16: the model is loaded in bfloat16, as its documentation recommends."""

    name = "sentence-transformers"
    dtypes = ("f32", "bf16")
    modules = ("torch", "transformers", "sentence_transformers")
    extra = "bench-sentence-transformers"

    def open(self) -> None:
        set_threads(self.threads)
        torch = import_torch()
        importlib.import_module("transformers").utils.logging.disable_progress_bar()
        library: Any = importlib.import_module("sentence_transformers")
        dtype = torch.float32 if self.dtype == "f32" else torch.bfloat16
        with quiet():
            self._model = library.SentenceTransformer(
                str(self.model.checkpoint), device="cpu", local_files_only=True, model_kwargs={"dtype": dtype}
            )
        self._texts: Mapping[str, Row] = {}
        self._model.preprocess = self._preprocess

    def facts(self) -> Mapping[str, Any]:
        return {
            **torch_facts(),
            "version": versions("sentence-transformers")["sentence-transformers"],
            "torch": versions("torch")["torch"],
            "batch_size": BATCH_SIZE,
            "modules": [type(module).__name__ for module in self._model],
        }

    def bind(self, batch: Batch) -> Call:
        self.check(batch)
        rows = _rows(batch)
        # As long as its text would be, by which ``encode`` sorts.
        texts = [" ".join(map(str, ids)) + (f" {types}" if any(types) else "") for ids, types in rows]
        known = dict(zip(texts, rows, strict=True))
        torch = import_torch()

        def call() -> Float32:
            self._texts = known
            states = self._model.encode(
                texts, batch_size=BATCH_SIZE, output_value="token_embeddings", show_progress_bar=False
            )
            joined: Float32 = torch.cat(states).float().numpy()
            return joined

        return call

    def _preprocess(self, inputs: Sequence[str], prompt: str | None = None, **_: Any) -> dict[str, Any]:
        """In place of the tokenizer: the ids of the texts, padded to the longest of these."""
        rows = [self._texts[text] for text in inputs]
        feeds = self.encoder.feeds(Batch.of([ids for ids, _ in rows], [types for _, types in rows]))
        return dict(zip(feeds, tensors(feeds), strict=True))


def _rows(batch: Batch) -> list[Row]:
    types = np.zeros_like(batch.token_ids) if batch.token_type_ids is None else batch.token_type_ids
    return [
        (batch.token_ids[first:end].tolist(), types[first:end].tolist())
        for first, end in itertools.pairwise(batch.cu_seqlens.tolist())
    ]
