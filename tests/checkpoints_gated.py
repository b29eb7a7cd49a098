"""Configs, tensors and cases of the encoders with gated feed-forwards, for ``checkpoints.make_checkpoint``.

An architecture that its own code and transformers spell differently has layouts: ``transformers``, names and config as
its modules have them; ``own``, both as the model's own code; ``saved``, the config of transformers with the tensors'
names of the other, which is what its ``save_pretrained`` writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from families import FAMILIES

__all__ = [
    "GATED", "NOT_IN_TRANSFORMERS", "TOKENIZERS", "gated_cases", "gated_config", "gated_shapes", "gated_stem",
    "inject_gated_outliers",
]  # fmt: skip

GATED = {
    "modernbert": 8, "nomic_bert": 43, "gte": 45, "new": 48, "jina_bert": 46,
    **{name: family.seed for name, family in FAMILIES.items()},
}  # fmt: skip
"""The architectures, and the seeds of their usual cases."""
NOT_IN_TRANSFORMERS = ("new", "jina_bert", *(name for name, family in FAMILIES.items() if family.answers is not None))
"""Model types that it opens only with code of the hub."""
TOKENIZERS = {
    "nomic_bert": "Bert", "gte": "Bert", "new": "Bert", "jina_bert": "Bert",
    **{name: family.tokenizer for name, family in FAMILIES.items()},
}  # fmt: skip
"""Whose tokenizer an architecture comes with, where that has not its own name."""
_OUTLIER = 16.0
_BARE = ("features", "embed")
_MASKED = ("fill_mask", "embed_sparse")

Shapes = Iterator[tuple[str, tuple[int, ...], str]]


# Config


def gated_stem(spec: Any) -> str:
    """The class name's beginning."""
    stems = {"modernbert": "ModernBert", "nomic_bert": "NomicBert", "gte": "Gte", "new": "New", "jina_bert": "JinaBert"}
    return {**stems, **{name: family.stem for name, family in FAMILIES.items()}}[spec.arch]


def gated_config(spec: Any, config: dict[str, Any]) -> dict[str, Any]:
    """``config``, in BERT's words, as the architecture has it in the layout of ``spec``."""
    config = dict(config)
    if spec.arch in FAMILIES:
        return FAMILIES[spec.arch].config(spec, config)
    if spec.arch == "modernbert":
        # Global, local, local: a window that hides most of a text of 40 tokens.
        config.update(norm_eps=1e-5, hidden_activation=config.pop("hidden_act"), local_attention=7)
        config.update(classifier_activation=spec.activation, global_rope_theta=1000.0, local_rope_theta=100.0)
        del config["layer_norm_eps"]
        return config
    config["type_vocab_size"] = spec.type_vocab
    if spec.arch == "new":
        config.update(rope_theta=20.0, rope_scaling={"type": "ntk", "factor": 8.0}, position_embedding_type="rope")
        config.update(
            layer_norm_type="layer_norm", logn_attention_scale=False, logn_attention_clip1=False, pack_qkv=True
        )
        config["auto_map"] = {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"}
    elif spec.arch == "jina_bert":
        config.update(model_type="bert", position_embedding_type="alibi", feed_forward_type="geglu", emb_pooler="mean")
        code = "jinaai/jina-bert-implementation--modeling_bert."
        config["auto_map"] = {"AutoModel": f"{code}JinaBertModel", "AutoModelForMaskedLM": f"{code}JinaBertForMaskedLM"}
    elif spec.layout != "own":
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 100.0}
    elif spec.arch == "nomic_bert":
        words = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
        words |= {"intermediate_size": "n_inner", "max_position_embeddings": "n_positions"}
        words["layer_norm_eps"] = "layer_norm_epsilon"
        config = {words.get(name, name): value for name, value in config.items()}
        config["activation_function"] = {"silu": "swiglu", "gelu": "geglu"}[config.pop("hidden_act")]
        config.update(qkv_proj_bias=False, mlp_fc1_bias=False, mlp_fc2_bias=False, prenorm=False, causal=False)
        config.update(rotary_emb_base=100, rotary_emb_fraction=1.0, rotary_emb_interleaved=False)
        config.update(rotary_emb_scale_base=None, rotary_scaling_factor=None, pad_vocab_size_multiple=64)
        code = "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert."
        config["auto_map"] = {
            "AutoModel": f"{code}NomicBertModel",
            "AutoModelForMaskedLM": f"{code}NomicBertForPreTraining",
        }
    return config


