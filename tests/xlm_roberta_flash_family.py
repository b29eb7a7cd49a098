"""XLM-RoBERTa in the layout of flash-attention's BERT for the tests: config, tensors, cases, a second implementation.

``layout``: ``transformers`` has rotary positions, ``absolute`` a table of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from family import Array, Family, FeedForward, Shapes, linear_shapes, norm_shapes
from numpy_encoders import NamedWeights, attention, gelu, turned

__all__ = ["FAMILY"]

_PAD = 0


def _config(spec: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    rotary = spec.layout != "absolute"
    names = {"AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig"}
    names["AutoModel"] = "modeling_xlm_roberta.XLMRobertaModel"
    made = {**config, "model_type": "xlm-roberta", "layer_norm_eps": 1e-5, "type_vocab_size": spec.type_vocab}
    made |= {"pad_token_id": _PAD, "position_embedding_type": "rotary" if rotary else "absolute"}
    made["auto_map"] = {kind: f"jinaai/xlm-roberta-flash-implementation--{name}" for kind, name in names.items()}
    return made | ({"rotary_emb_base": 500.0} if rotary else {})


def _shapes(spec: Any) -> Shapes:
    hidden, prefix = spec.hidden, "" if spec.head in ("features", "embed") else "roberta."
    yield f"{prefix}embeddings.word_embeddings.weight", (spec.vocab, hidden), "table"
    if spec.layout == "absolute":
        yield f"{prefix}embeddings.position_embeddings.weight", (spec.positions, hidden), "table"
    yield f"{prefix}embeddings.token_type_embeddings.weight", (spec.type_vocab, hidden), "table"
    yield from norm_shapes(f"{prefix}emb_ln", hidden)
    for layer in range(spec.layers):
        at = f"{prefix}encoder.layers.{layer}"
        yield from linear_shapes(f"{at}.mixer.Wqkv", 3 * hidden, hidden)
        yield from linear_shapes(f"{at}.mixer.out_proj", hidden, hidden)
        yield from norm_shapes(f"{at}.norm1", hidden)
        yield from linear_shapes(f"{at}.mlp.fc1", spec.inner, hidden)
        yield from linear_shapes(f"{at}.mlp.fc2", hidden, spec.inner)
        yield from norm_shapes(f"{at}.norm2", hidden)
    if spec.head == "classify":
        yield from linear_shapes("classifier.dense", hidden, hidden)
        yield from linear_shapes("classifier.out_proj", spec.labels, hidden)
    if spec.head == "tag":
        yield from linear_shapes("classifier", spec.labels, hidden)
    if spec.head == "answer":
        yield from linear_shapes("qa_outputs", 2, hidden)
    if spec.head in ("fill_mask", "embed_sparse"):
        yield from linear_shapes("lm_head.dense", hidden, hidden)
        yield from norm_shapes("lm_head.layer_norm", hidden)
        yield "lm_head.bias", (spec.vocab,), "bias"
        if not spec.tied:
            yield "lm_head.decoder.weight", (spec.vocab, hidden), "weight"


def _answers(
    tensors: Mapping[str, Array],
    config: Mapping[str, Any],
    head: str,
    ids: Sequence[int],
    types: Sequence[int] | None = None,
    dtype: Any = np.float64,
) -> tuple[Array, list[Array]]:
    """Of one text, as ``numpy_encoders.jina``."""
    w = NamedWeights(tensors, "roberta." if any(name.startswith("roberta.") for name in tensors) else "", dtype)
    heads, eps, keys = config["num_attention_heads"], config["layer_norm_eps"], []
    x = w["embeddings.word_embeddings.weight"][list(ids)]
    x = x + w["embeddings.token_type_embeddings.weight"][list(types or [0] * len(ids))]
    if config["position_embedding_type"] == "absolute":
        # As RoBERTa counts: tokens behind the padding id, which has its own row.
        place, places = _PAD, []
        for token in ids:
            place += token != _PAD
            places.append(place if token != _PAD else _PAD)
        x = x + w["embeddings.position_embeddings.weight"][places]
    x = w.norm(x, "emb_ln", eps)
    for layer in range(config["num_hidden_layers"]):
        at = f"encoder.layers.{layer}"
        q, k, v = np.split(w.linear(x, f"{at}.mixer.Wqkv"), 3, axis=1)
        keys.append(k)
        if config["position_embedding_type"] == "rotary":
            q, k = (turned(part, heads, config["rotary_emb_base"]) for part in (q, k))
        x = w.norm(x + w.linear(attention(q, k, v, heads), f"{at}.mixer.out_proj"), f"{at}.norm1", eps)
        inner = w.linear(gelu(w.linear(x, f"{at}.mlp.fc1")), f"{at}.mlp.fc2")
        x = w.norm(x + inner, f"{at}.norm2", eps)
    top = NamedWeights(tensors, "", dtype)
    if head == "classify":
        return top.linear(np.tanh(top.linear(x[:1], "classifier.dense")), "classifier.out_proj"), keys
    if head in ("fill_mask", "embed_sparse"):
        x = top.norm(gelu(top.linear(x, "lm_head.dense")), "lm_head.layer_norm", eps)
        name = "lm_head.decoder.weight"
        rows = top[name] if name in tensors else w["embeddings.word_embeddings.weight"]
        return np.einsum("ti,oi->to", x, rows) + top["lm_head.bias"], keys
    last = {"tag": "classifier", "answer": "qa_outputs"}.get(head)
    return top.linear(x, last) if last else x, keys


_USUAL: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 50, "labels": 2, "type_vocab": 1}
_SMALL = {**_USUAL, "seed": 20}

FAMILY = Family(
    arch="xlm-roberta-flash",
    stem="XLMRoberta",
    seed=52,
    config=_config,
    shapes=_shapes,
    inner=lambda spec: int(spec.inner),
    feed_forward=lambda spec: FeedForward("norm1", ("mlp.fc1",), "mlp.fc1", 0, "mlp.fc2"),
    products=4,
    activation="gelu",
    usual=_USUAL,
    cases=(
        ("xlm-roberta-flash-absolute", "classify", {**_SMALL, "layout": "absolute"}),
        # Nothing is a multiple of a vector's width.
        ("xlm-roberta-flash-odd", "tag", {**_SMALL, "hidden": 42, "heads": 3, "inner": 37}),
        # Five heads of 64 columns, of which one fills no panel alone.
        ("xlm-roberta-flash-wide", "tag", {**_SMALL, "layers": 1, "hidden": 320, "heads": 5, "inner": 100}),
        ("xlm-roberta-flash-embed", "embed", {**_SMALL, "pooling": ("mean",), "normalize": True}),
        ("xlm-roberta-flash-embed_sparse", "embed_sparse", {**_SMALL, "layers": 1}),
    ),
    answers=_answers,
    norms_before=False,
)
