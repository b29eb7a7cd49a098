"""Jina's XLM-RoBERTa against a model of torch, padded and masked: transformers has none, so it is written here again.

From what is published of jinaai/xlm-roberta-flash-implementation. It shares nothing with encast, nor with the NumPy of
``xlm_roberta_flash_family``.
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
FLASH = "xlm-roberta-flash"
NAMES = [name for name, case in CASES.items() if case.arch == FLASH and "embed" not in case.head]
Array = np.ndarray[Any, Any]


class _Mixer(nn.Module):  # type: ignore[misc]
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.Wqkv, self.out_proj = heads, nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Any, angles: Any, bias: Any) -> Any:
        # [texts, tokens, 3, heads, size], of each text the heads before its tokens.
        parts = self.Wqkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        query, key, value = (parts[:, :, index] for index in range(3))
        if angles is not None:
            query, key = (part * angles.cos() + _exchanged(part) * angles.sin() for part in (query, key))
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.out_proj(mixed.transpose(1, 2).flatten(-2))


def _exchanged(x: Any) -> Any:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class _Mlp(nn.Module):  # type: ignore[misc]
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x: Any) -> Any:
        return self.fc2(functional.gelu(self.fc1(x)))


class _Block(nn.Module):  # type: ignore[misc]
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["layer_norm_eps"]
        self.mixer = _Mixer(hidden, config["num_attention_heads"])
        self.mlp = _Mlp(hidden, config["intermediate_size"])
        self.norm1, self.norm2 = nn.LayerNorm(hidden, eps), nn.LayerNorm(hidden, eps)

    def forward(self, x: Any, angles: Any, bias: Any) -> Any:
        x = self.norm1(x + self.mixer(x, angles, bias))
        return self.norm2(x + self.mlp(x))


class _Encoder(nn.Module):  # type: ignore[misc]
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, hidden = config, config["hidden_size"]
        self.rotary = config["position_embedding_type"] == "rotary"
        tables = {"word_embeddings": config["vocab_size"], "token_type_embeddings": config["type_vocab_size"]}
        if not self.rotary:
            tables["position_embeddings"] = config["max_position_embeddings"]
        self.embeddings = nn.ModuleDict({name: nn.Embedding(rows, hidden) for name, rows in tables.items()})
        self.emb_ln = nn.LayerNorm(hidden, config["layer_norm_eps"])
        blocks = nn.ModuleList(_Block(config) for _ in range(config["num_hidden_layers"]))
        self.encoder = nn.ModuleDict({"layers": blocks})

    def forward(self, ids: Any, mask: Any) -> Any:
        x = self.embeddings["word_embeddings"](ids) + self.embeddings["token_type_embeddings"](torch.zeros_like(ids))
        angles = None
        if self.rotary:
            size = self.config["hidden_size"] // self.config["num_attention_heads"]
            speeds = self.config["rotary_emb_base"] ** (-torch.arange(0, size, 2, dtype=x.dtype) / size)
            angles = torch.outer(torch.arange(ids.shape[1], dtype=x.dtype), speeds).repeat(1, 2)
        else:
            pad = self.config["pad_token_id"]
            real = (ids != pad).long()
            x = x + self.embeddings["position_embeddings"](real.cumsum(1) * real + pad)
        bias = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, -torch.inf)[:, None, None, :]
        x = self.emb_ln(x)
        for block in self.encoder["layers"]:
            x = block(x, angles, bias)
        return x


class _Model(nn.Module):  # type: ignore[misc]
    """With the tensors' names of the hub, so that a checkpoint's must fit strictly."""

    def __init__(self, config: dict[str, Any], head: str) -> None:
        super().__init__()
        self.head, hidden = head, config["hidden_size"]
        self.roberta = _Encoder(config)
        labels = len(config.get("id2label", ()))
        if head == "classify":
            self.classifier = nn.ModuleDict({"dense": nn.Linear(hidden, hidden), "out_proj": nn.Linear(hidden, labels)})
        elif head == "tag":
            self.classifier = nn.Linear(hidden, labels)
        elif head == "answer":
            self.qa_outputs = nn.Linear(hidden, labels)
        elif head == "fill_mask":
            self.lm_head = nn.ModuleDict(
                {"dense": nn.Linear(hidden, hidden), "layer_norm": nn.LayerNorm(hidden, config["layer_norm_eps"])}
            )
            self.lm_head.bias = nn.Parameter(torch.zeros(config["vocab_size"]))

    def forward(self, ids: Any, mask: Any) -> Any:
        x = self.roberta(ids, mask)
        if self.head == "classify":
            return self.classifier["out_proj"](torch.tanh(self.classifier["dense"](x[:, 0])))
        if self.head == "fill_mask":
            x = self.lm_head["layer_norm"](functional.gelu(self.lm_head["dense"](x)))
            return functional.linear(x, self.roberta.embeddings["word_embeddings"].weight, self.lm_head.bias)
        last = {"tag": "classifier", "answer": "qa_outputs"}.get(self.head)
        return getattr(self, last)(x) if last else x


def _answers(folder: Path, head: str, texts: list[list[int]], dtype: Any) -> Array:
    """Of all texts in one padded batch, their rows one after another."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    if head == "features":
        tensors = {f"roberta.{name}": tensor for name, tensor in tensors.items()}
    model = _Model(config, head)
    model.load_state_dict(tensors, strict=True)
    return padded_rows(model, head, texts, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_the_golden_files_are_what_torch_answers(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_golden(name, _answers, tmp_path_factory)


SHAPES = {
    "published heads": {"layers": 3, "hidden": 768, "heads": 12, "inner": 3072, "vocab": 300, "positions": 96},
    "five heads": {"layers": 1, "hidden": 320, "heads": 5, "inner": 100, "positions": 40},
    "absolute": {"layers": 2, "hidden": 60, "heads": 3, "inner": 37, "positions": 33, "layout": "absolute"},
}


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("head", ["features", "classify"])
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_models_answer_as_torch(shape: str, head: str, dtype: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"seed": 77, "type_vocab": 1, **SHAPES[shape]}
    folder = make_checkpoint(tmp_path / "checkpoint", FLASH, head, **options)
    check_compiled(folder, head, dtype, options["positions"] - 1, _answers, tmp_path)
