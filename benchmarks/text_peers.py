"""encast and OpenVINO from texts to embeddings, as backends of ``encast bench``.

Both call ``texts``, a JSON file with a list of texts, by their numbers: token i of a batch is the number of a text, and
row i of the answer ``f32[texts, hidden]`` is its normalised mean.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from encast.batch import Batch
from encast.bench.peers.base import Call, Peer
from encast.bench.peers.openvino import OpenVino, fastest

__all__ = ["MAX_TOKENS", "EncastTexts", "OpenVinoTexts"]

MAX_TOKENS = 256
"""Of all-MiniLM-L6-v2's texts."""


def texts_of(peer: Peer, batch: Batch) -> list[str]:
    every: list[str] = json.loads(Path(peer.options["texts"]).read_text(encoding="utf-8"))
    return [every[number] for number in batch.token_ids.tolist()]


class EncastTexts(Peer):
    """``Engine.embed`` of the whole list. Compiled anew when encast's version changes: for comparisons, not a cache."""

    name = "encast"
    dtypes = ("int8",)
    modules = ("encast.engine",)

    def open(self) -> None:
        from encast.compile import compile
        from encast.engine import load

        folder = Path(self.options["folder"])
        self._engine = load(
            compile(self.model.checkpoint, folder / "texts.encast", dtype=self.dtype, task="embed"),
            threads=self.threads,
        )

    def bind(self, batch: Batch) -> Call:
        texts = texts_of(self, batch)
        return lambda: self._engine.embed(texts)


class OpenVinoTexts(OpenVino):
    """As well as it can be done from Python.

    All texts are tokenised at once (the tokenizers library uses every core), sorted by length, and padded to the
    longest of a batch; pooling and normalisation are part of the graph. Mode ``latency`` gives every batch all threads,
    mode ``throughput`` runs as many batches beside each other as there are threads, the longest first. Mode, precision
    hint and batch size are what was fastest on a sample when a list of texts is bound.
    """

    BATCHES = (8, 16, 32, 64)
    MODES = ("latency", "throughput")

    def __init__(self, *arguments: Any, texts: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.options = {**self.options, "texts": texts}

    def bind(self, batch: Batch) -> Call:
        texts = texts_of(self, batch)
        embedders = {(mode, hint): Embedder(self, mode, hint) for mode in self.MODES for hint in self._hints}
        few = sample(texts, embedders[self.MODES[0], self._hints[0]].lengths(texts), max(self.BATCHES))
        tried = {
            f"{mode}, hint {hint}, batches of {size}": (embedders[mode, hint], size)
            for (mode, hint), size in itertools.product(embedders, self.BATCHES)
        }
        self._choice = fastest({name: Embedding(*settings, few) for name, settings in tried.items()})
        return Embedding(*tried[self._choice], texts)

    def facts(self) -> Mapping[str, Any]:
        return {**super().facts(), "choice": self._choice}


def sample(texts: Sequence[str], lengths: Sequence[int], block: int) -> list[str]:
    """Every eighth block of the texts sorted by length: whole batches at every size."""
    order = np.argsort(lengths, kind="stable")
    return [texts[index] for rank, index in enumerate(order) if rank // block % 8 == 3] or list(texts)


class Embedding:
    """One call: the texts through an embedder, in batches of ``size``."""

    def __init__(self, embedder: Embedder, size: int, texts: Sequence[str]) -> None:
        self.embedder, self.size, self.texts = embedder, size, texts

    def __call__(self) -> Any:
        return self.embedder(self.texts, self.size)


class Embedder:
    """Called with texts and a batch size it gives ``f32[texts, hidden]``, in the caller's order."""

    def __init__(self, peer: OpenVinoTexts, mode: str, hint: str) -> None:
        import openvino
        from tokenizers import Tokenizer

        self.hidden = peer.encoder.hidden
        self.tokenizer = Tokenizer.from_file(str(peer.model.checkpoint / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(MAX_TOKENS)
        streams = 1 if mode == "latency" else peer.threads
        settings = {
            "PERFORMANCE_HINT": "LATENCY" if streams == 1 else "THROUGHPUT",
            "NUM_STREAMS": streams,
            "INFERENCE_NUM_THREADS": peer.threads,
            "INFERENCE_PRECISION_HINT": hint,
        }
        compiled = peer._core.compile_model(with_pooling(peer._core.read_model(peer._path)), "CPU", settings)
        self.request = compiled.create_infer_request()
        # One request more than streams: the next batch is padded while others run.
        self.queue = openvino.AsyncInferQueue(compiled, streams + 1) if streams > 1 else None

    def lengths(self, texts: Sequence[str]) -> list[int]:
        return [len(encoding.ids) for encoding in self.tokenizer.encode_batch_fast(texts)]

    def __call__(self, texts: Sequence[str], batch: int) -> Any:
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts)]
        lengths = np.array([len(row) for row in rows])
        order = np.argsort(lengths, kind="stable")
        vectors = np.empty((len(rows), self.hidden), np.float32)
        if self.queue is not None:
            self.queue.set_callback(lambda request, chosen: store(vectors, chosen, request))
        for begin in reversed(range(0, len(rows), batch)):
            chosen = order[begin : begin + batch]
            width = int(lengths[chosen[-1]])
            ids = np.zeros((len(chosen), width), np.int64)
            for row, index in enumerate(chosen):
                ids[row, : lengths[index]] = rows[index]
            mask = (np.arange(width) < lengths[chosen, None]).astype(np.int64)
            feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
            if self.queue is not None:
                self.queue.start_async(feeds, chosen)
            else:
                vectors[chosen] = self.request.infer(feeds, share_inputs=True, share_outputs=True)[0]
        if self.queue is not None:
            self.queue.wait_all()
        return vectors


def store(vectors: Any, chosen: Any, request: Any) -> None:
    vectors[chosen] = request.get_output_tensor(0).data


def with_pooling(graph: Any) -> Any:
    """The graph with the normalised mean over each text's tokens as the only output."""
    import openvino
    from openvino import opset13 as ops

    states = graph.outputs[0].get_node().input_value(0)
    mask = graph.input("attention_mask")
    weights = ops.unsqueeze(ops.convert(mask, "f32"), ops.constant(np.int64(2)))
    total = ops.reduce_sum(ops.multiply(states, weights), ops.constant(np.array([1])), keep_dims=False)
    # The mean's denominator cancels in the normalisation.
    unit = ops.normalize_l2(total, ops.constant(np.array([1])), eps=1e-12, eps_mode="max")
    return openvino.Model([unit], graph.get_parameters(), "embedding")
