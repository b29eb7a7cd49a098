"""Jina Embeddings v3 as transformers has it, for the tests: config, tensors, cases.

``layout``: ``transformers`` has its names, ``flash`` those of the model's own code, which it saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from family import Family, FeedForward, Shapes, linear_shapes, norm_shapes

__all__ = ["FAMILY"]


def _config(spec: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    made = {**config, "layer_norm_eps": 1e-5, "type_vocab_size": spec.type_vocab, "pad_token_id": 1}
    return made | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}


def _layer(spec: Any, at: str) -> Shapes:
    hidden = spec.hidden
    if spec.layout == "flash":
        yield from linear_shapes(f"{at}.mixer.Wqkv", 3 * hidden, hidden, "peaked_qk")
        yield from linear_shapes(f"{at}.mixer.out_proj", hidden, hidden)
    else:
        for part, kind in (("q", "peaked_qk"), ("k", "peaked_qk"), ("v", "weight"), ("o", "weight")):
            yield from linear_shapes(f"{at}.self_attn.{part}_proj", hidden, hidden, kind)
    norms = _norms(spec)
    yield from norm_shapes(f"{at}.{norms[0]}", hidden)
    yield from linear_shapes(f"{at}.mlp.fc1", spec.inner, hidden)
    yield from linear_shapes(f"{at}.mlp.fc2", hidden, spec.inner)
    yield from norm_shapes(f"{at}.{norms[1]}", hidden)


def _norms(spec: Any) -> tuple[str, str]:
    return ("norm1", "norm2") if spec.layout == "flash" else ("post_attention_layernorm", "post_mlp_layernorm")


def _shapes(spec: Any) -> Shapes:
    hidden, bare, flash = spec.hidden, spec.head in ("features", "embed"), spec.layout == "flash"
    prefix = "" if bare else "roberta."
    yield f"{prefix}embeddings.word_embeddings.weight", (spec.vocab, hidden), "table"
    yield f"{prefix}embeddings.token_type_embeddings.weight", (spec.type_vocab, hidden), "table"
    yield from norm_shapes(f"{prefix}{'emb_ln' if flash else 'embeddings.LayerNorm'}", hidden)
    for layer in range(spec.layers):
        yield from _layer(spec, f"{prefix}{'encoder.layers' if flash else 'layers'}.{layer}")
    if bare:
        yield from linear_shapes("pooler.dense", hidden, hidden)
    elif spec.head == "classify":
        yield from linear_shapes("classifier.dense", hidden, hidden)
        yield from linear_shapes("classifier.out_proj", spec.labels, hidden)
    elif spec.head in ("tag", "answer"):
        yield from linear_shapes({"tag": "classifier", "answer": "qa_outputs"}[spec.head], spec.labels, hidden)
    else:
        yield from linear_shapes("lm_head.dense", hidden, hidden)
        yield from norm_shapes("lm_head.layer_norm", hidden)
        yield "lm_head.bias", (spec.vocab,), "bias"


_USUAL: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 50, "labels": 2, "type_vocab": 1}
_SMALL = {**_USUAL, "seed": 20}
_LINEAR = {"rope_type": "linear", "rope_theta": 50.0, "factor": 1.5}

FAMILY = Family(
    arch="jina_embeddings_v3",
    stem="JinaEmbeddingsV3",
    seed=53,
    config=_config,
    shapes=_shapes,
    inner=lambda spec: int(spec.inner),
    feed_forward=lambda spec: FeedForward(_norms(spec)[0], ("mlp.fc1",), "mlp.fc1", 0, "mlp.fc2"),
    products=6,
    activation="gelu",
    usual=_USUAL,
    cases=(
        ("jina_embeddings_v3-flash", "classify", {**_SMALL, "layout": "flash"}),
        ("jina_embeddings_v3-linear", "tag", {**_SMALL, "layers": 1, "config": {"rope_parameters": _LINEAR}}),
        # Nothing is a multiple of a vector's width.
        ("jina_embeddings_v3-odd", "tag", {**_SMALL, "hidden": 42, "heads": 3, "inner": 37}),
        # Five heads of 64 columns, of which one fills no panel alone.
        ("jina_embeddings_v3-wide", "tag", {**_SMALL, "layers": 1, "hidden": 320, "heads": 5, "inner": 100}),
        ("jina_embeddings_v3-embed", "embed", {**_SMALL, "layout": "flash", "pooling": ("mean",), "normalize": True}),
    ),
    norms_before=False,
)
