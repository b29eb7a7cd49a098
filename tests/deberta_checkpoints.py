"""DeBERTa's part of ``checkpoints``: config, names and shapes of tensors, and cases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["DEBERTA_OPTIONS", "deberta_config", "deberta_shapes"]

Shape = tuple[str, tuple[int, ...], str]


def deberta_config(spec: Any) -> dict[str, Any]:
    """As v3 has it: buckets of which the fourth distance is the last exact one, no absolute positions."""
    fields = {
        "layer_norm_eps": 1e-7,
        "relative_attention": True,
        "position_buckets": 8,
        "max_relative_positions": -1,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
        "position_biased_input": False,
        "pooler_hidden_size": spec.hidden,
        "pooler_hidden_act": "gelu",
    }
    if spec.embedding != spec.hidden:
        fields["embedding_size"] = spec.embedding
    return fields


def deberta_shapes(spec: Any, prefix: str) -> Iterator[Shape]:
    """Name, shape and kind of every tensor, head included."""
    config = {**deberta_config(spec), **spec.config}
    hidden, table = spec.hidden, spec.embedding
    embeddings, encoder = f"{prefix}embeddings", f"{prefix}encoder"
    yield f"{embeddings}.word_embeddings.weight", (spec.vocab, table), "table"
    if config["position_biased_input"]:
        yield f"{embeddings}.position_embeddings.weight", (spec.positions, table), "table"
    if spec.type_vocab:
        yield f"{embeddings}.token_type_embeddings.weight", (spec.type_vocab, table), "table"
    if table != hidden:
        yield f"{embeddings}.embed_proj.weight", (hidden, table), "weight"
    yield from _norm(f"{embeddings}.LayerNorm", hidden)
    words = config["pos_att_type"]
    sides = words.split("|") if isinstance(words, str) else words
    if config["relative_attention"]:
        buckets = config["position_buckets"]
        span = buckets if buckets > 0 else config["max_relative_positions"]
        yield f"{encoder}.rel_embeddings.weight", (2 * span, hidden), "table"
    if config["norm_rel_ebd"] == "layer_norm":
        yield from _norm(f"{encoder}.LayerNorm", hidden)
    for layer in range(spec.layers):
        at = f"{encoder}.layer.{layer}"
        own = f"{at}.attention.self"
        yield from _linear(f"{own}.query_proj", hidden, hidden, "peaked")
        yield from _linear(f"{own}.key_proj", hidden, hidden, "peaked")
        yield from _linear(f"{own}.value_proj", hidden, hidden)
        if config["relative_attention"] and not config["share_att_key"]:
            if "c2p" in sides:
                yield from _linear(f"{own}.pos_key_proj", hidden, hidden, "peaked")
            if "p2c" in sides:
                yield from _linear(f"{own}.pos_query_proj", hidden, hidden, "peaked")
        yield from _linear(f"{at}.attention.output.dense", hidden, hidden)
        yield from _norm(f"{at}.attention.output.LayerNorm", hidden)
        yield from _linear(f"{at}.intermediate.dense", spec.inner, hidden)
        yield from _linear(f"{at}.output.dense", hidden, spec.inner)
        yield from _norm(f"{at}.output.LayerNorm", hidden)
    if width := config.get("conv_kernel_size", 0):
        yield f"{encoder}.conv.conv.weight", (hidden, hidden, width), "weight"
        yield f"{encoder}.conv.conv.bias", (hidden,), "bias"
        yield from _norm(f"{encoder}.conv.LayerNorm", hidden)
    yield from _head(spec, config)


def _head(spec: Any, config: Mapping[str, Any]) -> Iterator[Shape]:
    hidden, head = spec.hidden, spec.head
    if head == "classify":
        yield from _linear("pooler.dense", hidden, hidden)
    if head in ("classify", "tag"):
        yield from _linear("classifier", spec.labels, hidden)
    elif head == "answer":
        yield from _linear("qa_outputs", 2, hidden)
    elif head in ("fill_mask", "embed_sparse") and config.get("legacy", True):
        yield from _linear("cls.predictions.transform.dense", spec.embedding, hidden)
        yield from _norm("cls.predictions.transform.LayerNorm", spec.embedding)
        if not spec.tied:
            yield from _linear("cls.predictions.decoder", spec.vocab, spec.embedding)
        yield "cls.predictions.bias", (spec.vocab,), "bias"
    elif head in ("fill_mask", "embed_sparse"):
        yield from _linear("lm_predictions.lm_head.dense", hidden, hidden)
        yield from _norm("lm_predictions.lm_head.LayerNorm", hidden)
        yield "lm_predictions.lm_head.bias", (spec.vocab,), "bias"


def _linear(name: str, size: int, inner: int, kind: str = "weight") -> Iterator[Shape]:
    yield f"{name}.weight", (size, inner), kind
    yield f"{name}.bias", (size,), "bias"


def _norm(name: str, size: int) -> Iterator[Shape]:
    yield f"{name}.weight", (size,), "gamma"
    yield f"{name}.bias", (size,), "beta"


_SMALL: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 2, "seed": 24}
_OWN = {
    "share_att_key": False,
    "pos_att_type": ["c2p", "p2c"],
    "position_buckets": -1,
    "max_relative_positions": 16,
    "norm_rel_ebd": "none",
    "position_biased_input": True,
}
_CONVOLVED = {"conv_kernel_size": 3, "conv_act": "gelu"}

DEBERTA_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    # Projections of positions, distances that are cut at 16, absolute positions and token types beside them.
    "own-keys": ("features", {**_SMALL, "type_vocab": 2, "config": _OWN}),
    "own-c2p": ("features", {**_SMALL, "config": {**_OWN, "pos_att_type": ["c2p"]}}),
    "p2c": ("features", {**_SMALL, "config": {"pos_att_type": "p2c"}}),
    "uncut": ("features", {**_SMALL, "config": {"position_buckets": -1, "max_relative_positions": 48}}),
    "not-relative": (
        "features",
        {**_SMALL, "config": {**_OWN, "relative_attention": False, "pos_att_type": "c2p"}},
    ),
    "conv": ("features", {**_SMALL, "config": _CONVOLVED}),
    "conv-tag": ("tag", {"layers": 1, "seed": 25, "config": {"conv_kernel_size": 7}}),
    "narrow-tables": (
        "features",
        {**_SMALL, "embedding": 24, "type_vocab": 2, "config": {"position_biased_input": True}},
    ),
    "narrow-tables-fill_mask": ("fill_mask", {**_SMALL, "embedding": 24, "vocab": 100}),
    "untied": ("fill_mask", {**_SMALL, "tied": False, "vocab": 100}),
    "new-head": ("fill_mask", {**_SMALL, "vocab": 100, "config": {"legacy": False}}),
    "embed_sparse": ("embed_sparse", {**_SMALL, "splade": "relu"}),
    "embed": ("embed", {**_SMALL, "pooling": ("mean",), "normalize": True}),
    "tanh": ("classify", {**_SMALL, "labels": 1, "config": {"pooler_hidden_act": "tanh"}}),
    # Nothing is a multiple of a vector's width; then tasks of two heads, and heads that fill no panel.
    "odd": ("features", {**_SMALL, "hidden": 30, "inner": 50, "vocab": 131, "config": _CONVOLVED}),
    "two-tasks": ("classify", {"layers": 1, "hidden": 128, "heads": 4, "seed": 26}),
    "wide": ("tag", {"layers": 1, "hidden": 320, "heads": 5, "inner": 100, "seed": 27}),
}
"""Name of a case, without the architecture's → its head, and the options of ``make_checkpoint``."""
