"""sentence-transformers as users call it: ``encode``, with its own order, batches of 32, padding and pooling.

Only its tokenizer is replaced: texts stand for ids that are known, so it is timed without tokenisation, as all
backends are. ``encode`` returns the states of tokens, which it has anyhow, in place of the pooled embedding.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from encast.batch import Batch
from encast.bench.peers.base import Call, Float32, Int32
from encast.bench.peers.torch_encoder import import_torch, quiet, set_threads, tensors, torch_facts
from encast.bench.peers.transformer import OUTPUT, CheckpointPeer, not_installed, versions
from encast.errors import InputError

__all__ = ["SentenceTransformers"]

Row = tuple[list[int], list[int]]
"""Ids and token types of one text."""


class SentenceTransformers(CheckpointPeer):
    """bf16: the model is loaded in bfloat16, as its documentation recommends. Option ``batch_size``: of ``encode``."""

    name = "sentence-transformers"
    dtypes = ("f32", "bf16")
    modules = ("torch", "transformers", "sentence_transformers")
    defaults: ClassVar[Mapping[str, Any]] = {"batch_size": 32}

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        size = self.settings["batch_size"]
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise InputError(f"{self.name}: batch_size is {size!r}; a whole number of at least 1 is needed")

    @classmethod
    def missing(cls) -> str | None:
        return not_installed("bench-sentence-transformers", "sentence_transformers", "torch", "transformers")

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

    def run(self, output: str, batch: Batch, select: Int32 | None = None) -> Float32:
        self.encoder.check(output, batch, select)
        return self._call(batch)()

    def bind(self, batch: Batch) -> Call:
        self.encoder.check(OUTPUT, batch, None)
        return self._call(batch)

    def facts(self) -> Mapping[str, Any]:
        return {
            **torch_facts(),
            "version": versions("sentence-transformers")["sentence-transformers"],
            "torch": versions("torch")["torch"],
            "batch_size": self.settings["batch_size"],
            "modules": [type(module).__name__ for module in self._model],
        }

    def _call(self, batch: Batch) -> Call:
        rows = _rows(batch)
        # As long as its text would be, by which ``encode`` sorts.
        texts = [" ".join(map(str, ids)) + (f" {types}" if any(types) else "") for ids, types in rows]
        known = dict(zip(texts, rows, strict=True))
        torch, size = import_torch(), int(self.settings["batch_size"])

        def call() -> Float32:
            self._texts = known
            states = self._model.encode(
                texts, batch_size=size, output_value="token_embeddings", show_progress_bar=False
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
