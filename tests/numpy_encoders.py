"""Encoders that transformers does not have, once more: a page of NumPy, one sequence at a time, in float64.

Written from the models' own published code, for tests to compare with; it shares nothing with encast. Rotary positions
are products of complex numbers here, distances are counted one by one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["nomic_own"]

Array = np.ndarray[Any, Any]
Tensors = Mapping[str, Array]

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _gelu(x: Array) -> Array:
    return x * 0.5 * (1.0 + _erf(x / math.sqrt(2.0)).astype(x.dtype))


def _silu(x: Array) -> Array:
    return x / (1.0 + np.exp(-x))


class _Weights:
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


def _attention(q: Array, k: Array, v: Array, heads: int, added: Array | None = None) -> Array:
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


def _turned(x: Array, heads: int, base: float) -> Array:
    """Columns i and size/2 + i of a head are the real and the imaginary part of a number that is turned."""
    size = x.shape[1] // heads
    parts = x.reshape(len(x), heads, 2, size // 2)
    numbers = parts[:, :, 0] + 1j * parts[:, :, 1]
    speeds = np.array([base ** (-2.0 * pair / size) for pair in range(size // 2)])
    numbers = numbers * np.exp(1j * np.arange(len(x))[:, None, None] * speeds)
    return np.stack([numbers.real, numbers.imag], axis=2).reshape(x.shape)


def nomic_own(
    tensors: Tensors, config: Mapping[str, Any], ids: Sequence[int], types: Sequence[int] | None = None
) -> Array:
    """The last hidden states of NomicBERT as its own code (``modeling_hf_nomic_bert.py``) computes them."""
    w = _Weights(tensors, "bert." if any(name.startswith("bert.") for name in tensors) else "")
    eps, heads = config["layer_norm_epsilon"], config["n_head"]
    x = w["embeddings.word_embeddings.weight"][list(ids)]
    if config["type_vocab_size"]:
        x = x + w["embeddings.token_type_embeddings.weight"][list(types or [0] * len(ids))]
    x = w.norm(x, "emb_ln", eps)
    for layer in range(config["n_layer"]):
        at = f"encoder.layers.{layer}"
        q, k, v = np.split(w.linear(x, f"{at}.attn.Wqkv"), 3, axis=1)
        q, k = (_turned(part, heads, config["rotary_emb_base"]) for part in (q, k))
        x = w.norm(x + w.linear(_attention(q, k, v, heads), f"{at}.attn.out_proj"), f"{at}.norm1", eps)
        if config["activation_function"] == "gelu":
            inner = _gelu(w.linear(x, f"{at}.mlp.fc1"))
        else:
            activation = _silu if config["activation_function"] == "swiglu" else _gelu
            inner = w.linear(x, f"{at}.mlp.fc11") * activation(w.linear(x, f"{at}.mlp.fc12"))
        x = w.norm(x + w.linear(inner, f"{at}.mlp.fc2"), f"{at}.norm2", eps)
    return x
