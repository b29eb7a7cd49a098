"""Texts to embeddings with OpenVINO as well as it can be done from Python.

All texts are tokenised at once (the tokenizers library uses every core), sorted by length, and padded to the longest
of a batch; pooling and normalisation are part of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from peers.backends import OpenVino

__all__ = ["embedder"]


def embedder(backend: OpenVino, texts: list[str], batch: int, hint: str) -> Callable[[], Any]:
    """A call from the texts to ``f32[texts, hidden]``, in the caller's order."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(backend.tokenizer)
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_LENGTH)
    request = backend.compile(_with_pooling(backend.core.read_model(backend.path)), hint).create_infer_request()

    def call() -> Any:
        rows = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
        lengths = np.array([len(row) for row in rows])
        order = np.argsort(lengths, kind="stable")
        vectors = np.empty((len(rows), backend.model.hidden), np.float32)
        for begin in range(0, len(rows), batch):
            chosen = order[begin : begin + batch]
            width = int(lengths[chosen[-1]])
            ids = np.zeros((len(chosen), width), np.int64)
            for row, index in enumerate(chosen):
                ids[row, : lengths[index]] = rows[index]
            mask = (np.arange(width) < lengths[chosen, None]).astype(np.int64)
            feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
            vectors[chosen] = request.infer(feeds, share_inputs=True, share_outputs=True)[0]
        return vectors

    return call


MAX_LENGTH = 256
"""Of all-MiniLM-L6-v2."""


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