def _vocab_rows(spec: Any) -> int:
    """Rows of the word table: NomicBERT's own code rounds them up to a multiple of 64."""
    return -(-spec.vocab // 64) * 64 if (spec.arch, spec.layout) == ("nomic_bert", "own") else int(spec.vocab)


# Tensors


def _linear(name: str, size: int, inner: int, bias: bool, kind: str = "weight") -> Shapes:
    yield f"{name}.weight", (size, inner), kind
    if bias:
        yield f"{name}.bias", (size,), "bias"


def _norm(name: str, size: int, bias: bool = True) -> Shapes:
    yield f"{name}.weight", (size,), "gamma"
    if bias:
        yield f"{name}.bias", (size,), "beta"


def _prefix(spec: Any) -> str:
    if spec.head in _BARE:
        return ""
    if spec.arch == "jina_bert" or (spec.arch, spec.layout) == ("nomic_bert", "own"):
        return "bert."
    return f"{spec.arch}."


def gated_shapes(spec: Any) -> Shapes:
    """Name, shape and kind of every tensor; a kind says how it is filled."""
    if spec.arch == "modernbert":
        yield from _modern_shapes(spec, "" if spec.head in _BARE else "model.")
        return
    if spec.arch in FAMILIES:
        yield from FAMILIES[spec.arch].shapes(spec)
        return
    own, prefix, vocab = _has_own_names(spec), _prefix(spec), _vocab_rows(spec)
    yield f"{prefix}embeddings.word_embeddings.weight", (vocab, spec.hidden), "table"
    if spec.type_vocab:
        yield f"{prefix}embeddings.token_type_embeddings.weight", (spec.type_vocab, spec.hidden), "table"
    yield from _norm(
        f"{prefix}{'emb_ln' if own and spec.arch == 'nomic_bert' else 'embeddings.LayerNorm'}", spec.hidden
    )
    for layer in range(spec.layers):
        if own:
            place, shapes = _OWN_LAYERS[spec.arch]
            yield from shapes(spec, f"{prefix}{place}.{layer}.")
        else:
            yield from _transformers_layer(spec, f"{prefix}layers.{layer}.")
    yield from _head_shapes(spec, prefix, vocab)


def _has_own_names(spec: Any) -> bool:
    return spec.layout != "transformers" or spec.arch in ("new", "jina_bert")


def _inner_columns(spec: Any) -> int:
    """Columns of the feed-forward: NomicBERT's own code rounds a gated one up to a multiple of 256."""
    own = (spec.arch, spec.layout) == ("nomic_bert", "own")
    return -(-spec.inner // 256) * 256 if own and spec.config.get("activation_function") != "gelu" else int(spec.inner)


def _nomic_layer(spec: Any, at: str) -> Shapes:
    hidden, inner, config = spec.hidden, _inner_columns(spec), spec.config
    attention, first = config.get("qkv_proj_bias", False), config.get("mlp_fc1_bias", False)
    yield from _linear(f"{at}attn.Wqkv", 3 * hidden, hidden, attention, "peaked_qk")
    yield from _linear(f"{at}attn.out_proj", hidden, hidden, attention)
    yield from _norm(f"{at}norm1", hidden)
    if config.get("activation_function") == "gelu":
        yield from _linear(f"{at}mlp.fc1", inner, hidden, first)
    else:
        yield from _linear(f"{at}mlp.fc11", inner, hidden, first)
        yield from _linear(f"{at}mlp.fc12", inner, hidden, first)
    yield from _linear(f"{at}mlp.fc2", hidden, inner, config.get("mlp_fc2_bias", False))
    yield from _norm(f"{at}norm2", hidden)


def _gte_layer(spec: Any, at: str) -> Shapes:
    hidden = spec.hidden
    if spec.config.get("pack_qkv", True):
        yield from _linear(f"{at}attention.qkv_proj", 3 * hidden, hidden, True, "peaked_qk")
    else:
        for part, kind in (("q", "peaked_qk"), ("k", "peaked_qk"), ("v", "weight")):
            yield from _linear(f"{at}attention.{part}_proj", hidden, hidden, True, kind)
    yield from _linear(f"{at}attention.o_proj", hidden, hidden, True)
    yield from _norm(f"{at}attn_ln", hidden)
    yield from _linear(f"{at}mlp.up_gate_proj", 2 * spec.inner, hidden, False)
    yield from _linear(f"{at}mlp.down_proj", hidden, spec.inner, True)
    yield from _norm(f"{at}mlp_ln", hidden)


def _jina_layer(spec: Any, at: str) -> Shapes:
    hidden = spec.hidden
    for part, kind in (("query", "peaked_qk"), ("key", "peaked_qk"), ("value", "weight")):
        yield from _linear(f"{at}attention.self.{part}", hidden, hidden, True, kind)
    yield from _linear(f"{at}attention.output.dense", hidden, hidden, True)
    yield from _norm(f"{at}attention.output.LayerNorm", hidden)
    yield from _linear(f"{at}mlp.gated_layers", 2 * spec.inner, hidden, False)
    yield from _linear(f"{at}mlp.wo", hidden, spec.inner, True)
    yield from _norm(f"{at}mlp.layernorm", hidden)


_OWN_LAYERS = {
    "nomic_bert": ("encoder.layers", _nomic_layer),
    "gte": ("encoder.layer", _gte_layer),
    "new": ("encoder.layer", _gte_layer),
    "jina_bert": ("encoder.layer", _jina_layer),
}


def _transformers_layer(spec: Any, at: str) -> Shapes:
    hidden, biases = spec.hidden, spec.arch != "nomic_bert"
    for part, kind in (("q", "peaked_qk"), ("k", "peaked_qk"), ("v", "weight"), ("o", "weight")):
        yield from _linear(f"{at}self_attn.{part}_proj", hidden, hidden, biases, kind)
    yield from _norm(f"{at}post_attention_layernorm", hidden)
    yield from _linear(f"{at}mlp.gate_proj", spec.inner, hidden, False)
    yield from _linear(f"{at}mlp.up_proj", spec.inner, hidden, False)
    yield from _linear(f"{at}mlp.down_proj", hidden, spec.inner, biases)
    yield from _norm(f"{at}post_mlp_layernorm", hidden)


def _head_shapes(spec: Any, prefix: str, vocab: int) -> Shapes:
    hidden, head = spec.hidden, spec.head
    if head == "classify":
        yield from _linear(f"{prefix}pooler.dense", hidden, hidden, True)
    if head in ("classify", "tag"):
        yield from _linear("classifier", spec.labels, hidden, True)
    elif head == "answer":
        yield from _linear("qa_outputs", 2, hidden, True)
    elif head in _MASKED and spec.arch in ("gte", "new"):
        yield from _linear("lm_head.dense", hidden, hidden, True)
        yield from _norm(f"lm_head.{'norm' if _has_own_names(spec) else 'layer_norm'}", hidden)
        if not spec.tied:
            yield "lm_head.decoder.weight", (vocab, hidden), "weight"
        yield "lm_head.decoder.bias", (vocab,), "bias"
    elif head in _MASKED:
        bias = (spec.arch, spec.layout) != ("nomic_bert", "own") or spec.config.get("mlp_fc1_bias", False)
        yield from _linear("cls.predictions.transform.dense", hidden, hidden, bias)
        norm = "LayerNorm" if spec.arch == "jina_bert" else "layer_norm"
        yield from _norm(f"cls.predictions.transform.{norm}", hidden)
        if not spec.tied:
            yield from _linear("cls.predictions.decoder", vocab, hidden, True)  # its bias wins
        if bias:
            yield "cls.predictions.bias", (vocab,), "bias"


def _modern_shapes(spec: Any, prefix: str) -> Shapes:
    """ModernBERT's: queries, keys and values in one tensor, biases where the config asks for them."""
    hidden, config = spec.hidden, spec.config
    norms = bool(config.get("norm_bias"))
    yield f"{prefix}embeddings.tok_embeddings.weight", (spec.vocab, hidden), "table"
    yield from _norm(f"{prefix}embeddings.norm", hidden, norms)
    for layer in range(spec.layers):
        at = f"{prefix}layers.{layer}"
        if layer:
            yield from _norm(f"{at}.attn_norm", hidden, norms)
        yield from _linear(f"{at}.attn.Wqkv", 3 * hidden, hidden, config.get("attention_bias", False), "peaked_qk")
        yield from _linear(f"{at}.attn.Wo", hidden, hidden, config.get("attention_bias", False))
        yield from _norm(f"{at}.mlp_norm", hidden, norms)
        yield from _linear(f"{at}.mlp.Wi", 2 * spec.inner, hidden, config.get("mlp_bias", False))
        yield from _linear(f"{at}.mlp.Wo", hidden, spec.inner, config.get("mlp_bias", False))
    yield from _norm(f"{prefix}final_norm", hidden, norms)
    if spec.head in _BARE:
        return
    yield from _linear("head.dense", hidden, hidden, config.get("classifier_bias", False))
    yield from _norm("head.norm", hidden, norms)
    if spec.head not in _MASKED:
        yield from _linear("classifier", spec.labels, hidden, True)
        return
    if not spec.tied:
        yield "decoder.weight", (spec.vocab, hidden), "weight"
    if config.get("decoder_bias", True):
        yield "decoder.bias", (spec.vocab,), "bias"


def inject_gated_outliers(made: dict[str, np.ndarray[Any, Any]], spec: Any) -> None:
    """Two channels of what the feed-forward of a layer reads, and three inner ones: in all layers, or in the first
    of those whose norms stand behind, where outliers stay in the sum.

    What the gate is multiplied with is scaled up, and the second product down again.
    """
    width = FAMILIES[spec.arch].inner(spec) if spec.arch in FAMILIES else spec.inner
    channels, inner = [3, spec.hidden // 2], [1, width // 3, width - 2]
    layers = list(_feed_forwards(made, spec))
    before = FAMILIES[spec.arch].norms_before if spec.arch in FAMILIES else spec.arch == "modernbert"
    for norm, read, up, offset, down in layers if before else layers[:1]:
        made[f"{norm}.weight"][channels] *= _OUTLIER
        if f"{norm}.bias" in made:
            made[f"{norm}.bias"][channels] *= _OUTLIER
        for name in read:
            made[f"{name}.weight"][:, channels] /= _OUTLIER
        rows = [offset + channel for channel in inner]
        made[f"{up}.weight"][rows] *= 8.0
        if f"{up}.bias" in made:
            made[f"{up}.bias"][rows] *= 8.0
        made[f"{down}.weight"][:, inner] /= 8.0


def _feed_forwards(made: Mapping[str, Any], spec: Any) -> Iterator[tuple[str, list[str], str, int, str]]:
    """Of every feed-forward the norm before, the products that read it, where what the gate multiplies begins, and the
    second product.
    """
    for name in list(made):
        at, _, last = name.rpartition(".")
        path, _, norm = at.rpartition(".")
        if last != "weight":
            continue
        if spec.arch in FAMILIES:
            part = FAMILIES[spec.arch].feed_forward(spec)
            if norm == part.norm:
                read = [f"{path}.{one}" for one in part.read]
                yield at, read, f"{path}.{part.up}", part.offset, f"{path}.{part.down}"
        elif norm == "mlp_norm":
            yield at, [f"{path}.mlp.Wi"], f"{path}.mlp.Wi", spec.inner, f"{path}.mlp.Wo"
        elif norm == "norm1" and f"{path}.mlp.fc1.weight" in made:
            yield at, [f"{path}.mlp.fc1"], f"{path}.mlp.fc1", 0, f"{path}.mlp.fc2"
        elif norm == "norm1":
            yield at, [f"{path}.mlp.fc11", f"{path}.mlp.fc12"], f"{path}.mlp.fc11", 0, f"{path}.mlp.fc2"
        elif norm == "attn_ln":
            up = f"{path}.mlp.up_gate_proj"
            yield at, [up], up, 0, f"{path}.mlp.down_proj"
        elif at.endswith("attention.output.LayerNorm"):
            up = f"{path.removesuffix('.attention.output')}.mlp.gated_layers"
            yield at, [up], up, spec.inner, up.replace("gated_layers", "wo")
        elif norm == "post_attention_layernorm":
            up = f"{path}.mlp.up_proj"
            yield at, [f"{path}.mlp.gate_proj", up], up, 0, f"{path}.mlp.down_proj"


# The cases of the suites


def gated_cases() -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Name, architecture, head and options of the cases besides an architecture's usual ones."""
    for arch, family in FAMILIES.items():
        yield from ((name, arch, head, options) for name, head, options in family.cases)
    small: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 2, "seed": 20}
    wide = {"layers": 1, "hidden": 320, "heads": 5, "inner": 100, "seed": 23}
    yield "nomic_bert-own", "nomic_bert", "features", {**small, "layout": "own"}
    yield "nomic_bert-own-fill_mask", "nomic_bert", "fill_mask", {**small, "layout": "own", "layers": 1}
    yield "nomic_bert-own-classify", "nomic_bert", "classify", {**small, "layout": "own", "layers": 1}
    yield "nomic_bert-saved", "nomic_bert", "features", {**small, "layout": "saved"}
    yield "nomic_bert-geglu", "nomic_bert", "features", {**small, "activation": "gelu"}
    yield "nomic_bert-wide", "nomic_bert", "tag", wide
    odd = {**small, "hidden": 60, "heads": 3, "inner": 99, "vocab": 131}
    yield "nomic_bert-odd", "nomic_bert", "features", odd
    linear = {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0}
    yield "nomic_bert-linear", "nomic_bert", "features", {**small, "config": {"rope_parameters": linear}}
    yield "nomic_bert-untied", "nomic_bert", "fill_mask", {**small, "layers": 1, "tied": False}
    yield "nomic_bert-embed", "nomic_bert", "embed", {**small, "pooling": ("mean",), "normalize": True}
    yield "gte-saved", "gte", "features", {**small, "layout": "saved", "type_vocab": 1}
    yield "gte-saved-fill_mask", "gte", "fill_mask", {**small, "layout": "saved", "layers": 1}
    yield "gte-no-types", "gte", "features", {**small, "type_vocab": 0}
    yield "gte-relu", "gte", "fill_mask", {**small, "layers": 1, "activation": "relu"}
    yield "gte-untied", "gte", "fill_mask", {**small, "layers": 1, "tied": False}
    yield "gte-reranker", "gte", "classify", {**small, "labels": 1, "type_vocab": 1}
    yield "new-parts", "new", "features", {**small, "type_vocab": 1, "config": {"pack_qkv": False}}
    yield "new-wide", "new", "classify", {**wide, "type_vocab": 0}
    yield "new-odd", "new", "features", {**odd, "config": {"rope_scaling": None}}
    yield "new-embed", "new", "embed", {**small, "pooling": ("cls",), "normalize": True}
    yield "jina_bert-reglu", "jina_bert", "features", {**small, "config": {"feed_forward_type": "reglu"}}
    yield "jina_bert-wide", "jina_bert", "tag", wide
    yield "jina_bert-odd", "jina_bert", "features", {**odd, "heads": 12}
    yield "jina_bert-relu", "jina_bert", "fill_mask", {**small, "layers": 1, "activation": "relu"}
    yield "jina_bert-embed", "jina_bert", "embed", {**small, "pooling": ("mean",), "normalize": True}
