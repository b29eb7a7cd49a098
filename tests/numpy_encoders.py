"""Encoders that transformers does not have (any more), once more: a page of NumPy, one sequence at a time, in float64.

Written from what is published of the models' own code, for tests to compare with; it shares nothing with encast. Rotary
positions are products of complex numbers here, distances are counted one by one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["NamedWeights", "attention", "gelu", "jina", "nomic_own", "relative", "silu", "turned"]

Array = np.ndarray[Any, Any]
Tensors = Mapping[str, Array]

_erf = np.vectorize(math.erf, otypes=[np.float64])


def gelu(x: Array) -> Array:
    return x * 0.5 * (1.0 + _erf(x / math.sqrt(2.0)).astype(x.dtype))


def silu(x: Array) -> Array:
    return x / (1.0 + np.exp(-x))


class NamedWeights:
    """Tensors below a prefix, in one dtype."""

    def __init__(self, tensors: Tensors, prefix: str, dtype: Any = np.float64) -> None:
        self.tensors = {name: array.astype(dtype) for name, array in tensors.items()}
        self.prefix, self.dtype = prefix, dtype

    def __getitem__(self, name: str) -> Array:
        return self.tensors[self.prefix + name]

    def linear(self, x: Array, path: str) -> Array:
        bias = self.tensors.get(f"{self.prefix}{path}.bias")
        made = np.einsum("ti,oi->to", x, self[f"{path}.weight"])
        return made if bias is None else made + bias

    def norm(self, x: Array, path: str, eps: float) -> Array:
        rows = [(row - row.mean()) / math.sqrt(row.var() + eps) for row in x]
        return np.stack(rows) * self[f"{path}.weight"] + self[f"{path}.bias"]


def attention(q: Array, k: Array, v: Array, heads: int, added: Array | None = None) -> Array:
    """``added``: ``[heads, tokens, tokens]``, to the scaled scores."""
    size = q.shape[1] // heads
    made = []
    for head in range(heads):
        columns = slice(head * size, (head + 1) * size)
        scores = q[:, columns] @ k[:, columns].T / math.sqrt(size)
        if added is not None:
            scores = scores + added[head]
        powers = np.exp(scores - scores.max(axis=1)[:, None])
        made.append(powers / powers.sum(axis=1)[:, None] @ v[:, columns])
    return np.concatenate(made, axis=1)


def turned(x: Array, heads: int, base: float) -> Array:
    """Columns i and size/2 + i of a head are the real and the imaginary part of a number that is turned."""
    size = x.shape[1] // heads
    parts = x.reshape(len(x), heads, 2, size // 2)
    numbers = parts[:, :, 0] + 1j * parts[:, :, 1]
    speeds = np.array([base ** (-2.0 * pair / size) for pair in range(size // 2)])
    numbers = numbers * np.exp(1j * np.arange(len(x))[:, None, None] * speeds).astype(numbers.dtype)
    return np.stack([numbers.real, numbers.imag], axis=2).reshape(x.shape)


def nomic_own(
    tensors: Tensors, config: Mapping[str, Any], ids: Sequence[int], types: Sequence[int] | None = None
) -> Array:
    """The last hidden states of NomicBERT as its own code (``modeling_hf_nomic_bert.py``) computes them."""
    w = NamedWeights(tensors, "bert." if any(name.startswith("bert.") for name in tensors) else "")
    eps, heads = config["layer_norm_epsilon"], config["n_head"]
    x = w["embeddings.word_embeddings.weight"][list(ids)]
    if config["type_vocab_size"]:
        x = x + w["embeddings.token_type_embeddings.weight"][list(types or [0] * len(ids))]
    x = w.norm(x, "emb_ln", eps)
    for layer in range(config["n_layer"]):
        at = f"encoder.layers.{layer}"
        q, k, v = np.split(w.linear(x, f"{at}.attn.Wqkv"), 3, axis=1)
        q, k = (turned(part, heads, config["rotary_emb_base"]) for part in (q, k))
        x = w.norm(x + w.linear(attention(q, k, v, heads), f"{at}.attn.out_proj"), f"{at}.norm1", eps)
        if config["activation_function"] == "gelu":
            inner = gelu(w.linear(x, f"{at}.mlp.fc1"))
        else:
            activation = silu if config["activation_function"] == "swiglu" else gelu
            inner = w.linear(x, f"{at}.mlp.fc11") * activation(w.linear(x, f"{at}.mlp.fc12"))
        x = w.norm(x + w.linear(inner, f"{at}.mlp.fc2"), f"{at}.norm2", eps)
    return x


def jina(
    tensors: Tensors,
    config: Mapping[str, Any],
    head: str,
    ids: Sequence[int],
    types: Sequence[int] | None = None,
    dtype: Any = np.float64,
) -> tuple[Array, list[Array]]:
    """What JinaBERT's own code (``jina-bert-implementation``) answers, and the keys of every layer.

    ``head``: ``features``, ``classify`` (a row), ``tag``, ``answer`` or ``fill_mask`` (of all tokens).
    """
    w = NamedWeights(tensors, "bert." if any(name.startswith("bert.") for name in tensors) else "", dtype)
    eps, heads = config["layer_norm_eps"], config["num_attention_heads"]
    x = w["embeddings.word_embeddings.weight"][list(ids)]
    x = x + w["embeddings.token_type_embeddings.weight"][list(types or [0] * len(ids))]
    x = w.norm(x, "embeddings.LayerNorm", eps)
    distances = np.array([[abs(key - query) for key in range(len(ids))] for query in range(len(ids))])
    # The slopes are float32, whatever the model is.
    costs = np.array([-np.float64(np.float32(slope)) * distances for slope in _alibi_slopes(heads)]).astype(dtype)
    keys = []
    for layer in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{layer}"
        q, k, v = (w.linear(x, f"{at}.attention.self.{part}") for part in ("query", "key", "value"))
        keys.append(k)
        mixed = w.linear(attention(q, k, v, heads, costs), f"{at}.attention.output.dense")
        x = w.norm(x + mixed, f"{at}.attention.output.LayerNorm", eps)
        gate, up = np.split(w.linear(x, f"{at}.mlp.gated_layers"), 2, axis=1)
        gate = np.maximum(gate, 0) if config["feed_forward_type"] == "reglu" else gelu(gate)
        x = w.norm(x + w.linear(gate * up, f"{at}.mlp.wo"), f"{at}.mlp.layernorm", eps)
    return _bert_head(w, config, head, x, eps), keys


def relative(
    tensors: Tensors,
    config: Mapping[str, Any],
    head: str,
    ids: Sequence[int],
    types: Sequence[int] | None = None,
    dtype: Any = np.float64,
) -> tuple[Array, list[Array]]:
    """BERT, RoBERTa, ELECTRA and ALBERT with vectors of distances; what ``jina`` returns.

    By the formulas of Shaw et al. 2018 (section 3.2, keys alone: relative_key) and Huang et al. 2020 (method 4:
    relative_key_query). Tokens know no place of their own. ALBERT adds to scores that are divided already.
    """
    prefixes = ("bert.", "roberta.", "electra.", "albert.")
    w = NamedWeights(
        tensors, next((one for one in prefixes if any(name.startswith(one) for name in tensors)), ""), dtype
    )
    eps, heads, albert = config["layer_norm_eps"], config["num_attention_heads"], config["model_type"] == "albert"
    x = w["embeddings.word_embeddings.weight"][list(ids)]
    x = x + w["embeddings.token_type_embeddings.weight"][list(types or [0] * len(ids))]
    x = w.norm(x, "embeddings.LayerNorm", eps)
    for path in ("embeddings_project", "encoder.embedding_hidden_mapping_in"):
        if f"{w.prefix}{path}.weight" in w.tensors:
            x = w.linear(x, path)
    keys = []
    for layer in range(config["num_hidden_layers"]):
        if albert:
            group = layer * config["num_hidden_groups"] // config["num_hidden_layers"]
            at = f"encoder.albert_layer_groups.{group}.albert_layers.0"
            own, parts = f"{at}.attention", ("attention.dense", "attention.LayerNorm", "ffn", "ffn_output")
            last = "full_layer_layer_norm"
        else:
            at = f"encoder.layer.{layer}"
            own, last = f"{at}.attention.self", "output.LayerNorm"
            parts = ("attention.output.dense", "attention.output.LayerNorm", "intermediate.dense", "output.dense")
        q, k, v = (w.linear(x, f"{own}.{part}") for part in ("query", "key", "value"))
        keys.append(k)
        added = _distance_scores(q, k, w[f"{own}.distance_embedding.weight"], heads, config, albert)
        mixed, norm, up, down = (f"{at}.{part}" for part in parts)
        x = w.norm(x + w.linear(attention(q, k, v, heads, added), mixed), norm, eps)
        x = w.norm(x + w.linear(gelu(w.linear(x, up)), down), f"{at}.{last}", eps)
    return _bert_head(w, config, head, x, eps), keys


def _distance_scores(q: Array, k: Array, table: Array, heads: int, config: Mapping[str, Any], divided: bool) -> Array:
    """Pair by pair; ``divided``: the scores, to which they are added, are, and these stay as they are."""
    size, length = q.shape[1] // heads, len(q)
    made = np.zeros((heads, length, length), q.dtype)
    for head in range(heads):
        columns = slice(head * size, (head + 1) * size)
        for i in range(length):
            for j in range(length):
                vector = table[i - j + config["max_position_embeddings"] - 1]
                made[head, i, j] = q[i, columns] @ vector
                if config["position_embedding_type"] == "relative_key_query":
                    made[head, i, j] += k[j, columns] @ vector
    return made if divided else made / math.sqrt(size)


def _bert_head(w: NamedWeights, config: Mapping[str, Any], head: str, x: Array, eps: float) -> Array:
    words, w = w, NamedWeights(w.tensors, "", w.dtype)
    if head == "classify":
        return w.linear(np.tanh(words.linear(x[:1], "pooler.dense")), "classifier")
    if head in ("tag", "answer"):
        return w.linear(x, "classifier" if head == "tag" else "qa_outputs")
    if head not in ("fill_mask", "embed_sparse"):
        return x
    at = "cls.predictions"
    x = w.linear(x, f"{at}.transform.dense")
    x = np.maximum(x, 0) if config["hidden_act"] == "relu" else gelu(x)
    x = w.norm(x, f"{at}.transform.LayerNorm", eps)
    decoder = w.tensors.get(f"{at}.decoder.weight", words["embeddings.word_embeddings.weight"])
    return np.einsum("ti,oi->to", x, decoder) + w[f"{at}.bias"]


def _alibi_slopes(heads: int) -> list[float]:
    """As the code of "Train Short, Test Long" (Press et al. 2022) has it."""
    power = math.floor(math.log2(heads))
    start = 2.0 ** (-(2.0 ** -(power - 3)))
    slopes = [start * start**index for index in range(2**power)]
    if 2**power == heads:
        return slopes
    return slopes + _alibi_slopes(2 ** (power + 1))[0::2][: heads - 2**power]
