"""NeoBERT against a model of torch, padded and masked: transformers has none, so it is written here once more.

From the paper (Le Breton et al. 2025, arXiv 2502.19587) and what is published of the model's own code. It shares
nothing with encast, nor with the NumPy of ``neobert_family``: torch turns complex numbers and attends.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="compares with a model of torch")

from cases import CASES  # noqa: E402
from checkpoints import make_checkpoint  # noqa: E402
from own_torch import check_compiled, check_golden, padded_rows  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

nn, functional = torch.nn, torch.nn.functional
NEO = [name for name, case in CASES.items() if case.arch == "neobert" and "embed" not in case.head]
Array = np.ndarray[Any, Any]


class _Feed(nn.Module):  # type: ignore[misc]
    def __init__(self, hidden: int, inner: int, packed: bool) -> None:
        super().__init__()
        for name in ("w12",) if packed else ("w1", "w2"):
            setattr(self, name, nn.Linear(hidden, 2 * inner if packed else inner, bias=False))
        self.w3 = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Any) -> Any:
        gate, up = self.w12(x).tensor_split(2, dim=-1) if hasattr(self, "w12") else (self.w1(x), self.w2(x))
        return self.w3(functional.silu(gate) * up)


class _Block(nn.Module):  # type: ignore[misc]
    def __init__(self, config: dict[str, Any], inner: int, packed: bool) -> None:
        super().__init__()
        hidden, eps, self.heads = config["hidden_size"], config["norm_eps"], config["num_attention_heads"]
        self.attention_norm, self.ffn_norm = nn.RMSNorm(hidden, eps), nn.RMSNorm(hidden, eps)
        self.qkv, self.wo = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.ffn = _Feed(hidden, inner, packed)

    def forward(self, x: Any, turns: Any, bias: Any) -> Any:
        texts, length, hidden = x.shape
        # One axis of heads, of each its three parts.
        parts = self.qkv(self.attention_norm(x)).unflatten(-1, (self.heads, 3, hidden // self.heads)).movedim(1, 3)
        query, key, value = (parts[:, :, index] for index in range(3))
        query, key = (
            torch.view_as_real(torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)
            for part in (query, key)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        x = x + self.wo(mixed.transpose(1, 2).reshape(texts, length, hidden))
        return x + self.ffn(self.ffn_norm(x))


class _Encoder(nn.Module):  # type: ignore[misc]
    def __init__(self, config: dict[str, Any], inner: int, packed: bool) -> None:
        super().__init__()
        self.config = config
        self.encoder = nn.Embedding(config["vocab_size"], config["hidden_size"])
        layers = range(config["num_hidden_layers"])
        self.transformer_encoder = nn.ModuleList(_Block(config, inner, packed) for _ in layers)
        self.layer_norm = nn.RMSNorm(config["hidden_size"], config["norm_eps"])

    def forward(self, ids: Any, mask: Any) -> Any:
        x = self.encoder(ids)
        size = self.config["hidden_size"] // self.config["num_attention_heads"]
        speeds = 10000.0 ** (-torch.arange(0, size, 2, dtype=x.dtype) / size)
        angles = torch.outer(torch.arange(ids.shape[1], dtype=x.dtype), speeds)
        bias = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, -torch.inf)[:, None, None, :]
        for block in self.transformer_encoder:
            x = block(x, torch.polar(torch.ones_like(angles), angles), bias)
        return self.layer_norm(x)


class _Model(nn.Module):  # type: ignore[misc]
    """With the tensors' names of the hub, so that a checkpoint's must fit strictly."""

    def __init__(self, config: dict[str, Any], head: str, inner: int, packed: bool) -> None:
        super().__init__()
        self.head, hidden = head, config["hidden_size"]
        self.model = _Encoder(config, inner, packed)
        labels = len(config.get("id2label", ()))
        rows = {
            "classify": {"dense": hidden, "classifier": labels}, "tag": {"classifier": labels},
            "answer": {"qa_outputs": labels}, "fill_mask": {"decoder": config["vocab_size"]},
        }.get(head, {})  # fmt: skip
        self.last = next(reversed(rows), "")
        for name, count in rows.items():
            setattr(self, name, nn.Linear(hidden, count))

    def forward(self, ids: Any, mask: Any) -> Any:
        x = self.model(ids, mask)
        if self.head == "classify":
            x = torch.tanh(self.dense(x[:, 0]))
        return getattr(self, self.last)(x) if self.last else x


def _answers(folder: Path, head: str, texts: list[list[int]], dtype: Any) -> Array:
    """Of all texts in one padded batch, their rows one after another."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    if head == "features":
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    inner = next(tensor.shape[1] for name, tensor in tensors.items() if name.endswith("ffn.w3.weight"))
    packed = any(name.endswith("w12.weight") for name in tensors)
    model = _Model(config, head, inner, packed)
    model.load_state_dict(tensors, strict=True)
    return padded_rows(model, head, texts, dtype)


@pytest.mark.parametrize("name", NEO)
def test_the_golden_files_are_what_torch_answers(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_golden(name, _answers, tmp_path_factory)


SHAPES = {
    "published heads": {"layers": 3, "hidden": 768, "heads": 12, "inner": 3072, "vocab": 300, "positions": 96},
    "five heads": {"layers": 1, "hidden": 320, "heads": 5, "inner": 100, "positions": 40},
    "apart": {"layers": 2, "hidden": 60, "heads": 3, "inner": 37, "positions": 33, "layout": "apart"},
}


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("head", ["features", "classify"])
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_models_answer_as_torch(shape: str, head: str, dtype: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"seed": 77, **SHAPES[shape]}
    folder = make_checkpoint(tmp_path / "checkpoint", "neobert", head, **options)
    check_compiled(folder, head, dtype, options["positions"], _answers, tmp_path)
