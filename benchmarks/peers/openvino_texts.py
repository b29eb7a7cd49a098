"""Texts to embeddings with OpenVINO as well as it can be done from Python.

All texts are tokenised at once (the tokenizers library uses every core), sorted by length, and padded to the longest
of a batch; pooling and normalisation are part of the graph. Mode ``latency`` gives every batch all threads, mode
``throughput`` runs as many batches beside each other as there are threads, the longest first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from peers.prepare import MAX_TEXT_TOKENS

if TYPE_CHECKING:
    from peers.backends import OpenVino

__all__ = ["Embedder"]


class Embedder:
    """Called with texts and a batch size it gives ``f32[texts, hidden]``, in the caller's order."""

    def __init__(self, backend: OpenVino, hint: str, mode: str) -> None:
        import openvino
        from tokenizers import Tokenizer

        self.hidden = backend.model.hidden
        self.tokenizer = Tokenizer.from_file(str(backend.tokenizer))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(MAX_TEXT_TOKENS)
        graph = _with_pooling(backend.core.read_model(backend.path))
        streams = 1 if mode == "latency" else backend.threads
        compiled = backend.compile(graph, hint, streams)
        self.request = compiled.create_infer_request()
        # One request more than streams: the next batch is padded while others run.
        self.queue = openvino.AsyncInferQueue(compiled, streams + 1) if streams > 1 else None

    def __call__(self, texts: list[str], batch: int) -> Any:
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts)]
        lengths = np.array([len(row) for row in rows])
        order = np.argsort(lengths, kind="stable")
        vectors = np.empty((len(rows), self.hidden), np.float32)
        if self.queue is not None:
            self.queue.set_callback(lambda request, chosen: _store(vectors, chosen, request))
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


def _store(vectors: Any, chosen: Any, request: Any) -> None:
    vectors[chosen] = request.get_output_tensor(0).data


def _with_pooling(graph: Any) -> Any:
    """The graph with the mean over each text's tokens, divided by its length, as the only output."""
    import openvino
    from openvino import opset13 as ops

    states = graph.outputs[0].get_node().input_value(0)
    mask = graph.input("attention_mask")
    weights = ops.unsqueeze(ops.convert(mask, "f32"), ops.constant(np.int64(2)))
    total = ops.reduce_sum(ops.multiply(states, weights), ops.constant(np.array([1])), keep_dims=False)
    # The mean's denominator cancels in the normalisation.
    unit = ops.normalize_l2(total, ops.constant(np.array([1])), eps=1e-12, eps_mode="max")
    return openvino.Model([unit], graph.get_parameters(), "embedding")
