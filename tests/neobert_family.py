"""NeoBERT for the tests: config, names and shapes of tensors, cases, and a second implementation.

``layout``: ``transformers`` has the gate and what it is multiplied with in one tensor, as the hub; ``apart`` in two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from family import Array, Family, FeedForward, Shapes
from numpy_encoders import NamedWeights, attention, silu

__all__ = ["FAMILY"]

_FIELDS = ("architectures", "model_type", "vocab_size", "pad_token_id", "hidden_size", "num_hidden_layers")


def _inner(spec: Any) -> int:
    """Two thirds of ``intermediate_size``, and of that the next multiple of eight."""
    return 8 * math.ceil((2 * spec.inner // 3) / 8)


def _config(spec: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    made = {name: config[name] for name in (*_FIELDS, "num_attention_heads", "intermediate_size")}
    made |= {"norm_eps": 1e-5, "max_length": spec.positions, "dim_head": spec.hidden // spec.heads}
    names = {"AutoConfig": "NeoBERTConfig", "AutoModel": "NeoBERT", "AutoModelForMaskedLM": "NeoBERTLMHead"}
    made["auto_map"] = {kind: f"model.{name}" for kind, name in names.items()}
    return made


def _shapes(spec: Any) -> Shapes:
    hidden, inner, bare = spec.hidden, _inner(spec), spec.head in ("features", "embed")
    prefix = "" if bare else "model."
    yield f"{prefix}encoder.weight", (spec.vocab, hidden), "table"
    for layer in range(spec.layers):
        at = f"{prefix}transformer_encoder.{layer}"
        yield f"{at}.attention_norm.weight", (hidden,), "gamma"
        yield f"{at}.qkv.weight", (3 * hidden, hidden), "weight"
        yield f"{at}.wo.weight", (hidden, hidden), "weight"
        yield f"{at}.ffn_norm.weight", (hidden,), "gamma"
        if spec.layout == "apart":
            yield f"{at}.ffn.w1.weight", (inner, hidden), "weight"
            yield f"{at}.ffn.w2.weight", (inner, hidden), "weight"
        else:
            yield f"{at}.ffn.w12.weight", (2 * inner, hidden), "weight"
        yield f"{at}.ffn.w3.weight", (hidden, inner), "weight"
    yield f"{prefix}layer_norm.weight", (hidden,), "gamma"
    heads = {"classify": ("dense", "classifier"), "tag": ("classifier",), "answer": ("qa_outputs",)}
    rows = {"dense": hidden, "classifier": spec.labels, "qa_outputs": 2, "decoder": spec.vocab}
    for path in () if bare else heads.get(spec.head, ("decoder",)):
        yield f"{path}.weight", (rows[path], hidden), "weight"
        yield f"{path}.bias", (rows[path],), "bias"


def _feed_forward(spec: Any) -> FeedForward:
    if spec.layout == "apart":
        return FeedForward("ffn_norm", ("ffn.w1", "ffn.w2"), "ffn.w2", 0, "ffn.w3")
    return FeedForward("ffn_norm", ("ffn.w12",), "ffn.w12", _inner(spec), "ffn.w3")


def _order(name: str, rows: int, heads: int) -> Array | None:
    """Queries of all heads, then keys, then values; of the first two the real parts of a head, then the imaginary."""
    if not name.endswith("qkv.weight"):
        return None
    size, made = rows // (3 * heads), []
    for part in range(3):
        for head in range(heads):
            own = range((3 * head + part) * size, (3 * head + part + 1) * size)
            made += own if part == 2 else [*own[0::2], *own[1::2]]
    return np.array(made)


def _turned(x: Array, theta: float) -> Array:
    """``x: [tokens, size]`` of a head: columns 2i and 2i + 1 are the parts of a number that is turned."""
    numbers = x[:, 0::2] + 1j * x[:, 1::2]
    speeds = [theta ** (-2.0 * pair / x.shape[1]) for pair in range(x.shape[1] // 2)]
    numbers = numbers * np.exp(1j * np.outer(np.arange(len(x)), speeds)).astype(numbers.dtype)
    made = np.empty_like(x)
    made[:, 0::2], made[:, 1::2] = numbers.real, numbers.imag
    return made


def _answers(
    tensors: Mapping[str, Array],
    config: Mapping[str, Any],
    head: str,
    ids: Sequence[int],
    types: Sequence[int] | None = None,
    dtype: Any = np.float64,
) -> tuple[Array, list[Array]]:
    """Of one text, as ``numpy_encoders.jina``; the keys of every layer with the rows of ``_order``."""
    w = NamedWeights(tensors, "model." if any(name.startswith("model.") for name in tensors) else "", dtype)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    size, keys = hidden // heads, []

    def norm(x: Array, path: str) -> Array:
        rows = [row / math.sqrt(np.mean(row * row) + config["norm_eps"]) for row in x]
        return np.stack(rows).astype(dtype) * w[f"{path}.weight"]

    x = w["encoder.weight"][list(ids)]
    for layer in range(config["num_hidden_layers"]):
        at = f"transformer_encoder.{layer}"
        columns = w.linear(norm(x, f"{at}.attention_norm"), f"{at}.qkv")
        blocks = [columns[:, begin : begin + size] for begin in range(0, 3 * hidden, size)]
        queries, keys_, values = (blocks[part::3] for part in range(3))
        keys.append(np.concatenate([np.concatenate([key[:, 0::2], key[:, 1::2]], axis=1) for key in keys_], axis=1))
        q, k = (np.concatenate([_turned(one, 10000.0) for one in part], axis=1) for part in (queries, keys_))
        x = x + w.linear(attention(q, k, np.concatenate(values, axis=1), heads), f"{at}.wo")
        read = norm(x, f"{at}.ffn_norm")
        if f"{w.prefix}{at}.ffn.w12.weight" in w.tensors:
            gate, up = np.split(w.linear(read, f"{at}.ffn.w12"), 2, axis=1)
        else:
            gate, up = w.linear(read, f"{at}.ffn.w1"), w.linear(read, f"{at}.ffn.w2")
        x = x + w.linear(silu(gate) * up, f"{at}.ffn.w3")
    x = norm(x, "layer_norm")
    top = NamedWeights(tensors, "", dtype)
    if head == "classify":
        return top.linear(np.tanh(top.linear(x[:1], "dense")), "classifier"), keys
    last = {"tag": "classifier", "answer": "qa_outputs", "fill_mask": "decoder", "embed_sparse": "decoder"}.get(head)
    return top.linear(x, last) if last else x, keys


_USUAL: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 50, "labels": 2}
_SMALL = {**_USUAL, "seed": 20}

FAMILY = Family(
    arch="neobert",
    stem="NeoBERT",
    seed=51,
    config=_config,
    shapes=_shapes,
    inner=_inner,
    feed_forward=_feed_forward,
    products=4,
    usual=_USUAL,
    cases=(
        # The two halves of the feed-forward in two tensors.
        ("neobert-apart", "tag", {**_SMALL, "layers": 1, "layout": "apart"}),
        # Nothing is a multiple of a vector's width, but for the inner columns, which are a multiple of 8 always.
        ("neobert-odd", "tag", {**_SMALL, "hidden": 42, "heads": 3, "inner": 37}),
        # Five heads of 64 columns, of which one fills no panel alone.
        ("neobert-wide", "tag", {**_SMALL, "layers": 1, "hidden": 320, "heads": 5, "inner": 100}),
        ("neobert-embed", "embed", {**_SMALL, "pooling": ("mean",), "normalize": True}),
        ("neobert-embed_sparse", "embed_sparse", {**_SMALL, "layers": 1}),
    ),
    class_names={
        "features": "NeoBERT",
        "embed": "NeoBERT",
        "embed_sparse": "NeoBERTLMHead",
        "fill_mask": "NeoBERTLMHead",
    },
    order=_order,
    answers=_answers,
)
