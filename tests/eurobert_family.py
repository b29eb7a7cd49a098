"""EuroBERT for the tests: config, names and shapes of tensors, and cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from family import Family, FeedForward, Shapes

__all__ = ["FAMILY"]


def _config(spec: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """``config``, in BERT's words, as transformers has it; two heads share their keys and values if they are even."""
    made = {name: value for name, value in config.items() if name != "layer_norm_eps"}
    made |= {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
    made["num_key_value_heads"] = spec.heads // 2 if spec.heads % 2 == 0 else spec.heads
    return made


def _shapes(spec: Any) -> Shapes:
    """Name, shape and kind of every tensor, head included."""
    config = {**_config(spec, {}), **spec.config}
    hidden, inner, bare = spec.hidden, spec.inner, spec.head in ("features", "embed")
    prefix = "" if bare else "model."
    biases, inner_biases = config.get("attention_bias", False), config.get("mlp_bias", False)
    shared = (config["num_key_value_heads"] or spec.heads) * (hidden // spec.heads)

    def linear(name: str, size: int, columns: int, bias: bool, kind: str = "weight") -> Shapes:
        yield f"{name}.weight", (size, columns), kind
        if bias:
            yield f"{name}.bias", (size,), "bias"

    yield f"{prefix}embed_tokens.weight", (spec.vocab, hidden), "table"
    for layer in range(spec.layers):
        at = f"{prefix}layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,), "gamma"
        yield from linear(f"{at}.self_attn.q_proj", hidden, hidden, biases, "peaked_qk")
        yield from linear(f"{at}.self_attn.k_proj", shared, hidden, biases, "peaked_qk")
        yield from linear(f"{at}.self_attn.v_proj", shared, hidden, biases)
        yield from linear(f"{at}.self_attn.o_proj", hidden, hidden, biases)
        yield f"{at}.post_attention_layernorm.weight", (hidden,), "gamma"
        yield from linear(f"{at}.mlp.gate_proj", inner, hidden, inner_biases)
        yield from linear(f"{at}.mlp.up_proj", inner, hidden, inner_biases)
        yield from linear(f"{at}.mlp.down_proj", hidden, inner, inner_biases)
    yield f"{prefix}norm.weight", (hidden,), "gamma"
    if spec.head == "classify":
        yield from linear("dense", hidden, hidden, True)
    if spec.head in ("classify", "tag"):
        yield from linear("classifier", spec.labels, hidden, True)
    elif spec.head == "answer":
        yield from linear("qa_outputs", 2, hidden, True)
    elif not bare and not spec.tied:
        yield from linear("lm_head", spec.vocab, hidden, inner_biases)
    elif not bare and inner_biases:
        yield "lm_head.bias", (spec.vocab,), "bias"


_USUAL: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 50, "labels": 2, "tied": False}
_SMALL = {**_USUAL, "seed": 20}
_BIASES = {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}
_POOLED = {"layers": 1, "hidden": 16, "heads": 2, "seed": 21}

_CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("eurobert-bos", "classify", {**_POOLED, "config": {"classifier_pooling": "bos"}}),
    ("eurobert-mean", "classify", {**_POOLED, "config": {"classifier_pooling": "mean"}}),
    # Every key is that of all heads; then as many as heads, and nothing is a multiple of a vector's width.
    ("eurobert-biases", "tag", {**_SMALL, "config": _BIASES}),
    (
        "eurobert-odd",
        "tag",
        {**_SMALL, "hidden": 42, "heads": 3, "inner": 37, "config": {"num_key_value_heads": None}},
    ),
    # Heads that fill panels, four to a key.
    ("eurobert-wide", "tag", {**_SMALL, "layers": 1, "hidden": 256, "config": {"num_key_value_heads": 1}}),
)

FAMILY = Family(
    arch="eurobert",
    stem="EuroBert",
    seed=49,
    config=_config,
    shapes=_shapes,
    inner=lambda spec: int(spec.inner),
    feed_forward=lambda spec: FeedForward(
        "post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj"), "mlp.up_proj", 0, "mlp.down_proj"
    ),
    products=7,
    usual=_USUAL,
    cases=_CASES,
)
